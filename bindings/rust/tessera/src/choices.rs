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
