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

/// How to load. Settings that are not set have the library's defaults: verified and strict, each rank on its own.
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

    /// The ranks that load together, which makes the load collective: each loads the same checkpoint with the same
    /// verification; states, layouts, names and allowances may differ. Ranks of a host then read data that several of
    /// them need once (from 8 MiB on) and share it through shared memory. All ranks get the same error. The deadline of
    /// each wait is the communicator's.
    #[must_use]
    pub fn comm(mut self, comm: &'a Comm) -> Self {
        self.comm = Some(comm);
        self
    }

    /// The names of the state to load, or patterns: `*` matches any characters including dots, `?` matches one, `[a-c]`
    /// and `[!a-c]` match one of a set. All other names, of the state and of the checkpoint, are ignored: neither
    /// loaded nor missing nor unexpected. The default is all names; a load fails if a pattern matches no name of the
    /// state.
    #[must_use]
    pub fn only(mut self, patterns: &[&str]) -> Self {
        self.only = Some(patterns.iter().map(|&pattern| pattern.to_owned()).collect());
        self
    }

    /// Maps a name of the checkpoint to a name of the state; a name that ends with `.` or is empty replaces a prefix.
    /// Further calls add rules; the first that matches applies. For a value of one rank, the name is the one without
    /// `rank/<r>/`.
    #[must_use]
    pub fn rename(mut self, saved: &str, here: &str) -> Self {
        self.rules.push((saved.to_owned(), here.to_owned()));
        self
    }

    load_setters!();
}

/// How a load deviated from a strict one, by names of the state, and whether the data was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Names of the state that the checkpoint lacks ([`LoadOptions::allow_missing`]); left unchanged.
    pub missing: Vec<String>,
    /// Names of the checkpoint that the state lacks ([`LoadOptions::allow_unexpected`]).
    pub unexpected: Vec<String>,
    /// Tensors that were converted ([`LoadOptions::allow_cast`]).
    pub cast: Vec<Cast>,
    /// Names of the state that were not loaded because [`LoadOptions::only`] does not match them.
    pub left_alone: Vec<String>,
    /// Whether all tensor data matched its checksums: false without [`LoadOptions::verify`] and for formats without
    /// checksums, such as safetensors written by others.
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

/// A committed checkpoint, written by any number of ranks in any language. Opening one needs no job. It may be read
/// from many threads at once.
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
    /// Opens a checkpoint's directory, the newest checkpoint of a root (or of a root's `latest`), or the best one of a
    /// root's `best` ([`SaverBuilder::best_metric`](crate::SaverBuilder::best_metric)). Also opens a directory of
    /// `torch.distributed.checkpoint`, a file of `torch.save` (or the directory of a `model.pt`), safetensors in
    /// the layout of Hugging Face, and a directory that DeepSpeed's engine wrote. No saver removes a Tessera checkpoint
    /// while it is open.
    ///
    /// # Errors
    /// `NotFound`: there is no manifest, so this is not a committed checkpoint; `Corrupt`, `Version`, `Io`,
    /// `InvalidArgument`; those of [`load`](crate::load).
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
    /// Those of [`Checkpoint::open`], and errors of the storage.
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

    /// The manifest, as in the file: JSON.
    ///
    /// # Errors
    /// None in practice.
    pub fn manifest(&self) -> Result<String> {
        raw::read_text(|text, capacity, size| unsafe {
            sys::tsr_checkpoint_manifest(self.handle.as_ptr(), text.cast(), capacity, size)
        })
    }

    /// The step it was saved at; 0 for formats that do not record it: PyTorch's and safetensors.
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
    /// `Version`: a tensor has a dtype that is unknown to these bindings.
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

    /// Reads a complete tensor and verifies its checksums.
    ///
    /// # Errors
    /// `NotFound`: the tensor does not exist; `Corrupt`, `Io`, `Interrupted`.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let found = self.tensors()?.into_iter().find(|tensor| tensor.name == name);
        let info = found.ok_or_else(|| Error::new(Code::NotFound, format!("the checkpoint has no tensor {name:?}")))?;
        let tensor = Tensor::zeros(info.dtype, &info.shape)?;
        self.read_into(name, &tensor)?;
        Ok(tensor)
    }

    /// Reads a complete tensor into existing memory with its dtype and shape.
    ///
    /// # Errors
    /// As [`Checkpoint::read`]; `Mismatch`: dtype or shape differ; `InvalidState`: a view of the tensor is alive.
    pub fn read_into(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let _held = Held::new(std::iter::once((name, tensor)), Use::Writes)?;
        let name = raw::c_string("the name", name)?;
        check(unsafe { sys::tsr_checkpoint_read(self.handle.as_ptr(), name.as_ptr(), &tensor.as_raw()) })
    }

    /// Loads this rank's part into `state`, in place, from a save of any number of ranks and any layout. Each rank
    /// calls it on its own, without communication, unless the options have a [`comm`](LoadOptions::comm). After an
    /// error other than `Mismatch`, parts of the state may have been overwritten.
    ///
    /// # Errors
    /// `Mismatch`: the message lists all differences; `InvalidArgument`: for example, [`rename`](LoadOptions::rename)
    /// maps two names to the same one; `Corrupt`, `Io`, `Interrupted`; `InvalidState`: a view of something in the state
    /// is alive. With a communicator also `Mismatch`: the ranks load different checkpoints, or one makes a different
    /// call; `Timeout`: the message names the ranks that did not arrive; `Aborted`, `PeerLost`.
    pub fn load(&self, state: &mut State<'_>, options: &LoadOptions<'_>) -> Result<LoadReport> {
        self.load_watched(state, options, None)
    }

    /// [`Checkpoint::load`] with progress: calls `progress` on this thread with [`Phase::Read`](crate::Phase::Read). A
    /// panic in it resumes when the state is loaded.
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

    /// Verifies the checkpoint without loading it.
    ///
    /// # Errors
    /// `Corrupt`: the message names file and offset, and the causes list further faults; `Io`, `Interrupted`.
    pub fn verify(&self, how: Verify) -> Result<()> {
        check(unsafe { sys::tsr_checkpoint_verify(self.handle.as_ptr(), i32::from(how == Verify::Full)) })
    }

    /// [`Checkpoint::verify`] with progress: calls `progress` on this thread with
    /// [`Phase::Verify`](crate::Phase::Verify). A panic in it resumes when the verification is done.
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

/// How [`Checkpoint::export`] writes. Settings that are not set have the library's defaults: all tensors, in one
/// safetensors file.
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
    /// Writes the tensors into a new directory in another format, in bounded memory. With a `comm` the call is
    /// collective: every rank has opened the same checkpoint, and all of them write. The directory appears once
    /// everything is durable. Parts that cannot be read (`unreadable` in the manifest) are skipped, with a warning in
    /// the log.
    ///
    /// # Errors
    /// `InvalidArgument`: the directory exists, or there is no tensor to write; `Mismatch`: the ranks differ;
    /// `Unsupported`: the format does not support a dtype; `Corrupt`, `Io`, `Permission`, `Timeout`, `Aborted`,
    /// `PeerLost`, `Interrupted`.
    pub fn export(&self, directory: impl AsRef<Path>, comm: Option<&Comm>, options: &ExportOptions) -> Result<()> {
        self.export_watched(directory.as_ref(), comm, options, None)
    }

    /// [`Checkpoint::export`] with progress: calls `progress` on this thread with
    /// [`Phase::Write`](crate::Phase::Write). A panic in it resumes when everything is written.
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
