//! The parameters of a model: named tensors, with or without gradients.

use std::ffi::CString;
use std::fmt;
use std::rc::Rc;

use tessera_sys as sys;

use crate::error::{Error, Result};
use crate::raw;
use crate::tensor::{IntoTensor, Tensor, View, ViewMut};

/// Named tensors in the order of registration; [`params!`](crate::params) writes them as a table.
///
/// A wrong length is reported by the call that takes the parameters.
#[derive(Debug, Default)]
pub struct Params {
    items: Vec<(String, Tensor)>,
    error: Option<Error>,
}

impl Params {
    /// No parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter. `name` is UTF-8 with dots between modules: `"fc1.weight"`.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, tensor: impl IntoTensor) -> Self {
        let name = name.into();
        match tensor.into_tensor() {
            Ok(tensor) => self.items.push((name, tensor)),
            Err(error) if self.error.is_none() => {
                self.error = Some(Error::new(error.code(), format!("{name}: {}", error.message())));
            }
            Err(_) => {}
        }
        self
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn into_items(self) -> Result<Vec<(String, Tensor)>> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.items),
        }
    }
}

/// [`Params`] as a table of `name => (Vec, shape)`, or `name => tensor`.
///
/// ```
/// use tessera::params;
/// let (w, b) = (vec![0.0f32; 10 * 64], vec![0.0f32; 10]);
/// let params = params!["fc.weight" => (w, [10, 64]), "fc.bias" => (b, [10])];
/// assert_eq!(params.len(), 2);
/// ```
#[macro_export]
macro_rules! params {
    ($($name:expr => $tensor:expr),* $(,)?) => {
        $crate::Params::new()$(.with($name, $tensor))*
    };
}

/// Names and tensors as C's `tsr_param`s, which borrow from it.
pub(crate) struct RawParams {
    _names: Vec<CString>,
    params: Vec<sys::tsr_param>,
}

impl RawParams {
    pub(crate) fn new(items: &[(String, Tensor)]) -> Result<Self> {
        let names = items.iter().map(|(name, _)| raw::c_string("the name", name)).collect::<Result<Vec<_>>>()?;
        let params = names
            .iter()
            .zip(items)
            .map(|(name, (_, tensor))| sys::tsr_param { name: name.as_ptr(), tensor: tensor.as_raw() })
            .collect();
        Ok(RawParams { _names: names, params })
    }

    pub(crate) fn as_slice(&self) -> &[sys::tsr_param] {
        &self.params
    }

    pub(crate) fn as_ptr(&self) -> *const sys::tsr_param {
        self.params.as_ptr()
    }
}

/// Parameters and their gradients, as optimizers see them. Shared by the objects whose C side points into them.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub(crate) params: Vec<(String, Tensor)>,
    pub(crate) grads: Vec<Tensor>,
}

impl Group {
    pub(crate) fn param(&self, index: usize) -> Result<&Tensor> {
        self.params.get(index).map(|(_, tensor)| tensor).ok_or_else(|| self.no_such(index))
    }

    pub(crate) fn grad(&self, index: usize) -> Result<&Tensor> {
        self.grads.get(index).ok_or_else(|| self.no_such(index))
    }

    pub(crate) fn name(&self, index: usize) -> &str {
        self.params.get(index).map_or("", |(name, _)| name)
    }

    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|(other, _)| other == name)
    }

    fn no_such(&self, index: usize) -> Error {
        Error::argument(format!("parameter {index} does not exist; the model has {}", self.params.len()))
    }

    pub(crate) fn named_params(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.params.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    pub(crate) fn named_grads(&self) -> impl Iterator<Item = (GradientOf<'_>, &Tensor)> {
        self.params.iter().zip(&self.grads).map(|((name, _), grad)| (GradientOf(name), grad))
    }
}

/// A gradient's name in messages.
pub(crate) struct GradientOf<'a>(pub(crate) &'a str);

impl fmt::Display for GradientOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gradient of {}", self.0)
    }
}

macro_rules! group_accessors {
    () => {
        /// The number of parameters.
        pub fn len(&self) -> usize {
            self.group().params.len()
        }

        /// Whether there are no parameters; always false.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// The index of the parameter `name`.
        pub fn index(&self, name: &str) -> Option<usize> {
            self.group().index(name)
        }

        /// The name of parameter `index`; `None` beyond the last.
        pub fn name(&self, index: usize) -> Option<&str> {
            (index < self.len()).then(|| self.group().name(index))
        }

        /// The tensor of parameter `index`, of any dtype: another handle of the same memory.
        ///
        /// # Errors
        /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): there is no such parameter.
        pub fn tensor(&self, index: usize) -> Result<Tensor> {
            let tensor = self.group().param(index)?;
            tensor.check_own()?;
            Ok(tensor.clone())
        }

        /// Parameter `index`, an `f32` tensor, to read.
        ///
        /// # Errors
        /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): there is no such parameter, or it is no `f32`;
        /// [`Code::InvalidState`](crate::Code::InvalidState): a mutable view of it is alive.
        pub fn param(&self, index: usize) -> Result<View<'_, f32>> {
            self.param_as(index)
        }

        /// Parameter `index`, an `f32` tensor, to write.
        ///
        /// # Errors
        /// As [`Self::param`], and while any view of it is alive.
        pub fn param_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
            self.param_mut_as(index)
        }

        /// The gradient of parameter `index`, an `f32` tensor, to read.
        ///
        /// # Errors
        /// As [`Self::param`], and [`Code::InvalidState`](crate::Code::InvalidState) while it is being reduced.
        pub fn grad(&self, index: usize) -> Result<View<'_, f32>> {
            self.grad_as(index)
        }

        /// The gradient of parameter `index`, an `f32` tensor, to write.
        ///
        /// # Errors
        /// As [`Self::grad`], and while any view of it is alive.
        pub fn grad_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
            self.grad_mut_as(index)
        }

        /// [`Self::param`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn param_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
            self.group().param(index)?.view()
        }

        /// [`Self::param_mut`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn param_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
            self.group().param(index)?.view_mut()
        }

        /// [`Self::grad`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn grad_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
            self.group().grad(index)?.view()
        }

        /// [`Self::grad_mut`] for any dtype.
        ///
        /// # Errors
        /// The same errors.
        pub fn grad_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
            self.group().grad(index)?.view_mut()
        }
    };
}
pub(crate) use group_accessors;

/// Parameters with local gradients, for an optimizer without data parallelism.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Local, Sgd};
/// let mut model = Local::new(params!["w" => (vec![1.0f32, 2.0], [2])])?;
/// let mut opt = Sgd::new(&mut model).lr(0.5).build()?;
/// model.grad_mut(0)?.copy_from_slice(&[2.0, -2.0]);
/// opt.step()?;
/// assert_eq!(model.param(0)?[..], [0.0, 3.0]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Local {
    pub(crate) group: Rc<Group>,
}

use crate::element::Element;

impl Local {
    /// Parameters with zero gradients.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::Code::InvalidArgument): a length does not fit its shape.
    pub fn new(params: Params) -> Result<Self> {
        let params = params.into_items()?;
        let grads = params
            .iter()
            .map(|(_, tensor)| Tensor::zeros(tensor.dtype(), tensor.shape()))
            .collect::<Result<Vec<_>>>()?;
        Ok(Local { group: Rc::new(Group { params, grads }) })
    }

    fn group(&self) -> &Group {
        &self.group
    }

    group_accessors!();
}
