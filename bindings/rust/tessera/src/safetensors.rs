//! Tensors from and to the `safetensors` crate: a rank file of a checkpoint is a safetensors file.

use safetensors::tensor::{Dtype, TensorView};

use crate::element::DType;
use crate::error::{Code, Error, Result};
use crate::tensor::Tensor;

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::BOOL => DType::Bool,
        Dtype::U16 => DType::U16,
        Dtype::U32 => DType::U32,
        Dtype::U64 => DType::U64,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F8_E5M2 => DType::F8E5M2,
        _ => return None,
    })
}

impl TryFrom<&TensorView<'_>> for Tensor {
    type Error = Error;

    /// A copy of the view. `Unsupported`: its dtype is not supported.
    fn try_from(view: &TensorView<'_>) -> Result<Self> {
        let dtype = from_safetensors(view.dtype())
            .ok_or_else(|| Error::new(Code::Unsupported, format!("tensors of {:?} are not supported", view.dtype())))?;
        let tensor = Tensor::zeros(dtype, view.shape())?;
        tensor.bytes_mut()?.copy_from_slice(view.data());
        Ok(tensor)
    }
}

impl Tensor {
    /// The tensor's bytes in memory order with its description, for `safetensors::serialize`.
    ///
    /// # Errors
    /// `InvalidState`: a mutable view is alive; `Unsupported`: the crate has no such dtype.
    pub fn to_safetensors(&self) -> Result<(Dtype, Vec<usize>, Vec<u8>)> {
        let dtype = match self.dtype() {
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::I8 => Dtype::I8,
            DType::U8 => Dtype::U8,
            DType::I16 => Dtype::I16,
            DType::I32 => Dtype::I32,
            DType::I64 => Dtype::I64,
            DType::Bool => Dtype::BOOL,
            DType::U16 => Dtype::U16,
            DType::U32 => Dtype::U32,
            DType::U64 => Dtype::U64,
            DType::F8E4M3 => Dtype::F8_E4M3,
            DType::F8E5M2 => Dtype::F8_E5M2,
            other => {
                return Err(Error::new(Code::Unsupported, format!("the safetensors crate has no dtype for {other}")));
            }
        };
        Ok((dtype, self.shape(), self.bytes()?.to_vec()))
    }
}
