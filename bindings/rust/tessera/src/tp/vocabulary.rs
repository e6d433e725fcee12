//! Embeddings and cross-entropy over a vocabulary that is cut over the ranks.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use tessera_sys as sys;

use super::regions::c_dim;
use super::TensorParallel;
use crate::choices::LossReduction;
use crate::comm::{Comm, CudaTensor};
use crate::element::{DType, Element};
use crate::error::{check, Error, Result};
use crate::params::GradientOf;
use crate::raw;
use crate::settings::{cross_entropy_setters, CrossEntropySettings};
use crate::tensor::{flat_shape, raw_tensor, Held, Use};

impl TensorParallel<'_> {
    /// Looks up words in an embedding `[words, features]` that is cut over the ranks
    /// ([`Style::Vocabulary`](crate::Style::Vocabulary)) or complete. Collective.
    ///
    /// `ids` are `i32` or `i64`, the same on every rank. `shape` is that of the result: the shape of `ids` and the features
    /// as the last dimension. `output` receives it, with `dim` this rank's part along this dimension; its type is the
    /// parameter's.
    ///
    /// ```
    /// # fn main() -> tessera::Result<()> {
    /// use tessera::{params, Comm, Mesh, Style, TensorParallel};
    /// let comm = Comm::from_env()?;
    /// let mesh = Mesh::new(&comm, &[("tp", comm.world_size()?)])?;
    /// let words = (0..6).map(|i| i as f32).collect::<Vec<_>>();
    /// let tp = TensorParallel::builder(&mesh, params!["tok.weight" => (words, [3, 2])])
    ///     .plan([("tok", Style::Vocabulary)])
    ///     .build()?;
    /// let mut rows = [0.0f32; 4];
    /// tp.embed(0, &[2i64, 0], &mut rows, &[2, 2], None)?;
    /// assert_eq!(rows, [4.0, 5.0, 0.0, 1.0]);
    /// tp.embed_backward(0, &[2i64, 0], &[1.0f32; 4], &[2, 2], None)?; // adds to tp.grad(0)
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// See [Activations](#activations), and `InvalidArgument`: an id is outside of the vocabulary, or the parameter does
    /// not exist, is not an embedding or has another dtype; `InvalidState`: a mutable view of its slice is alive.
    pub fn embed<T: Element, I: Element>(
        &self,
        index: usize,
        ids: &[I],
        output: &mut [T],
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<()> {
        let param = self.inner.param(index)?;
        let of_ids = self.sizes("ids", ids.len(), without_features(shape), None)?;
        let part = self.sizes("output", output.len(), shape, dim)?;
        let _slice = Held::new([(&param.name, &param.slice)].into_iter(), Use::Reads)?;
        let ids = raw_tensor(ids.as_ptr().cast_mut().cast(), &of_ids, I::DTYPE);
        let output = raw_tensor(output.as_mut_ptr().cast(), &part, T::DTYPE);
        let (tp, dim) = (self.inner.as_ptr(), c_dim(dim)?);
        // SAFETY: the handle is alive and used by this thread alone; the slices are borrowed for the call, which returns when
        // it is done with them, and nobody writes the parameter meanwhile.
        check(unsafe { sys::tsr_tp_embed(tp, index, &ids, dim, &output, ptr::null_mut(), ptr::null_mut()) })
    }

    /// The adjoint of [`embed`](Self::embed): adds `grad`, the gradient of what `embed` returned, to the gradients of this
    /// rank's words, in the order of the ids. Collective with `dim`. The other arguments are those of forward.
    ///
    /// # Errors
    /// As [`embed`](Self::embed); `InvalidState`: a view of the parameter's gradient is alive; `NoMemory`.
    pub fn embed_backward<T: Element, I: Element>(
        &self,
        index: usize,
        ids: &[I],
        grad: &[T],
        shape: &[usize],
        dim: Option<usize>,
    ) -> Result<()> {
        let sum = self.inner.grad(index)?;
        let of_ids = self.sizes("ids", ids.len(), without_features(shape), None)?;
        let part = self.sizes("grad", grad.len(), shape, dim)?;
        let _grad = Held::new([(GradientOf(&self.inner.param(index)?.name), sum)].into_iter(), Use::Writes)?;
        let ids = raw_tensor(ids.as_ptr().cast_mut().cast(), &of_ids, I::DTYPE);
        let grad = raw_tensor(grad.as_ptr().cast_mut().cast(), &part, T::DTYPE);
        let (tp, dim, sum) = (self.inner.as_ptr(), c_dim(dim)?, sum.as_raw());
        // SAFETY: the handle is alive and used by this thread alone; the slices are borrowed for the call, which returns when
        // it is done with them, and nobody sees the gradient meanwhile.
        check(unsafe {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            sys::tsr_tp_embed_backward(tp, index, &ids, &grad, dim, &sum, stream, work)
        })
    }

    /// Cross-entropy of logits whose vocabulary is cut over the ranks (Shoeybi et al. 2019), and its gradient, by two sums
    /// of a few numbers per row. It computes in `f32`, or in `f64` for `f64` logits. Collective.
    ///
    /// `logits` are `[rows, classes of this rank]`, of `f16`, `bf16`, `f32` or `f64`: the vocabulary is cut like
    /// `torch.chunk` ([`part`](Self::part)), and a rank may have no classes. `targets` are `i32` or `i64`, one per row, the
    /// same on every rank. `loss` receives one element, or with [`LossReduction::None`] one per row, of `f32`, or `f64` for
    /// `f64` logits. `grad` receives the gradient of the loss (with `None` of each row's loss) by this rank's logits.
    ///
    /// # Errors
    /// See [Activations](#activations), and `InvalidArgument`: a target is neither a class nor
    /// [`ignore_index`](CrossEntropy::ignore_index), a setting is out of range, or a dtype is another one.
    pub fn cross_entropy<T: Element, I: Element, L: Element>(
        &self,
        settings: &CrossEntropy<'_>,
        logits: &[T],
        targets: &[I],
        loss: &mut [L],
        grad: Option<&mut [T]>,
    ) -> Result<()> {
        let sizes = self.of_logits("logits", settings, logits.len(), targets.len())?;
        let grad = match grad {
            Some(grad) => {
                self.of_logits("grad", settings, grad.len(), targets.len())?;
                Some(raw_tensor(grad.as_mut_ptr().cast(), &sizes, T::DTYPE))
            }
            None => None,
        };
        let logits = raw_tensor(logits.as_ptr().cast_mut().cast(), &sizes, T::DTYPE);
        let (tp, grad) = (self.inner.as_ptr(), grad.as_ref().map_or(ptr::null(), ptr::from_ref));
        settings.with_raw(targets, loss, |options, vocabulary, targets, loss| {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the handle is alive, it and the communicator are used by this thread alone; all memory is borrowed for
            // the call, which returns when it is done with it.
            unsafe { sys::tsr_tp_cross_entropy(tp, &logits, vocabulary, targets, options, loss, grad, stream, work) }
        })
    }

    /// [`cross_entropy`](Self::cross_entropy) whose gradient replaces the logits.
    ///
    /// # Errors
    /// The same errors.
    pub fn cross_entropy_in_place<T: Element, I: Element, L: Element>(
        &self,
        settings: &CrossEntropy<'_>,
        logits: &mut [T],
        targets: &[I],
        loss: &mut [L],
    ) -> Result<()> {
        let sizes = self.of_logits("logits", settings, logits.len(), targets.len())?;
        let (tp, logits) = (self.inner.as_ptr(), raw_tensor(logits.as_mut_ptr().cast(), &sizes, T::DTYPE));
        settings.with_raw(targets, loss, |options, vocabulary, targets, loss| {
            let (stream, work) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: as in `cross_entropy`.
            unsafe { sys::tsr_tp_cross_entropy(tp, &logits, vocabulary, targets, options, loss, &logits, stream, work) }
        })
    }

    /// C's shape of `len` logits.
    fn of_logits(&self, what: &str, settings: &CrossEntropy<'_>, len: usize, rows: usize) -> Result<[i64; 2]> {
        let classes = self.part(settings.vocabulary);
        if rows.checked_mul(classes.len()) != Some(len) {
            return Err(Error::argument(format!(
                "{what} has {len} elements; this rank has the classes {classes:?} of {}, in {rows} rows",
                settings.vocabulary
            )));
        }
        Ok([raw::int64("the number of targets", rows)?, raw::int64("the vocabulary", classes.len())?])
    }
}

/// The shape of the ids of an embedding's activation.
fn without_features(shape: &[usize]) -> &[usize] {
    shape.split_last().map_or(&[], |(_, ids)| ids)
}

/// A slice of some element type.
#[derive(Clone, Copy, Debug)]
struct Weights<'a> {
    data: *const c_void,
    len: usize,
    dtype: DType,
    _borrowed: PhantomData<&'a [u8]>,
}

/// The vocabulary and settings of [`TensorParallel::cross_entropy`], those of `torch.nn.functional.cross_entropy`.
/// Settings that are not set have the library's defaults. The same on every rank.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{params, Comm, CrossEntropy, Mesh, TensorParallel};
/// let comm = Comm::from_env()?;
/// let mesh = Mesh::new(&comm, &[("tp", comm.world_size()?)])?;
/// let tp = TensorParallel::builder(&mesh, params!["w" => (vec![1.0f32], [1])]).build()?;
/// let classes = tp.part(3).len(); // of this rank
/// let (logits, targets) = (vec![0.0f32; 2 * classes], [2i64, -100]); // 2 rows, of which one is ignored
/// let (mut loss, mut grad) = ([0.0f32], vec![0.0f32; 2 * classes]);
/// tp.cross_entropy(&CrossEntropy::new(3), &logits, &targets, &mut loss, Some(&mut grad))?;
/// assert!((loss[0] - 3f32.ln()).abs() < 1e-6);
/// let smooth = CrossEntropy::new(3).label_smoothing(0.1).class_weights(&[1.0f32, 1.0, 2.0]);
/// tp.cross_entropy(&smooth, &logits, &targets, &mut loss, None)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct CrossEntropy<'a> {
    pub(super) vocabulary: usize,
    pub(super) settings: CrossEntropySettings,
    class_weights: Option<Weights<'a>>,
    pub(super) cuda_weights: Option<&'a CudaTensor>,
    pub(super) data_ranks: Option<&'a Comm>,
}

impl<'a> CrossEntropy<'a> {
    /// All defaults, for `vocabulary` classes over all ranks.
    pub fn new(vocabulary: usize) -> Self {
        let settings = CrossEntropySettings::default();
        CrossEntropy { vocabulary, settings, class_weights: None, cuda_weights: None, data_ranks: None }
    }

    cross_entropy_setters!();

    /// A weight for each class of the full vocabulary, `f32` or `f64`. The default is none.
    #[must_use = "the setting is in what is returned"]
    pub fn class_weights<W: Element>(mut self, weights: &'a [W]) -> Self {
        let (data, len, dtype) = (weights.as_ptr().cast(), weights.len(), W::DTYPE);
        self.class_weights = Some(Weights { data, len, dtype, _borrowed: PhantomData });
        self
    }

    /// The same on a device, for the operations of [`TensorParallel::on_stream`](crate::TensorParallel::on_stream).
    #[must_use = "the setting is in what is returned"]
    pub fn cuda_class_weights(mut self, weights: &'a CudaTensor) -> Self {
        self.cuda_weights = Some(weights);
        self
    }

    /// The ranks that have other rows of the batch, such as a mesh's "dp". The default is none. The mean is then over the
    /// rows of all of them, each rank's loss is its own rows' part, and losses and gradients of these ranks add up: reduce
    /// them by [`ReduceOp::Sum`](crate::ReduceOp::Sum), not `Avg`. The call is then collective over these ranks too.
    #[must_use = "the setting is in what is returned"]
    pub fn data_ranks(mut self, comm: &'a Comm) -> Self {
        self.data_ranks = Some(comm);
        self
    }

    /// Runs a call of C with the settings, the vocabulary, and tensors of targets and loss.
    fn with_raw<I: Element, L: Element>(
        &self,
        targets: &[I],
        loss: &mut [L],
        call: impl FnOnce(
            *const sys::tsr_cross_entropy_options,
            i64,
            *const sys::tsr_tensor,
            *const sys::tsr_tensor,
        ) -> sys::tsr_status,
    ) -> Result<()> {
        let vocabulary = raw::int64("the vocabulary", self.vocabulary)?;
        let rows = flat_shape(targets.len());
        let of_weights = flat_shape(self.class_weights.map_or(0, |weights| weights.len));
        let weights = self.class_weights.map(|weights| raw_tensor(weights.data.cast_mut(), &of_weights, weights.dtype));
        self.settings.with_raw(|raw| {
            let (of_loss, expected) = match raw.reduction {
                sys::TSR_LOSS_NONE => (&rows[..], targets.len()),
                _ => (&[][..], 1),
            };
            if loss.len() != expected {
                return Err(Error::argument(format!(
                    "the loss has {} elements; this reduction of {} rows needs {expected}",
                    loss.len(),
                    targets.len()
                )));
            }
            raw.class_weights = weights.as_ref().map_or(ptr::null(), ptr::from_ref);
            raw.data_ranks = self.data_ranks.map_or(ptr::null_mut(), Comm::as_ptr);
            let targets = raw_tensor(targets.as_ptr().cast_mut().cast(), &rows, I::DTYPE);
            let loss = raw_tensor(loss.as_mut_ptr().cast(), of_loss, L::DTYPE);
            check(call(raw, vocabulary, &targets, &loss))
        })
    }
}
