//! Parameters and gradients in the memory of a CUDA device, for an optimizer.

use std::rc::Rc;

use tessera_sys as sys;

use crate::comm::CudaTensor;
use crate::error::Result;
use crate::params::Group;
use crate::raw;
use crate::work::Views;

/// Named tensors on one CUDA device with their gradients, which an [`Sgd`](crate::Sgd), [`AdamW`](crate::AdamW)
/// or other optimizer updates there, in the order of [`Optimizer::set_stream`](crate::Optimizer::set_stream).
///
/// Whoever made the tensors keeps their memory until the optimizer is dropped.
#[derive(Debug, Default)]
pub struct CudaParams {
    pub(crate) group: Rc<CudaGroup>,
}

/// Shared with the optimizer that borrows from it.
#[derive(Clone, Debug, Default)]
pub struct CudaGroup {
    items: Vec<(String, CudaTensor, CudaTensor)>,
    pub(crate) views: Group, // of nothing: a program cannot look at memory of a device
}

impl CudaParams {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter, of `f32` or `f64`, and its gradient, of the same dtype and shape.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: CudaTensor, grad: CudaTensor) -> Self {
        Rc::make_mut(&mut self.group).items.push((name.into(), value, grad));
        self
    }
}

impl CudaGroup {
    /// Calls `use_them` with C's view of the parameters and gradients, which lives as long as the call.
    pub(crate) fn with_raw<T>(
        &self,
        use_them: impl FnOnce(&[sys::tsr_param], &[sys::tsr_tensor]) -> Result<T>,
    ) -> Result<T> {
        let names = self.items.iter().map(|(name, ..)| raw::c_string("the name", name)).collect::<Result<Vec<_>>>()?;
        let values = self.items.iter().fold(Views::default(), |views, (_, value, _)| value.clone().into_views(views));
        let grads = self.items.iter().fold(Views::default(), |views, (.., grad)| grad.clone().into_views(views));
        let params: Vec<_> = names
            .iter()
            .zip(values.tensors())
            .map(|(name, &tensor)| sys::tsr_param { name: name.as_ptr(), tensor })
            .collect();
        use_them(&params, grads.tensors())
    }
}
