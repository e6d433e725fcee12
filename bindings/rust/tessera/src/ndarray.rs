//! Tensors from and to `ndarray`'s arrays.

use ndarray::{Array, ArrayD, ArrayViewD, ArrayViewMutD, Dimension, IxDyn};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::pipeline::StageTensor;
use crate::tensor::{IntoTensor, Tensor, View, ViewMut};

impl<T: Element, D: Dimension> IntoTensor for Array<T, D> {
    /// Takes the array's memory if it is in standard layout, else copies its elements in row-major order.
    fn into_tensor(self) -> Result<Tensor> {
        let shape = self.shape().to_vec();
        if self.is_standard_layout() {
            let (data, offset) = self.into_raw_vec_and_offset();
            let len = crate::tensor::count(&shape)?;
            if offset.unwrap_or(0) == 0 && data.len() == len {
                return Tensor::new(data, shape);
            }
            let start = offset.unwrap_or(0);
            return Tensor::new(data[start..start + len].to_vec(), shape);
        }
        Tensor::new(self.iter().copied().collect(), shape)
    }
}

impl Tensor {
    /// A copy as an array.
    ///
    /// # Errors
    /// As [`Tensor::view`].
    pub fn to_array<T: Element>(&self) -> Result<ArrayD<T>> {
        ArrayD::from_shape_vec(IxDyn(&self.shape()), self.to_vec()?).map_err(|error| Error::argument(error.to_string()))
    }
}

impl StageTensor {
    /// The elements as an array.
    ///
    /// # Errors
    /// As [`StageTensor::view`].
    pub fn as_array<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        ArrayViewD::from_shape(IxDyn(&self.shape()), self.view()?).map_err(|error| Error::argument(error.to_string()))
    }
}

impl<T: Element> View<'_, T> {
    /// These elements as an array of `shape`.
    ///
    /// # Errors
    /// `InvalidArgument`: the product of the sizes is not the number of elements.
    pub fn as_array(&self, shape: &[usize]) -> Result<ArrayViewD<'_, T>> {
        ArrayViewD::from_shape(IxDyn(shape), self).map_err(|error| Error::argument(error.to_string()))
    }
}

impl<T: Element> ViewMut<'_, T> {
    /// These elements as a mutable array of `shape`.
    ///
    /// # Errors
    /// As [`View::as_array`].
    pub fn as_array_mut(&mut self, shape: &[usize]) -> Result<ArrayViewMutD<'_, T>> {
        ArrayViewMutD::from_shape(IxDyn(shape), self).map_err(|error| Error::argument(error.to_string()))
    }
}
