//! A committed checkpoint, opened for reading.

use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use tessera_sys as sys;

use crate::comm::Comm;
use crate::element::DType;
use crate::error::{check, Code, Error, Result};
use crate::progress::{watch, Progress, Watcher};
use crate::raw::{self, created, path_string};
use crate::settings::{export_setters, load_setters, ExportSettings, LoadSettings};
use crate::state::State;
use crate::storage::{Storage, StorageHandle};
use crate::tensor::{Held, Tensor, TensorInfo, Use};

/// How to load. What is not set is the library's default: verified and strict, and each rank for itself.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions<'a> {
    comm: Option<&'a Comm>,
    settings: LoadSettings,
    only: Option<Vec<String>>,
    rules: Vec<(String, String)>,
}

impl<'a> LoadOptions<'a> {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The ranks that load together, which makes the load collective: each of them loads the same checkpoint, verified or
    /// not as the others; states, layouts, names and what is allowed may differ. Ranks of one host then read each byte that several
    /// of them want once (from 8 MiB on), and hand it on through shared memory. All ranks get the
    /// same error. The deadline of each wait is the communicator's.
    #[must_use]
    pub fn comm(mut self, comm: &'a Comm) -> Self {
        self.comm = Some(comm);
        self
    }

    /// The names of the state that are loaded, or patterns of them: `*` is any characters, dots too, `?` one, `[a-c]` and
    /// `[!a-c]` one of a set. All other names, of the state and of the checkpoint, are left alone: neither loaded nor missing
    /// nor unexpected. The default is all names; a load fails if no name of the state fits a pattern.
    #[must_use]
    pub fn only(mut self, patterns: &[&str]) -> Self {
        self.only = Some(patterns.iter().map(|&pattern| pattern.to_owned()).collect());
        self
    }

    /// What a name of the checkpoint is in the state; with a `.` at the end, or empty, what names begin with there and here.
    /// Called again it adds a rule: the first that fits counts. Of a value of one rank it is about the name without
    /// `rank/<r>/`.
    #[must_use]
    pub fn rename(mut self, saved: &str, here: &str) -> Self {
        self.rules.push((saved.to_owned(), here.to_owned()));
        self
    }

    load_setters!();
}

/// What a load did beyond what is strict, by names of the state, and whether it was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Names of the state that the checkpoint lacks ([`LoadOptions::allow_missing`]); they are as they were.
    pub missing: Vec<String>,
    /// Names of the checkpoint that the state lacks ([`LoadOptions::allow_unexpected`]).
    pub unexpected: Vec<String>,
    /// Tensors that were converted ([`LoadOptions::allow_cast`]).
    pub cast: Vec<Cast>,
    /// Names of the state that were not loaded since [`LoadOptions::only`] does not have them.
    pub left_alone: Vec<String>,
    /// Whether checksums have shown that all data of tensors is sound: not without [`LoadOptions::verify`], and not of
    /// formats that have none, such as safetensors of others.
    pub verified: bool,
}

/// A tensor that a load converted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cast {
    /// Its name in the state.
    pub name: String,
    /// Its type in the checkpoint.
    pub saved: DType,
    /// Its type in the state.
    pub here: DType,
}

impl LoadReport {
    fn from_json(text: &str) -> Result<Self> {
        let told: serde_json::Value = serde_json::from_str(text)
            .map_err(|error| Error::new(Code::Internal, format!("cannot parse the load report {text}: {error}")))?;
        let list = |key: &str| told[key].as_array().cloned().unwrap_or_default();
        let names = |key| list(key).iter().filter_map(|name| name.as_str().map(str::to_owned)).collect();
        let dtype = |name: &serde_json::Value| match name.as_str() {
            Some("f16") => Ok(DType::F16),
            Some("bf16") => Ok(DType::BF16),
            Some("f32") => Ok(DType::F32),
            Some("f64") => Ok(DType::F64),
            _ => Err(Error::new(Code::Version, format!("a load converted the unknown dtype {name}"))),
        };
        let cast = |one: &serde_json::Value| {
            let name = one["name"].as_str().unwrap_or_default().to_owned();
            Ok(Cast { name, saved: dtype(&one["from"])?, here: dtype(&one["to"])? })
        };
        Ok(LoadReport {
            missing: names("missing"),
            unexpected: names("unexpected"),
            cast: list("cast").iter().map(cast).collect::<Result<_>>()?,
            left_alone: names("left_alone"),
            verified: told["verified"].as_bool().unwrap_or_default(),
        })
    }
}

/// The library's report of a load.
unsafe extern "C" fn take_report(json: *const c_char, user_data: *mut c_void) {
    // SAFETY: `user_data` is the String that load_watched lends for the call; the text is C's, and copied.
    unsafe { *user_data.cast::<String>() = raw::text(json) }
}

/// How much of a checkpoint [`Checkpoint::verify`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verify {
    /// Sizes and headers.
    Headers,
    /// Every byte.
    Full,
}

/// A committed checkpoint, written by ranks of whatever number and language. It needs no job, and may be read from many
/// threads at once.
///
/// ```no_run
/// # fn main() -> tessera::Result<()> {
/// use tessera::Checkpoint;
/// let checkpoint = Checkpoint::open("checkpoints/latest")?;
/// for tensor in checkpoint.tensors()? {
///     println!("{} {} {:?}", tensor.name, tensor.dtype, tensor.shape);
/// }
/// let w = checkpoint.read("model.fc1.weight")?.to_vec::<f32>()?;
/// # Ok(()) }
/// ```
pub struct Checkpoint {
    handle: NonNull<sys::tsr_checkpoint>,
}

// SAFETY: all functions but destroy take it `const`, which the C API defines as thread-safe.
unsafe impl Send for Checkpoint {}
unsafe impl Sync for Checkpoint {}

impl Checkpoint {
    /// Opens a checkpoint's directory, or the newest checkpoint of a root (or of a root's `latest`), or the best one of a
    /// root's `best` ([`SaverBuilder::best_metric`](crate::SaverBuilder::best_metric)); or what others wrote: a directory of
    /// `torch.distributed.checkpoint`, a file of `torch.save` (or the directory of a `model.pt`), safetensors as Hugging Face
    /// lays them out. While a save of Tessera is open no saver removes it.
    ///
    /// # Errors
    /// `NotFound`: no manifest, so no committed checkpoint; `Corrupt`, `Version`, `Io`, `InvalidArgument`; those of
    /// [`load`](crate::load).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        crate::load()?;
        let path = path_string(path.as_ref())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the path is borrowed for the call.
        check(unsafe { sys::tsr_checkpoint_open(path.as_ptr(), &mut handle) })?;
        Ok(Checkpoint { handle: created(handle)? })
    }

    /// Opens a checkpoint in `storage`, where `path` is a key.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`], and what the storage fails with.
    pub fn open_in(storage: Arc<impl Storage>, path: impl AsRef<Path>) -> Result<Self> {
        crate::load()?;
        let path = path_string(path.as_ref())?;
        let storage: Arc<dyn Storage> = storage;
        let storage = StorageHandle::new(&storage)?;
        // SAFETY: the library is loaded.
        let mut options = unsafe { raw::options(sys::tsr_open_options_init) }?;
        options.storage = storage.as_ptr();
        let mut handle = ptr::null_mut();
        // SAFETY: path and options are borrowed for the call; the checkpoint keeps the storage alive.
        check(unsafe { sys::tsr_checkpoint_open_with(path.as_ptr(), &options, &mut handle) })?;
        Ok(Checkpoint { handle: created(handle)? })
    }

    /// The directory that was opened.
    ///
    /// # Errors
    /// None in practice.
    pub fn path(&self) -> Result<PathBuf> {
        // SAFETY: the handle is alive, the buffer as large as said; so in every method below.
        Ok(PathBuf::from(raw::read_text(|text, capacity, size| unsafe {
            sys::tsr_checkpoint_path(self.handle.as_ptr(), text.cast(), capacity, size)
        })?))
    }

    /// The manifest as it stands in the file: JSON.
    ///
    /// # Errors
    /// None in practice.
    pub fn manifest(&self) -> Result<String> {
        raw::read_text(|text, capacity, size| unsafe {
            sys::tsr_checkpoint_manifest(self.handle.as_ptr(), text.cast(), capacity, size)
        })
    }

    /// The step that it was saved at; 0 if its format does not tell, as PyTorch's and safetensors.
    ///
    /// # Errors
    /// None in practice.
    pub fn step(&self) -> Result<u64> {
        let mut step = 0;
        check(unsafe { sys::tsr_checkpoint_step(self.handle.as_ptr(), &mut step) })?;
        Ok(u64::try_from(step).unwrap_or(0))
    }

    /// All tensors, in order of their names.
    ///
    /// # Errors
    /// `Version`: one is of a dtype that these bindings do not know.
    pub fn tensors(&self) -> Result<Vec<TensorInfo>> {
        let mut count = 0;
        check(unsafe { sys::tsr_checkpoint_tensor_count(self.handle.as_ptr(), &mut count) })?;
        (0..count).map(|index| self.tensor(index)).collect()
    }

    fn tensor(&self, index: usize) -> Result<TensorInfo> {
        let (mut name, mut dtype, mut shape, mut ndim) = (ptr::null(), 0, ptr::null(), 0);
        // SAFETY: name and shape live as long as the handle, and are copied.
        unsafe {
            let handle = self.handle.as_ptr();
            check(sys::tsr_checkpoint_tensor(handle, index, &mut name, &mut dtype, &mut shape, &mut ndim))?;
            TensorInfo::new(name, dtype, shape, ndim)
        }
    }

    /// Reads one whole tensor and checks its checksums.
    ///
    /// # Errors
    /// `NotFound`: there is no such tensor; `Corrupt`, `Io`, `Interrupted`.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let found = self.tensors()?.into_iter().find(|tensor| tensor.name == name);
        let info = found.ok_or_else(|| Error::new(Code::NotFound, format!("the checkpoint has no tensor {name:?}")))?;
        let tensor = Tensor::zeros(info.dtype, &info.shape)?;
        self.read_into(name, &tensor)?;
        Ok(tensor)
    }

    /// Reads one whole tensor into memory that is there, of its dtype and shape.
    ///
    /// # Errors
    /// As [`Checkpoint::read`]; `Mismatch`: dtype or shape differ; `InvalidState`: a view of the tensor is alive.
    pub fn read_into(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let _held = Held::new(std::iter::once((name, tensor)), Use::Writes)?;
        let name = raw::c_string("the name", name)?;
        check(unsafe { sys::tsr_checkpoint_read(self.handle.as_ptr(), name.as_ptr(), &tensor.as_raw()) })
    }

    /// Loads this rank's part into `state`, in place, whatever the number of ranks and the layouts at the save were. Each
    /// rank calls it for itself, without communication, unless the options have a [`comm`](LoadOptions::comm). After an
    /// error other than `Mismatch`, parts of the state may have been overwritten.
    ///
    /// # Errors
    /// `Mismatch`: lists all differences; `InvalidArgument`: also, that [`rename`](LoadOptions::rename) makes one name of two;
    /// `Corrupt`, `Io`, `Interrupted`; `InvalidState`: a view of something in the state is alive. With a communicator also `Mismatch`: the ranks load different checkpoints, or one
    /// calls something else; `Timeout`: names who did not come; `Aborted`, `PeerLost`.
    pub fn load(&self, state: &mut State<'_>, options: &LoadOptions<'_>) -> Result<LoadReport> {
        self.load_watched(state, options, None)
    }

    /// [`Checkpoint::load`], telling `progress` on this thread how far it is, in [`Phase::Read`](crate::Phase::Read). A
    /// panic in it goes on when the state is loaded.
    ///
    /// # Errors
    /// As [`Checkpoint::load`].
    pub fn load_with_progress(
        &self,
        state: &mut State<'_>,
        options: &LoadOptions<'_>,
        progress: impl FnMut(Progress),
    ) -> Result<LoadReport> {
        let watcher = watcher_of(progress);
        let report = self.load_watched(state, options, Some(&watcher))?;
        watcher.settle();
        Ok(report)
    }

    fn load_watched(
        &self,
        state: &mut State<'_>,
        options: &LoadOptions<'_>,
        watcher: Option<&Watcher<'_>>,
    ) -> Result<LoadReport> {
        let only = options.only.iter().flatten().map(|pattern| raw::c_string("a pattern of only", pattern));
        let only = only.collect::<Result<Vec<_>>>()?;
        let patterns: Vec<_> = only.iter().map(|pattern| pattern.as_ptr()).collect();
        let name = |name: &str| raw::c_string("a name to rename", name);
        let names = options.rules.iter().map(|(saved, here)| Ok((name(saved)?, name(here)?)));
        let names = names.collect::<Result<Vec<_>>>()?;
        let rules: Vec<_> = names
            .iter()
            .map(|(saved, here)| sys::tsr_name_rule { saved: saved.as_ptr(), here: here.as_ptr() })
            .collect();
        let mut report = String::new();
        options.settings.with_raw(|raw| {
            raw.comm = options.comm.map_or(ptr::null_mut(), Comm::as_ptr);
            if options.only.is_some() {
                raw.only = patterns.as_ptr(); // not null, even of none, which is refused
                raw.only_count = patterns.len();
            }
            raw.rules = rules.as_ptr();
            raw.rule_count = rules.len();
            raw.report = Some(take_report);
            raw.report_data = ptr::from_mut(&mut report).cast();
            if let Some(watcher) = watcher {
                raw.progress = Some(watch);
                raw.progress_data = watcher.user_data();
            }
            // SAFETY: the handles are alive; what the state holds may be written; watcher, names and report outlive the call.
            state.writing(|state| check(unsafe { sys::tsr_checkpoint_load(self.handle.as_ptr(), state, raw) }))
        })?;
        LoadReport::from_json(&report)
    }

    /// Checks the checkpoint without loading it.
    ///
    /// # Errors
    /// `Corrupt`: names file and offset, and its causes list the others; `Io`, `Interrupted`.
    pub fn verify(&self, how: Verify) -> Result<()> {
        check(unsafe { sys::tsr_checkpoint_verify(self.handle.as_ptr(), i32::from(how == Verify::Full)) })
    }

    /// [`Checkpoint::verify`], telling `progress` on this thread how far it is, in
    /// [`Phase::Verify`](crate::Phase::Verify). A panic in it goes on when all is checked.
    ///
    /// # Errors
    /// As [`Checkpoint::verify`].
    pub fn verify_with_progress(&self, how: Verify, progress: impl FnMut(Progress)) -> Result<()> {
        let watcher = watcher_of(progress);
        let full = i32::from(how == Verify::Full);
        // SAFETY: the watcher outlives the call.
        check(unsafe {
            sys::tsr_checkpoint_verify_progress(self.handle.as_ptr(), full, Some(watch), watcher.user_data())
        })?;
        watcher.settle();
        Ok(())
    }
}

/// Of a callback that C calls on one thread, and not within itself.
fn watcher_of<'a>(progress: impl FnMut(Progress) + 'a) -> Watcher<'a> {
    let progress = RefCell::new(progress);
    Watcher::new(move |told| (progress.borrow_mut())(told))
}

/// How [`Checkpoint::export`] writes. What is not set is the library's default: all tensors, in one safetensors file.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    settings: ExportSettings,
}

impl ExportOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    export_setters!();
}

impl Checkpoint {
    /// Writes the tensors into a new directory in another format, in bounded memory. With a `comm` it is collective: every
    /// rank has opened the same checkpoint, and all of them write. The directory appears when all of it is durable. What
    /// cannot be read (`unreadable` in the manifest) is left out, with a warning in the log.
    ///
    /// # Errors
    /// `InvalidArgument`: the directory exists, or there is no tensor to write; `Mismatch`: the ranks differ;
    /// `Unsupported`: a dtype that the format does not have; `Corrupt`, `Io`, `Permission`, `Timeout`, `Aborted`,
    /// `PeerLost`, `Interrupted`.
    pub fn export(&self, directory: impl AsRef<Path>, comm: Option<&Comm>, options: &ExportOptions) -> Result<()> {
        self.export_watched(directory.as_ref(), comm, options, None)
    }

    /// [`Checkpoint::export`], telling `progress` on this thread how far it is, in [`Phase::Write`](crate::Phase::Write). A
    /// panic in it goes on when all is written.
    ///
    /// # Errors
    /// As [`Checkpoint::export`].
    pub fn export_with_progress(
        &self,
        directory: impl AsRef<Path>,
        comm: Option<&Comm>,
        options: &ExportOptions,
        progress: impl FnMut(Progress),
    ) -> Result<()> {
        let watcher = watcher_of(progress);
        self.export_watched(directory.as_ref(), comm, options, Some(&watcher))?;
        watcher.settle();
        Ok(())
    }

    fn export_watched(
        &self,
        directory: &Path,
        comm: Option<&Comm>,
        options: &ExportOptions,
        watcher: Option<&Watcher<'_>>,
    ) -> Result<()> {
        let directory = path_string(directory)?;
        let comm = comm.map_or(ptr::null_mut(), Comm::as_ptr);
        options.settings.with_raw(|raw| {
            if let Some(watcher) = watcher {
                raw.progress = Some(watch);
                raw.progress_data = watcher.user_data();
            }
            // SAFETY: all arguments, the watcher among them, are borrowed for the call.
            check(unsafe { sys::tsr_checkpoint_export(self.handle.as_ptr(), comm, directory.as_ptr(), raw) })
        })
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_checkpoint_destroy(self.handle.as_ptr()) }
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("path", &self.path().ok()).field("step", &self.step().ok()).finish()
    }
}
