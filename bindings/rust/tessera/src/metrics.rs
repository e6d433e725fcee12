//! Metrics over the samples of all ranks.

use std::fmt;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use tessera_sys as sys;

use crate::choices::{MetricAverage, MetricKind, MetricNormalize, MetricTask};
use crate::comm::Comm;
use crate::element::DType;
use crate::error::{check, Error, Result};
use crate::raw::{self, created};
use crate::settings::{metric_setters, MetricSettings};
use crate::tensor::{slice, Held, Tensor, Use};

/// A metric of the samples of all ranks: exact, with the same bits on all ranks and for every number of ranks.
/// [`Metric::update`] adds this rank's samples and communicates nothing; [`Metric::compute`] is collective.
/// `docs/METRICS.md` lists the kinds, what each takes, and the options and arrays that it has.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::{Metric, MetricKind, Tensor};
/// let mut auroc = Metric::new(MetricKind::Auroc).build()?;
/// let scores = Tensor::new(vec![0.1f32, 0.4, 0.35, 0.8], [4])?;
/// let labels = Tensor::new(vec![0i64, 0, 1, 1], [4])?;
/// auroc.update(&scores, Some(&labels))?;
/// assert_eq!(auroc.compute(None)?, 0.75);
/// # Ok(()) }
/// ```
pub struct Metric {
    inner: Rc<MetricInner>,
    kind: MetricKind,
}

/// Shared with the states whose C side points at it.
pub(crate) struct MetricInner(NonNull<sys::tsr_metric>);

impl Drop for MetricInner {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_metric_destroy(self.as_ptr()) }
    }
}

impl MetricInner {
    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_metric {
        self.0.as_ptr()
    }
}

/// Builds a [`Metric`]. Settings that are not set have the library's defaults. The same on every rank.
#[derive(Debug)]
#[must_use = "it is a builder: call build()"]
pub struct MetricBuilder {
    kind: MetricKind,
    settings: MetricSettings,
}

impl MetricBuilder {
    metric_setters!();

    /// Creates the metric.
    ///
    /// # Errors
    /// `InvalidArgument`: the kind does not have an option, or not this value.
    pub fn build(self) -> Result<Metric> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the options are borrowed for the call.
        self.settings.with_raw(|raw| check(unsafe { sys::tsr_metric_create(self.kind as i32, raw, &mut handle) }))?;
        Ok(Metric { inner: Rc::new(MetricInner(created(handle)?)), kind: self.kind })
    }
}

/// A metric and the ranks that compute it, for a [`State`](crate::State). Rank 0 saves all samples: call
/// [`Metric::gather`] before a save. A load gives them to rank 0 and resets the metric on the other ranks, whatever their
/// number. A save or load while another rank has samples is `InvalidState`.
#[derive(Debug)]
pub struct MetricPart<'a> {
    metric: &'a Metric,
    comm: &'a Comm,
}

impl MetricPart<'_> {
    pub(crate) fn inner(&self) -> &Rc<MetricInner> {
        &self.metric.inner
    }

    pub(crate) fn comm(&self) -> &Comm {
        self.comm
    }
}

impl Metric {
    /// Starts building a metric; finish with `build()`.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(kind: MetricKind) -> MetricBuilder {
        MetricBuilder { kind, settings: MetricSettings::default() }
    }

    /// The kind that it was built with.
    pub fn kind(&self) -> MetricKind {
        self.kind
    }

    /// This metric, computed by the ranks of `comm`, as a part of a [`State`](crate::State).
    pub fn on<'a>(&'a self, comm: &'a Comm) -> MetricPart<'a> {
        MetricPart { metric: self, comm }
    }

    /// Adds this rank's samples. The last dimension is for classes, labels or outputs if there are several. Means and sums
    /// have no targets.
    ///
    /// # Errors
    /// `InvalidArgument`: shapes or types do not fit, a number is not finite, or a label is out of range; the message has
    /// its index. The update has added nothing; unless one succeeds afterwards, [`Self::compute`] returns this on all ranks,
    /// once; until then a merge or save of the metric is `InvalidState`. `Unsupported`: a tensor is on a device. `InvalidState`: a mutable view of a tensor is alive.
    pub fn update(&mut self, predictions: &Tensor, targets: Option<&Tensor>) -> Result<()> {
        self.update_with(predictions, targets, None, None)
    }

    /// The same with weights of 0 or more, or only with the samples for which `valid` (`u8` or [`Bool`](crate::Bool)) is
    /// not 0; [`Sampler::valid`](crate::Sampler::valid) has it for a batch.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn update_with(
        &mut self,
        predictions: &Tensor,
        targets: Option<&Tensor>,
        weights: Option<&Tensor>,
        valid: Option<&Tensor>,
    ) -> Result<()> {
        let given = [("predictions", Some(predictions)), ("targets", targets), ("weights", weights), ("valid", valid)];
        let tensors = given.iter().filter_map(|(name, tensor)| tensor.map(|tensor| (*name, tensor)));
        let _held = Held::new(tensors, Use::Reads)?;
        let raw = given.map(|(_, tensor)| tensor.map(Tensor::as_raw));
        let [p, t, w, v] = raw.each_ref().map(|tensor| tensor.as_ref().map_or(ptr::null(), ptr::from_ref));
        // SAFETY: the handle is alive and used by this thread alone, and the tensors are held; so in every method below.
        check(unsafe { sys::tsr_metric_update(self.inner.as_ptr(), p, t, w, v) })
    }

    /// The metric of all samples of all ranks of `comm`: those that have the samples, each sample once, which in a mesh are
    /// those of the data-parallel dimension. Collective; ranks without samples take part. `None`: of this rank's samples
    /// alone. The samples stay. NaN if the metric is not defined, and for what has arrays instead.
    ///
    /// # Errors
    /// `Mismatch`: the ranks compute different metrics. `InvalidArgument`: an update failed. `Timeout`, `Aborted`,
    /// `PeerLost`, `Interrupted`.
    pub fn compute(&mut self, comm: Option<&Comm>) -> Result<f64> {
        let mut value = 0.0;
        let comm = comm.map_or(ptr::null_mut(), Comm::as_ptr);
        check(unsafe { sys::tsr_metric_compute(self.inner.as_ptr(), comm, &mut value) })?;
        Ok(value)
    }

    fn result<T: Copy>(&self, name: &str, dtype: DType) -> Result<Vec<T>> {
        let c_name = raw::c_string("the name", name)?;
        let mut array = raw::empty_tensor();
        check(unsafe { sys::tsr_metric_result(self.inner.as_ptr(), c_name.as_ptr(), &mut array) })?;
        if array.dtype != dtype.as_raw() {
            let (has, call) = if dtype == DType::I64 { ("numbers", "array") } else { ("counts", "counts") };
            return Err(Error::argument(format!("the array {name:?} has {has}; call {call}({name:?})")));
        }
        // SAFETY: a result has as many sizes as dimensions, and its elements until the next call.
        let shape = unsafe { slice(array.shape, usize::try_from(array.ndim).unwrap_or(0)) };
        let len = shape.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product();
        Ok(unsafe { slice(array.data.cast::<T>(), len) }.to_vec())
    }

    /// An array that the last [`Self::compute`] found, in row-major order: "fpr", "tpr", "precision", "recall",
    /// "thresholds", "values", and "matrix" if it is weighted or normalized. The arrays of curves of several classes have
    /// the class after their name: "fpr.0".
    ///
    /// # Errors
    /// `NotFound`: the metric has no such array; the message lists those that it has. `InvalidArgument`: it has counts.
    pub fn array(&self, name: &str) -> Result<Vec<f64>> {
        self.result(name, DType::F64)
    }

    /// The counts of the last [`Self::compute`], in row-major order: "matrix" of samples without weights.
    ///
    /// # Errors
    /// `NotFound`: the metric has no such array. `InvalidArgument`: it has no counts.
    pub fn counts(&self, name: &str) -> Result<Vec<i64>> {
        self.result(name, DType::I64)
    }

    /// Adds the samples of another metric of the same kind and options, which keeps them.
    ///
    /// # Errors
    /// `InvalidArgument`: kind or options differ. `InvalidState`: an update of `other` failed, and no call has reported it.
    pub fn merge(&mut self, other: &Metric) -> Result<()> {
        check(unsafe { sys::tsr_metric_merge(self.inner.as_ptr(), other.inner.as_ptr()) })
    }

    /// Moves the samples of all ranks to rank 0, before a save. Collective.
    ///
    /// # Errors
    /// As [`Self::compute`].
    pub fn gather(&mut self, comm: &Comm) -> Result<()> {
        check(unsafe { sys::tsr_metric_gather(self.inner.as_ptr(), comm.as_ptr()) })
    }

    /// Forgets all samples and results.
    ///
    /// # Errors
    /// None in practice.
    pub fn reset(&mut self) -> Result<()> {
        check(unsafe { sys::tsr_metric_reset(self.inner.as_ptr()) })
    }
}

impl fmt::Debug for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metric").field("kind", &self.kind).finish_non_exhaustive()
    }
}
