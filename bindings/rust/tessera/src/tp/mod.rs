//! Tensor-parallel training: each rank computes with a slice of every large parameter. The activations between its regions
//! are in `regions`, embeddings and losses in `vocabulary`, and both for tensors on a device in `with_cuda`.

mod regions;
mod vocabulary;
mod with_cuda;

use std::cell::OnceCell;
use std::fmt;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use tessera_sys as sys;

pub use self::vocabulary::CrossEntropy;
pub use self::with_cuda::{TpAfterStream, TpOnStream};
use crate::choices::Creation;
use crate::comm::Borrowed;
use crate::element::{DType, Element};
use crate::error::{check, Error, Result};
use crate::layout::Layout;
use crate::mesh::{Mesh, MeshDim};
use crate::params::{Group, Params, RawParams};
use crate::raw::{self, created};
use crate::settings::{tp_setters, TpSettings};
use crate::tensor::{slice, Held, Tensor, Use, View, ViewMut};

/// What a plan does with a parameter. Weights are `[outputs, inputs, ...]`.
///
/// Dimensions are cut like `torch.chunk`: equal parts of `ceil(size / ranks)`, then a shorter one, then empty ones. So
/// sizes need not divide by the number of ranks, and a slice may be empty.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Style<'l> {
    /// Every rank holds all of it, like all parameters that no pattern matches.
    Replicate,
    /// Weights and biases are cut along dimension 0: each rank computes some of the outputs.
    Column,
    /// Weights are cut along dimension 1: each rank takes some of the inputs. Biases, which have one dimension, are
    /// replicated; [`TensorParallel::leave`] adds them once, after the sum.
    Row,
    /// [`Column`](Self::Column), cut between attention heads, of which this is the number. Each rank gets equally many.
    ColumnHeads(usize),
    /// [`Row`](Self::Row), cut between attention heads, of which this is the number. Each rank gets equally many.
    RowHeads(usize),
    /// The weight `[words, features]` of an embedding, cut along dimension 0; see [`TensorParallel::embed`].
    Vocabulary,
    /// Replicated, and used where each rank has a part of the sequence, such as the weight of a norm:
    /// [`TensorParallel::sum_grads`] sums its gradient over the ranks.
    Sequence,
    /// Cut along this dimension.
    Shard(usize),
    /// Cut as a layout of the parameter over the ranks of the dimension says, for weights that join several, such as q,
    /// k and v. Its boxes are complete in all dimensions but one, and a rank's slice has its boxes one after another
    /// along that dimension.
    Layout(&'l Layout),
}

impl Style<'_> {
    fn rule(self, pattern: *const std::ffi::c_char) -> Result<sys::tsr_tp_rule> {
        let rule = |style| sys::tsr_tp_rule { pattern, style, dim: 0, layout: ptr::null(), heads: 0, reserved: 0 };
        let heads = |style, count| match raw::int32("the number of heads", count)? {
            0 => Err(Error::argument("the number of heads is 0; it must be at least 1")),
            heads => Ok(sys::tsr_tp_rule { heads, ..rule(style) }),
        };
        Ok(match self {
            Style::Replicate => rule(sys::TSR_TP_REPLICATE),
            Style::Column => rule(sys::TSR_TP_COLUMN),
            Style::Row => rule(sys::TSR_TP_ROW),
            Style::ColumnHeads(count) => heads(sys::TSR_TP_COLUMN, count)?,
            Style::RowHeads(count) => heads(sys::TSR_TP_ROW, count)?,
            Style::Vocabulary => rule(sys::TSR_TP_VOCABULARY),
            Style::Sequence => rule(sys::TSR_TP_SEQUENCE),
            Style::Shard(dim) => {
                sys::tsr_tp_rule { dim: raw::int32("the sharded dimension", dim)?, ..rule(sys::TSR_TP_SHARD) }
            }
            Style::Layout(layout) => sys::tsr_tp_rule { layout: layout.as_ptr(), ..rule(sys::TSR_TP_LAYOUT) },
        })
    }
}

/// Builds a [`TensorParallel`]; created by [`TensorParallel::builder`]. Settings that are not set have the library's
/// defaults. The same on every rank.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Comm, DType, Mesh, Style, Tensor, TensorParallel};
/// let comm = Comm::from_env()?;
/// let mesh = Mesh::new(&comm, &[("dp", 1), ("tp", comm.world_size()?)])?;
/// let tp = TensorParallel::builder(
///     &mesh,
///     params![
///         "layers.0.wq.weight" => (vec![0.5f32; 16], [4, 4]),
///         "layers.0.wk.weight" => (vec![0.5f32; 16], [4, 4]),
///         "norm.weight" => Tensor::deferred(DType::F32, [4])?, // zeros, until a checkpoint is loaded
///     ],
/// )
/// .dim("tp")
/// .plan([("layers.*.w[qk]", Style::Column), ("norm", Style::Sequence)])
/// .sequence_parallel(true)
/// .build()?;
/// assert_eq!((tp.cut(0), tp.cut(2)), (Some(0), None));
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "it is a builder: call build()"]
pub struct TensorParallelBuilder<'c, 'l> {
    mesh: &'c Mesh,
    dim: Option<String>,
    params: Params,
    plan: Vec<(String, Style<'l>)>,
    settings: TpSettings,
}

impl<'c, 'l> TensorParallelBuilder<'c, 'l> {
    /// The mesh's dimension over whose ranks parameters are cut. The default is the only one.
    pub fn dim(mut self, name: impl Into<String>) -> Self {
        self.dim = Some(name.into());
        self
    }

    /// Adds entries to the plan: a pattern, and what to do with the parameters that it matches.
    ///
    /// A pattern is a shell pattern for each dotted part of a name: `*` matches any characters but dots, `?` one
    /// character, `[abc]` one of a set. It matches a parameter, or all parameters of a module: `"layers.*.attn.w[qkv]"`
    /// matches `"layers.0.attn.wq.weight"` and `"layers.0.attn.wq.bias"`.
    pub fn plan<N: Into<String>>(mut self, entries: impl IntoIterator<Item = (N, Style<'l>)>) -> Self {
        self.plan.extend(entries.into_iter().map(|(pattern, style)| (pattern.into(), style)));
        self
    }

    tp_setters!();

    /// Cuts the parameters, checks that the ranks' plans are equal, and gives each rank its slices. The given tensors are
    /// read here and not used later. Collective over the ranks of the dimension.
    ///
    /// # Errors
    /// `InvalidArgument`: a pattern matches nothing, several match a parameter, a parameter cannot have its style, a
    /// length does not fit its shape, or a name occurs twice, on all ranks, naming the rank; the mesh has several
    /// dimensions and none was chosen. `Mismatch`: the ranks' plans differ, and the message names the first difference.
    /// `NotFound`: the mesh has no such dimension; `InvalidState`: a mutable view of a tensor is alive; `Timeout`,
    /// `Aborted`, `PeerLost`, `NoMemory`, `Interrupted`.
    pub fn build(self) -> Result<TensorParallel<'c>> {
        let ranks = self.mesh.one_dim(self.dim.as_deref())?;
        let comm = self.mesh.comm_of(self.dim.as_deref())?;
        let params = comm.or_refuse(Creation::Model, || self.params.into_items())?;
        let values = params.iter().filter(|(_, tensor)| !tensor.is_deferred());
        let held =
            comm.or_refuse(Creation::Model, || Held::new(values.map(|(name, tensor)| (name, tensor)), Use::Reads))?;
        let raw_params = comm.or_refuse(Creation::Model, || RawParams::new(&params))?;
        let patterns = comm.or_refuse(Creation::Model, || {
            self.plan.iter().map(|(pattern, _)| raw::c_string("the pattern", pattern)).collect::<Result<Vec<_>>>()
        })?;
        let rules = comm.or_refuse(Creation::Model, || {
            let rules = patterns.iter().zip(&self.plan);
            rules.map(|(pattern, (_, style))| style.rule(pattern.as_ptr())).collect::<Result<Vec<_>>>()
        })?;
        let mut ptr = ptr::null_mut();
        comm.creating(Creation::Model, |reached| {
            self.settings.with_raw(|raw| {
                let (mesh, rules, n_rules) = (ranks.as_ptr(), rules.as_ptr(), rules.len());
                let (params, n) = (raw_params.as_ptr(), params.len());
                reached.set(true);
                // SAFETY: the new object keeps the mesh; all else is borrowed for the call.
                check(unsafe { sys::tsr_tp_create(mesh, params, n, rules, n_rules, raw, &mut ptr) })
            })
        })?;
        drop(held);
        let handle = Arc::new(Handle { ptr: created(ptr)?, ranks });
        let mut inner = TpInner { handle, params: Vec::new(), trained: OnceCell::new() };
        inner.read()?;
        Ok(TensorParallel { inner: Rc::new(inner), _comm: Borrowed::new() })
    }
}

/// A model of which each rank holds slices: it computes with a slice of every large parameter, and between such regions
/// of the model, activations are gathered, summed or split.
///
/// The trainer multiplies; this object holds the slices and their gradients, and moves [activations](#activations). A
/// two-layer perceptron whose first weight is cut by columns and whose second by rows needs one sum in forward and one
/// in backward. Parameters are numbered in the order of registration.
///
/// While views are alive, calls that would change their memory fail with
/// [`Code::InvalidState`](crate::Code::InvalidState): an optimizer's step and a load for a slice,
/// [`embed_backward`](Self::embed_backward) for a gradient. Drop them at the end of a block.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Comm, Mesh, Sgd, Style, TensorParallel};
///
/// /// A matrix with rows as long as `x` times `x`.
/// fn product(rows: usize, matrix: &[f32], x: &[f32]) -> Vec<f32> {
///     (0..rows).map(|row| x.iter().zip(&matrix[row * x.len()..]).map(|(x, m)| x * m).sum()).collect()
/// }
///
/// let comm = Comm::from_env()?;
/// let mesh = Mesh::new(&comm, &[("tp", comm.world_size()?)])?;
/// let (w1, w2) = (vec![0.5f32; 12], vec![0.25f32; 8]);
/// let mut tp = TensorParallel::builder(
///     &mesh,
///     params!["fc1.weight" => (w1, [4, 3]), "fc2.weight" => (w2, [2, 4]), "fc2.bias" => (vec![1.0f32; 2], [2])],
/// )
/// .plan([("fc1", Style::Column), ("fc2", Style::Row)])
/// .build()?;
/// let mut opt = Sgd::new(&mut tp).lr(0.1).build()?;
///
/// let x = [1.0f32, 2.0, 3.0];
/// let width = tp.part(4).len(); // of the 4 hidden features, on this rank
/// let hidden = product(width, &tp.slice(0)?, &x);
/// let mut y = product(2, &tp.slice(1)?, &hidden); // this rank's summand
/// tp.leave_in_place(&mut y, &[2], Some(&tp.slice(2)?))?;
/// assert_eq!(y, [4.0, 4.0]);
///
/// let mut dx = [0.0f32; 3]; // of the loss y[0] + y[1]
/// for (i, h) in hidden.iter().enumerate() {
///     let dh = tp.slice(1)?[i] + tp.slice(1)?[width + i];
///     tp.grad_mut(1)?[i] = *h;
///     tp.grad_mut(1)?[width + i] = *h;
///     for (k, dx) in dx.iter_mut().enumerate() {
///         tp.grad_mut(0)?[3 * i + k] = dh * x[k];
///         *dx += dh * tp.slice(0)?[3 * i + k];
///     }
/// }
/// tp.grad_mut(2)?.fill(1.0);
/// tp.enter_backward_in_place(&mut dx)?;
/// assert_eq!(dx, [1.0; 3]);
/// tp.sum_grads()?;
/// opt.step()?;
/// assert_eq!(tp.slice(2)?[..], [0.9; 2]);
/// # Ok(()) }
/// ```
pub struct TensorParallel<'c> {
    inner: Rc<TpInner>,
    _comm: Borrowed<'c>,
}

/// The C object and what it uses. Operations in the background share it, and so do slices and models over them.
pub(crate) struct Handle {
    ptr: NonNull<sys::tsr_tp>,
    ranks: MeshDim, // dropped after the C object
}

// SAFETY: only `TpInner`, which stays on its thread, calls the library with it; an operation in the background merely keeps
// it. The last owner destroys it, on whatever thread that is.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_tp {
        self.ptr.as_ptr()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorParallel").finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this was the last owner: operations, optimizers and states that used it are gone.
        unsafe { sys::tsr_tp_destroy(self.ptr.as_ptr()) }
    }
}

struct Param {
    name: String,
    shape: Vec<usize>,
    cut: Option<usize>,
    /// Of the handle's memory, which it keeps.
    slice: Tensor,
    slice_shape: Vec<usize>,
    /// Its number among those that have a gradient, the floating-point ones.
    trained: Option<usize>,
}

/// Shared with the optimizers and states whose C side points at it.
pub struct TpInner {
    handle: Arc<Handle>,
    params: Vec<Param>,
    /// From the first use of a gradient, so that a model that is not trained needs no memory for them.
    trained: OnceCell<Group>,
}

impl fmt::Debug for TpInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.named_slices()).finish()
    }
}

impl TpInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_tp {
        self.handle.ptr.as_ptr()
    }

    pub(crate) fn named_slices(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.params.iter().map(|param| (param.name.as_str(), &param.slice))
    }

    /// The library's parameters and views of slices.
    fn read(&mut self) -> Result<()> {
        let (mut count, mut trained) = (0, 0);
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_tp_param_count(self.as_ptr(), &mut count) })?;
        for index in 0..count {
            let mut param = self.read_param(index)?;
            if matches!(param.slice.dtype(), DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
                param.trained = Some(trained);
                trained += 1;
            }
            self.params.push(param);
        }
        Ok(())
    }

    fn read_param(&self, index: usize) -> Result<Param> {
        let mut cut = 0;
        // SAFETY: plain structs of which zero is a value; what is read of them lives as long as the handle, which the tensor
        // keeps.
        unsafe {
            let (mut whole, mut part): (sys::tsr_param, sys::tsr_param) = (std::mem::zeroed(), std::mem::zeroed());
            check(sys::tsr_tp_param(self.as_ptr(), index, &mut whole, ptr::null_mut(), &mut cut))?;
            check(sys::tsr_tp_slice(self.as_ptr(), index, &mut part))?;
            let name = raw::text(whole.name);
            let sizes = slice(whole.tensor.shape, usize::try_from(whole.tensor.ndim).unwrap_or(0));
            let shape = sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
            let tensor = Tensor::owned_by(&part.tensor, Box::new(Arc::clone(&self.handle)))?;
            let (cut, slice_shape) = (usize::try_from(cut).ok(), tensor.shape());
            Ok(Param { name, shape, cut, slice: tensor, slice_shape, trained: None })
        }
    }

    fn param(&self, index: usize) -> Result<&Param> {
        let no_such =
            || Error::argument(format!("parameter {index} does not exist; the model has {}", self.params.len()));
        self.params.get(index).ok_or_else(no_such)
    }

    /// Parameters with a gradient, and the gradients.
    pub(crate) fn trained(&self) -> Result<&Group> {
        if let Some(group) = self.trained.get() {
            return Ok(group);
        }
        let mut group = Group { params: Vec::new(), grads: Vec::new() };
        for (index, param) in self.params.iter().enumerate().filter(|(_, param)| param.trained.is_some()) {
            // SAFETY: a plain struct of which zero is a value; the memory lives as long as the handle, whose owner also owns
            // the tensor.
            let grad = unsafe {
                let mut view: sys::tsr_tensor = std::mem::zeroed();
                check(sys::tsr_tp_grad(self.as_ptr(), index, &mut view))?;
                Tensor::borrowed(&view)?
            };
            group.params.push((param.name.clone(), param.slice.clone()));
            group.grads.push(grad);
        }
        Ok(self.trained.get_or_init(|| group))
    }

    fn grad(&self, index: usize) -> Result<&Tensor> {
        let param = self.param(index)?;
        let position = param.trained.ok_or_else(|| {
            Error::state(format!(
                "parameter \"{}\" is {} and has no gradient; only floating-point parameters have one",
                param.name,
                param.slice.dtype()
            ))
        })?;
        self.trained()?.grad(position)
    }
}

impl<'c> TensorParallel<'c> {
    /// Starts building a model of these parameters, whose shapes are those of the complete ones. Their values are read on
    /// rank 0, or with [`sync_values(false)`](TensorParallelBuilder::sync_values) on every rank; the others may give
    /// [`Tensor::deferred`] ones. If rank 0 does too, the slices are zeros, for example until a checkpoint is loaded.
    pub fn builder<'l>(mesh: &'c Mesh, params: Params) -> TensorParallelBuilder<'c, 'l> {
        TensorParallelBuilder { mesh, dim: None, params, plan: Vec::new(), settings: TpSettings::default() }
    }

    pub(crate) fn inner(&self) -> &Rc<TpInner> {
        &self.inner
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.inner.handle
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.inner.params.len()
    }

    /// Whether there are no parameters; always false.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of the parameters, without leading `module.` and `_orig_mod.`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.params.iter().map(|param| param.name.as_str())
    }

    /// The index of the parameter `name`.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.names().position(|other| other == name)
    }

    /// The name of parameter `index`; `None` beyond the last.
    pub fn name(&self, index: usize) -> Option<&str> {
        self.inner.params.get(index).map(|param| param.name.as_str())
    }

    /// The full shape of parameter `index`; `None` beyond the last.
    pub fn shape(&self, index: usize) -> Option<&[usize]> {
        self.inner.params.get(index).map(|param| param.shape.as_slice())
    }

    /// The shape of this rank's slice of parameter `index`; `None` beyond the last.
    pub fn slice_shape(&self, index: usize) -> Option<&[usize]> {
        self.inner.params.get(index).map(|param| param.slice_shape.as_slice())
    }

    /// The dimension along which parameter `index` is cut; `None` if every rank has all of it, and beyond the last.
    pub fn cut(&self, index: usize) -> Option<usize> {
        self.inner.params.get(index).and_then(|param| param.cut)
    }

    /// This rank's indices of a dimension of `size` that is cut over the ranks like `torch.chunk`, such as the outputs of
    /// a [`Style::Column`] weight, or an activation's dimension. They may be none.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// # use tessera::{params, Comm, Mesh, TensorParallel};
    /// # let comm = Comm::from_env()?;
    /// # let mesh = Mesh::new(&comm, &[("tp", 1)])?;
    /// # let tp = TensorParallel::builder(&mesh, params!["w" => (vec![1.0f32], [1])]).build()?;
    /// assert_eq!(tp.part(5), 0..5); // on one rank; on two ranks they have 0..3 and 3..5
    /// # Ok(()) }
    /// ```
    pub fn part(&self, size: usize) -> Range<usize> {
        let ranks = &self.inner.handle.ranks;
        let most = size.div_ceil(ranks.size());
        let begin = ranks.rank().saturating_mul(most).min(size);
        begin..begin.saturating_add(most).min(size)
    }

    /// Which rank holds which part of parameter `index`, over all ranks of the communicator that the mesh was made from.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist; `NoMemory`.
    pub fn layout(&self, index: usize) -> Result<Layout> {
        let ndim = self.inner.param(index)?.shape.len();
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::tsr_tp_layout(self.inner.as_ptr(), index, &mut handle) })?;
        Ok(Layout::from_raw(created(handle)?, ndim))
    }

    /// This rank's slices of all parameters. They are other handles of the slices' memory.
    pub fn slices(&self) -> Params {
        self.inner.named_slices().fold(Params::new(), |params, (name, slice)| params.with(name, slice.clone()))
    }

    /// This rank's slice of parameter `index` as a tensor, such as for a unit of
    /// [`Fsdp::over_slices`](crate::Fsdp::over_slices). It is another handle of the slice's memory.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist.
    pub fn slice_tensor(&self, index: usize) -> Result<Tensor> {
        Ok(self.inner.param(index)?.slice.clone())
    }

    /// This rank's slice of parameter `index`, an `f32` tensor of [`slice_shape`](Self::slice_shape), to read.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is not `f32`; `InvalidState`: a mutable view of it is
    /// alive.
    pub fn slice(&self, index: usize) -> Result<View<'_, f32>> {
        self.slice_as(index)
    }

    /// [`Self::slice`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn slice_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        self.inner.param(index)?.slice.view()
    }

    /// This rank's slice of parameter `index`, an `f32` tensor, to write.
    ///
    /// # Errors
    /// As [`Self::slice`], and while any view of it is alive.
    pub fn slice_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.slice_mut_as(index)
    }

    /// [`Self::slice_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn slice_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
        self.inner.param(index)?.slice.view_mut()
    }

    /// The gradient of this rank's slice of parameter `index`, an `f32` tensor of the slice's shape, to read; initially
    /// zero. The first use of a gradient, or an optimizer of the model, allocates all of them.
    ///
    /// # Errors
    /// `InvalidArgument`: the parameter does not exist, or it is not `f32`; `InvalidState`: it is not a floating-point
    /// parameter, or a mutable view of the gradient is alive; `NoMemory`.
    pub fn grad(&self, index: usize) -> Result<View<'_, f32>> {
        self.grad_as(index)
    }

    /// [`Self::grad`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn grad_as<T: Element>(&self, index: usize) -> Result<View<'_, T>> {
        self.inner.grad(index)?.view()
    }

    /// The gradient of this rank's slice of parameter `index`, an `f32` tensor, to write.
    ///
    /// # Errors
    /// As [`Self::grad`], and while any view of it is alive.
    pub fn grad_mut(&self, index: usize) -> Result<ViewMut<'_, f32>> {
        self.grad_mut_as(index)
    }

    /// [`Self::grad_mut`] for any dtype.
    ///
    /// # Errors
    /// The same errors.
    pub fn grad_mut_as<T: Element>(&self, index: usize) -> Result<ViewMut<'_, T>> {
        self.inner.grad(index)?.view_mut()
    }

    /// Sums over the ranks the gradients of which each rank has a part: those of [`Style::Sequence`] and, with
    /// [`sequence_parallel`](TensorParallelBuilder::sequence_parallel), of the biases of [`Style::Row`]. All others are
    /// complete on their rank. Call it once per step, after backward and before clipping and the optimizer's step.
    /// Collective.
    ///
    /// # Errors
    /// `Mismatch`, `Timeout`, `Aborted`, `PeerLost`, `NoMemory`, `Interrupted`.
    pub fn sum_grads(&mut self) -> Result<()> {
        let _grads = Held::new(self.inner.trained()?.named_grads(), Use::Writes)?;
        // SAFETY: the handle is alive and used by this thread alone, and no view of a gradient is alive.
        check(unsafe { sys::tsr_tp_sum_grads(self.inner.as_ptr(), ptr::null_mut()) })
    }

    /// Sets every gradient to zero.
    ///
    /// # Errors
    /// None in practice.
    pub fn zero_grad(&mut self) -> Result<()> {
        let _grads = self.inner.trained.get().map(|group| Held::new(group.named_grads(), Use::Writes)).transpose()?;
        // SAFETY: as in `sum_grads`.
        check(unsafe { sys::tsr_tp_zero_grad(self.inner.as_ptr()) })
    }
}

impl fmt::Debug for TensorParallel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
