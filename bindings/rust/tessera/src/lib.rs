//! Tessera for Rust: collectives, data-parallel, fully sharded, tensor- and pipeline-parallel training, and distributed
//! checkpoints.
//! Ranks of one job may be written in Rust, Python, Java or C; they share collectives and checkpoints.
//!
//! ```
//! # fn main() -> tessera::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let root = folder.path();
//! # fn forward_backward(_: Vec<usize>, ddp: &Ddp) -> tessera::Result<f32> {
//! #     ddp.grad_mut(0)?.fill(0.1);
//! #     ddp.ready_all()?;
//! #     Ok(1.0)
//! # }
//! # let (w1, b1) = (vec![0.0f32; 128 * 64], vec![0.0f32; 128]);
//! use tessera::{params, AdamW, Comm, Ddp, Sampler, Saver, State};
//!
//! let comm = Comm::from_env()?; // tessera run, torchrun, mpirun, srun, or alone
//! let mut ddp = Ddp::new(&comm, params!["fc1.weight" => (w1, [128, 64]), "fc1.bias" => (b1, [128])])?;
//! let mut opt = AdamW::new(&mut ddp).lr(1e-3).build()?;
//! let mut data = Sampler::new(&comm, 1500).seed(7).build()?;
//! let saver = Saver::at(&comm, root).keep_latest(3).open()?;
//! let mut state = State::new().with("model", &ddp).with("optim", &opt).with("data", &data);
//! for step in saver.resume(&mut state)?..100 {
//!     let loss = forward_backward(data.batch(32)?, &ddp)?; // writes ddp.grad_mut(i), says ddp.ready(i)
//!     ddp.wait()?; // gradients are the average of all ranks now
//!     opt.step()?;
//!     if step % 50 == 49 {
//!         state.set_metric("loss", loss.into())?;
//!         saver.save_async(step + 1, &state)?;
//!     }
//! }
//! saver.wait()?;
//! # assert_eq!(tessera::Checkpoint::open(root)?.step()?, 100);
//! # Ok(()) }
//! ```
//!
//! # What to know
//! - **Errors.** Every call that can fail returns [`Result`]; an [`Error`] has a [`Code`], a message with advice, the
//!   ranks concerned, and its causes. Nothing here panics on bad input, and no destructor panics or blocks. [`record`]
//!   around `main` reports to the launcher why a rank fails.
//! - **Deadlines.** Every wait has one. A dead rank is named within seconds, a late one at the deadline.
//! - **Memory.** Memory that the library uses later is owned by the object concerned: [`Ddp`] owns parameters, an
//!   [`Fsdp`] its shards, a [`TensorParallel`] its slices, an [`Engine`] what it trains, a [`Work`] its buffers, a
//!   [`State`] everything added to it.
//!   Access to [`Tensor`]s is counted, see [`View`].
//! - **Threads.** A [`Comm`] may move between threads but not be shared; [`AbortHandle`], [`Store`] and [`Checkpoint`]
//!   may. [`Ddp`], [`Fsdp`], [`TensorParallel`], [`Pipeline`], [`Engine`], [`Optimizer`] and [`State`] stay on the thread
//!   that made them.
//! - **The library** is found and opened at run time; see [`load`] for where, and for why no `LD_LIBRARY_PATH` is needed.
//!
//! # Features
//! `half` (elements `f16` and `bf16`), `ndarray` (arrays from and into tensors), `safetensors` (tensors from and into
//! that crate's), `object_store` (checkpoints in that crate's stores).
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]
#![warn(missing_debug_implementations)]

mod buffer;
mod callback;
mod checkpoint;
mod choices;
mod comm;
mod cuda_params;
mod data;
mod ddp;
mod element;
mod engine;
mod error;
mod fsdp;
mod grad_scaler;
mod launch;
mod layout;
mod library;
#[cfg(doctest)]
mod lifetimes;
mod loader;
mod log;
mod loss_scale;
mod lr_schedule;
mod mesh;
mod metrics;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "object_store")]
mod objects;
mod optim;
mod params;
mod pipeline;
mod plan;
mod progress;
pub mod random;
mod raw;
#[cfg(feature = "safetensors")]
mod safetensors;
mod saver;
#[rustfmt::skip]
mod settings;
mod state;
mod storage;
mod store;
mod tensor;
mod text;
mod tp;
mod turn;
mod value;
mod work;

pub use buffer::{Buffer, OwnedSlice};
pub use callback::CallbackResult;
pub use checkpoint::{Cast, Checkpoint, ExportOptions, LoadOptions, LoadReport, Verify};
pub use choices::{Creation, DdpHook, DdpJoin, LossReduction, LrDecay, LrWarmup, MetricAverage, MetricKind};
pub use choices::{MetricNormalize, MetricTask, PipelineSchedule, WhenBusy};
pub use comm::{AbortHandle, AfterStream, Comm, CommOptions, CudaTensor, OnStream};
pub use cuda_params::CudaParams;
pub use data::{Sampler, SamplerBuilder};
pub use ddp::{Bucket, BucketStats, Ddp, DdpOptions};
pub use element::{Bool, DType, Element, ReduceOp};
pub use engine::{Engine, EngineBackward, EngineConfig, EngineCounts, EngineForward};
pub use error::{Code, Error, Native, Result};
pub use fsdp::{Backward, Forward, Fsdp, FsdpOptions, FsdpUnit, UnitPhase, Units, Whole};
pub use grad_scaler::{GradScaler, GradScalerBuilder};
pub use launch::{preempt_requested, record, record_error, record_error_about};
pub use layout::{Layout, Placement, Region};
pub use library::{abi_version, library_path, load, version, ABI_VERSION};
pub use log::{reset_log_callback, set_log_callback, set_log_level, with_interrupt, Level};
pub use loss_scale::{LossScale, LossScaleBuilder};
pub use lr_schedule::{LrOneCycleBuilder, LrSchedule, LrWarmupBuilder, LrWarmupCosineBuilder};
pub use mesh::{Mesh, MeshSlice};
pub use metrics::{Metric, MetricBuilder, MetricPart};
#[cfg(feature = "object_store")]
pub use objects::ObjectStorage;
pub use optim::{Adagrad, Adam, AdamW, Lamb, Lion, Optimizer, Sgd, Trainable};
pub use params::{Local, Params};
pub use pipeline::{Pipeline, PipelineBuilder, PipelineStats, StageCall, StageTensor, Stages};
pub use plan::{Collective, Plan};
pub use progress::{Phase, Progress};
pub use saver::{Save, Saver, SaverBuilder};
pub use state::{State, StateDict, StatePart, Stateful};
pub use storage::{KeyStatus, Storage, StorageReader, StorageTraits, StorageUpload};
pub use store::{Store, StoreOptions, StoreServer};
pub use tensor::{IntoTensor, Tensor, TensorInfo, View, ViewMut};
pub use tp::{CrossEntropy, Style, TensorParallel, TensorParallelBuilder, TpAfterStream, TpOnStream};
pub use turn::Turn;
pub use value::Value;
pub use work::Work;

/// The examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
