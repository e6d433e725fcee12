//! The values of options that choose one of several ways.

use tessera_sys as sys;

/// What reduces a bucket; [`Ddp::set_hook`](crate::Ddp::set_hook) brings one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DdpHook {
    /// An all-reduce.
    AllReduce = sys::TSR_DDP_HOOK_ALL_REDUCE as isize,
    /// Products of low rank stand for matrices, with error feedback.
    PowerSgd = sys::TSR_DDP_HOOK_POWER_SGD as isize,
    /// Nothing: each rank keeps its own gradients.
    Noop = sys::TSR_DDP_HOOK_NOOP as isize,
}

/// Whether ranks may have different numbers of steps, and what sums are divided by once some ranks have joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DdpJoin {
    /// All ranks make the same number of steps.
    Off = sys::TSR_DDP_JOIN_OFF as isize,
    /// By the number of ranks.
    DivideByWorld = sys::TSR_DDP_JOIN_DIVIDE_BY_WORLD as isize,
    /// By the number of ranks that have not joined.
    DivideByActive = sys::TSR_DDP_JOIN_DIVIDE_BY_ACTIVE as isize,
}

/// What ranks create together from a communicator, for [`Comm::refuse`](crate::Comm::refuse).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Creation {
    /// A `Ddp`, `Fsdp` or `TensorParallel`, or an `Engine`.
    Model = sys::TSR_CREATES_MODEL as isize,
    /// A `Pipeline`.
    Pipeline = sys::TSR_CREATES_PIPELINE as isize,
    /// A `Mesh`.
    Mesh = sys::TSR_CREATES_MESH as isize,
    /// A communicator, by a split; also a `Saver`.
    Comm = sys::TSR_CREATES_COMM as isize,
}

/// What [`Saver::save_async`](crate::Saver::save_async) does while another save is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WhenBusy {
    /// Wait until it is done.
    #[default]
    Wait = sys::TSR_BUSY_WAIT as isize,
    /// Returns [`Code::NotReady`](crate::Code::NotReady).
    Refuse = sys::TSR_BUSY_REFUSE as isize,
    /// Queues behind it; a save that is queued and has not begun gives way, and ends with [`Code::Aborted`](crate::Code::Aborted).
    Replace = sys::TSR_BUSY_REPLACE as isize,
}

/// How [`TensorParallel::cross_entropy`](crate::TensorParallel::cross_entropy) joins the losses of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReduction {
    /// Each row has its own.
    None = sys::TSR_LOSS_NONE as isize,
    /// By the mean, weighted by the targets' class weights; over no rows it is NaN.
    Mean = sys::TSR_LOSS_MEAN as isize,
    /// By the sum.
    Sum = sys::TSR_LOSS_SUM as isize,
}

/// How the rate of [`LrSchedule::wsd`](crate::LrSchedule::wsd) decays, by the share u of the decay that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LrDecay {
    /// 1 - u.
    Linear = sys::TSR_LR_DECAY_LINEAR as isize,
    /// (1 + cos(pi u)) / 2.
    Cosine = sys::TSR_LR_DECAY_COSINE as isize,
    /// 1 - sqrt(u).
    Sqrt = sys::TSR_LR_DECAY_SQRT as isize,
}

/// How the warm-ups of DeepSpeed rise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LrWarmup {
    /// With the logarithm of the step.
    Log = sys::TSR_LR_WARMUP_LOG as isize,
    /// In a line.
    Linear = sys::TSR_LR_WARMUP_LINEAR as isize,
}

/// The order in which a rank of a [`Pipeline`](crate::Pipeline) computes, and which stages it has. P is the number of
/// ranks, m the number of micro-batches. In a loop, stage i is on rank i modulo P. In a V, rank r has the stages r and
/// 2P - 1 - r. A split backward computes the gradients of the inputs first, and those of the weights later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PipelineSchedule {
    /// One stage per rank: all forwards, then all backwards.
    GPipe = sys::TSR_SCHEDULE_GPIPE as isize,
    /// One stage per rank, m at least P. Keeps fewer activations than `GPipe`.
    OneFOneB = sys::TSR_SCHEDULE_1F1B as isize,
    /// A loop: `GPipe` with several stages per rank.
    LoopedBfs = sys::TSR_SCHEDULE_LOOPED_BFS as isize,
    /// A loop, m a multiple of max(1, m / P). Has shorter bubbles than `OneFOneB`.
    Interleaved1F1B = sys::TSR_SCHEDULE_INTERLEAVED_1F1B as isize,
    /// `Interleaved1F1B` with a split backward.
    InterleavedZeroBubble = sys::TSR_SCHEDULE_INTERLEAVED_ZERO_BUBBLE as isize,
    /// One stage per rank, split backward. Keeps twice the activations of `OneFOneB`.
    ZbH2 = sys::TSR_SCHEDULE_ZB_H2 as isize,
    /// A V with a split backward: no bubble, and the activations of `OneFOneB`.
    Zbv = sys::TSR_SCHEDULE_ZBV as isize,
    /// A V, m at least 2P, with a partly split backward.
    DualPipeV = sys::TSR_SCHEDULE_DUALPIPEV as isize,
}

/// What a [`Metric`](crate::Metric) computes. `docs/METRICS.md` lists what each takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricKind {
    /// The mean of numbers, without targets.
    Mean = sys::TSR_METRIC_MEAN as isize,
    /// The sum of numbers, without targets.
    Sum = sys::TSR_METRIC_SUM as isize,
    /// The mean absolute error of numbers.
    MeanAbsoluteError = sys::TSR_METRIC_MEAN_ABSOLUTE_ERROR as isize,
    /// The mean squared error of numbers.
    MeanSquaredError = sys::TSR_METRIC_MEAN_SQUARED_ERROR as isize,
    /// The root of each output's mean squared error.
    RootMeanSquaredError = sys::TSR_METRIC_ROOT_MEAN_SQUARED_ERROR as isize,
    /// The coefficient of determination.
    R2Score = sys::TSR_METRIC_R2_SCORE as isize,
    /// The share of samples whose label, or all of whose labels, are right.
    Accuracy = sys::TSR_METRIC_ACCURACY as isize,
    /// The share of samples whose class is among the k with the largest scores.
    TopKAccuracy = sys::TSR_METRIC_TOP_K_ACCURACY as isize,
    /// The mean recall of the classes that have samples.
    BalancedAccuracy = sys::TSR_METRIC_BALANCED_ACCURACY as isize,
    /// The array "matrix" of true classes and predicted classes.
    ConfusionMatrix = sys::TSR_METRIC_CONFUSION_MATRIX as isize,
    /// The share of predicted positives that are positive.
    Precision = sys::TSR_METRIC_PRECISION as isize,
    /// The share of positives that are predicted.
    Recall = sys::TSR_METRIC_RECALL as isize,
    /// The weighted harmonic mean of precision and recall.
    FBeta = sys::TSR_METRIC_F_BETA as isize,
    /// The arrays "fpr", "tpr" and "thresholds".
    RocCurve = sys::TSR_METRIC_ROC_CURVE as isize,
    /// The arrays "precision", "recall" and "thresholds".
    PrecisionRecallCurve = sys::TSR_METRIC_PRECISION_RECALL_CURVE as isize,
    /// The sum of precision times steps of recall.
    AveragePrecision = sys::TSR_METRIC_AVERAGE_PRECISION as isize,
    /// The area under the ROC curve.
    Auroc = sys::TSR_METRIC_AUROC as isize,
    /// The mean negative log-likelihood of labels.
    LogLoss = sys::TSR_METRIC_LOG_LOSS as isize,
    /// The exponential of the mean cross entropy of logits.
    Perplexity = sys::TSR_METRIC_PERPLEXITY as isize,
    /// The ROC curve at fixed thresholds.
    BinnedRocCurve = sys::TSR_METRIC_BINNED_ROC_CURVE as isize,
    /// The precision-recall curve at fixed thresholds.
    BinnedPrecisionRecallCurve = sys::TSR_METRIC_BINNED_PRECISION_RECALL_CURVE as isize,
    /// The average precision of the curve at fixed thresholds.
    BinnedAveragePrecision = sys::TSR_METRIC_BINNED_AVERAGE_PRECISION as isize,
    /// The area under the ROC curve at fixed thresholds.
    BinnedAuroc = sys::TSR_METRIC_BINNED_AUROC as isize,
}

/// What the labels of a [`Metric`](crate::Metric) are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricTask {
    /// 0 or 1.
    Binary = sys::TSR_TASK_BINARY as isize,
    /// One of several classes.
    Multiclass = sys::TSR_TASK_MULTICLASS as isize,
    /// Several labels of 0 or 1.
    Multilabel = sys::TSR_TASK_MULTILABEL as isize,
}

/// How the values of classes, labels or outputs of a [`Metric`](crate::Metric) become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricAverage {
    /// Not: the array "values" has them.
    None = sys::TSR_AVERAGE_NONE as isize,
    /// The metric of all decisions together.
    Micro = sys::TSR_AVERAGE_MICRO as isize,
    /// The mean.
    Macro = sys::TSR_AVERAGE_MACRO as isize,
    /// Weighted by the samples of each class.
    Weighted = sys::TSR_AVERAGE_WEIGHTED as isize,
    /// The mean of each sample's value.
    Samples = sys::TSR_AVERAGE_SAMPLES as isize,
}

/// What the cells of a confusion matrix are divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetricNormalize {
    /// Nothing.
    None = sys::TSR_NORMALIZE_NONE as isize,
    /// The sum of the row.
    True = sys::TSR_NORMALIZE_TRUE as isize,
    /// The sum of the column.
    Predictions = sys::TSR_NORMALIZE_PREDICTIONS as isize,
    /// The sum of all.
    All = sys::TSR_NORMALIZE_ALL as isize,
}
