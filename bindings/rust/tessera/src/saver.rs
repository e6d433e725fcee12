//! Writes checkpoints under one root.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use tessera_sys as sys;

use crate::comm::Comm;
use crate::error::{check, Code, Error, Result};
use crate::raw;
use crate::state::State;
use crate::store::{created, StoreHandle};
use crate::work::{Shared, Views, Work};

/// Builds a [`Saver`]. What is not set is the library's default.
#[derive(Debug)]
#[must_use = "it is a builder: call open()"]
pub struct SaverBuilder<'a> {
    comm: Option<&'a Comm>,
    root: PathBuf,
    keep_latest: Option<usize>,
    timeout: Option<Duration>,
    format: Option<String>,
    writer: String,
    writer_version: String,
}

impl SaverBuilder<'_> {
    /// How many of the newest checkpoints to keep. The default is 0: all.
    pub fn keep_latest(mut self, count: usize) -> Self {
        self.keep_latest = Some(count);
        self
    }

    /// The deadline of the ranks' votes on a save. The default is 600 s, or `TESSERA_TIMEOUT_MS` of the environment.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How saves are written: `"tessera"`, or `"torch_dcp"`, which an unmodified PyTorch loads by
    /// `torch.distributed.checkpoint`. The default is `"tessera"`.
    pub fn format(mut self, name: &str) -> Self {
        self.format = Some(name.to_owned());
        self
    }

    /// The trainer's language and version, for the manifest. The defaults are `"rust"` and this crate's version.
    pub fn writer(mut self, language: &str, version: &str) -> Self {
        (self.writer, self.writer_version) = (language.to_owned(), version.to_owned());
        self
    }

    /// Opens the root, which is created if absent. One live job at a time may own a root. Collective.
    ///
    /// # Errors
    /// `InvalidState`: another live job saves here, and the message names its host and process; `Io`, `Permission`,
    /// `InvalidArgument`, `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn open(self) -> Result<Saver> {
        crate::load()?;
        // SAFETY: the library is loaded.
        let mut raw = unsafe { raw::options(sys::tsr_saver_options_init) }?;
        if let Some(count) = self.keep_latest {
            raw.keep_latest = raw::int32("keep_latest", count)?;
        }
        if let Some(timeout) = self.timeout {
            raw.timeout_ms = raw::milliseconds(timeout);
        }
        let writer = raw::c_string("the writer", &self.writer)?;
        let version = raw::c_string("the writer's version", &self.writer_version)?;
        (raw.writer, raw.writer_version) = (writer.as_ptr(), version.as_ptr());
        let format = self.format.as_deref().map(|name| raw::c_string("the format", name)).transpose()?;
        raw.format = format.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let root = path_string(&self.root)?;
        let comm = self.comm.map_or(ptr::null_mut(), Comm::as_ptr);
        let mut handle = ptr::null_mut();
        // SAFETY: all arguments are borrowed for the call.
        check(unsafe { sys::tsr_saver_create(comm, root.as_ptr(), &raw, &mut handle) })?;
        Ok(Saver {
            handle: Some(Handle { ptr: created(handle)?, _store: self.comm.and_then(Comm::store) }),
            in_flight: RefCell::new(None),
            _not_sync: PhantomData,
        })
    }
}

/// Saves a job's [`State`] under a root directory, and loads the newest checkpoint of it.
///
/// Every rank calls the same methods in the same order. A checkpoint exists, on every rank, from the moment its manifest
/// is written, and not before; a save that fails leaves the one before it untouched.
///
/// Dropping a saver while a save is in flight does not block: a thread goes on with it, and the end of `main` waits for
/// it (at most until its deadline), so that the last checkpoint of a program is not lost. Its error would be: call
/// [`Saver::wait`] to see it.
pub struct Saver {
    handle: Option<Handle>,
    in_flight: RefCell<Option<Arc<Shared<()>>>>,
    _not_sync: PhantomData<Cell<()>>,
}

struct Handle {
    ptr: NonNull<sys::tsr_saver>,
    _store: Option<Arc<StoreHandle>>, // dropped after the saver's private communicator
}

// SAFETY: the C object may be used from any one thread at a time; `Saver` is not Sync.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_saver_destroy(self.ptr.as_ptr()) }
    }
}

impl Saver {
    /// Begins a saver of the ranks of `comm` under `root`, a directory that is the same on every rank; `open()` ends it.
    pub fn at<'a>(comm: &'a Comm, root: impl AsRef<Path>) -> SaverBuilder<'a> {
        Self::builder(Some(comm), root.as_ref())
    }

    /// [`Saver::at`] with the library's defaults, opened.
    ///
    /// # Errors
    /// Those of [`SaverBuilder::open`].
    pub fn open(comm: &Comm, root: impl AsRef<Path>) -> Result<Saver> {
        Self::at(comm, root).open()
    }

    /// A saver of this process alone, without a communicator.
    pub fn alone(root: impl AsRef<Path>) -> SaverBuilder<'static> {
        Self::builder(None, root.as_ref())
    }

    fn builder<'a>(comm: Option<&'a Comm>, root: &Path) -> SaverBuilder<'a> {
        SaverBuilder {
            comm,
            root: root.to_owned(),
            keep_latest: None,
            timeout: None,
            format: None,
            writer: "rust".to_owned(),
            writer_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Saves, and returns when the checkpoint is durable and committed on every rank. `step` counts the steps completed.
    /// All ranks get the same error.
    ///
    /// # Errors
    /// `Mismatch`: the ranks' states or steps differ; `Io`, `Timeout`, `Aborted`, `PeerLost`, `CommitUnknown`,
    /// `InvalidArgument`, `Interrupted`; `InvalidState`: a mutable view of something in the state is alive.
    pub fn save(&self, step: u64, state: &State<'_>) -> Result<()> {
        let step = step_number(step)?;
        // SAFETY: the handles are alive and used by this thread alone; what the state holds may be read.
        state.reading(|state| check(unsafe { sys::tsr_saver_save(self.as_ptr(), step, state) }))
    }

    /// Copies the state, returns, and saves the copy in the background. A save still running is waited for first; its
    /// error is returned here.
    ///
    /// # Errors
    /// As [`Saver::save`]; what happens later comes from the [`Save`], or from [`Saver::wait`].
    pub fn save_async(&self, step: u64, state: &State<'_>) -> Result<Save> {
        let step = step_number(step)?;
        let work = state.reading(|state| {
            // SAFETY: as in `save`; the call returns when the copy is made.
            unsafe {
                Work::start((), Views::default(), |_, work| sys::tsr_saver_save_async(self.as_ptr(), step, state, work))
            }
        })?;
        *self.in_flight.borrow_mut() = Some(work.shared());
        Ok(Save(work))
    }

    /// Waits for the save in flight, if there is one.
    ///
    /// # Errors
    /// The save's error, once.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::tsr_saver_wait(self.as_ptr()) })
    }

    /// Loads the newest committed checkpoint of the root into `state`, strictly, and returns its step. 0 if there is
    /// none: nothing is changed then.
    ///
    /// # Errors
    /// `Mismatch`: names, dtypes or shapes differ, and the message lists all; `Corrupt`, `Io`, `Version`, `Timeout`,
    /// `Aborted`, `PeerLost`, `Interrupted`; `InvalidState`: a view of something in the state is alive.
    pub fn resume(&self, state: &mut State<'_>) -> Result<u64> {
        let mut step = 0;
        // SAFETY: the handles are alive and used by this thread alone; what the state holds may be written.
        state.writing(|state| check(unsafe { sys::tsr_saver_resume(self.as_ptr(), state, &mut step) }))?;
        Ok(u64::try_from(step).unwrap_or(0))
    }

    fn as_ptr(&self) -> *mut sys::tsr_saver {
        self.handle.as_ref().map_or(ptr::null_mut(), |handle| handle.ptr.as_ptr())
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let busy = self.in_flight.get_mut().as_ref().is_some_and(|save| !save.is_done());
        if let Some(handle) = self.handle.take().filter(|_| busy) {
            finish_in_background(handle);
        }
    }
}

impl fmt::Debug for Saver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saver").finish_non_exhaustive()
    }
}

/// A save in flight. Wait for it, `.await` it (with any runtime), or drop it: the save goes on.
#[derive(Debug)]
pub struct Save(Work<()>);

impl Save {
    /// Waits until the checkpoint is committed.
    ///
    /// # Errors
    /// Those of [`Saver::save`].
    pub fn wait(self) -> Result<()> {
        self.0.wait()
    }

    /// Waits at most `timeout`: whether the save is done.
    ///
    /// # Errors
    /// The save's error, or `Interrupted`.
    pub fn wait_for(&mut self, timeout: Duration) -> Result<bool> {
        self.0.wait_for(timeout)
    }

    /// Whether the save is done, well or not.
    ///
    /// # Errors
    /// None in practice.
    pub fn is_done(&self) -> Result<bool> {
        self.0.is_done()
    }

    /// Calls `callback` once when the save is done, on a thread of the library. See [`Work::on_done`].
    pub fn on_done(&mut self, callback: impl FnOnce(Result<(), Code>) + Send + 'static) {
        self.0.on_done(callback);
    }
}

impl Future for Save {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

/// Threads that finish the saves of dropped savers; joined when the process exits.
static FINISHING: Mutex<Vec<thread::JoinHandle<()>>> = Mutex::new(Vec::new());

fn finish_in_background(handle: Handle) {
    static AT_EXIT: std::sync::Once = std::sync::Once::new();
    extern "C" {
        fn atexit(callback: extern "C" fn()) -> i32;
    }
    extern "C" fn join_all() {
        let threads = std::mem::take(&mut *FINISHING.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        for thread in threads {
            let _ = thread.join(); // ends at the save's deadline at the latest
        }
    }
    // If no thread can be made, the closure is dropped with the handle, which waits: better than a lost checkpoint.
    let spawned = thread::Builder::new().name("tessera-saver".to_owned()).spawn(move || drop(handle));
    if let Ok(thread) = spawned {
        // SAFETY: the callback is plain Rust that does not unwind.
        AT_EXIT.call_once(|| {
            let _ = unsafe { atexit(join_all) };
        });
        let mut threads = FINISHING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }
}

fn step_number(step: u64) -> Result<i64> {
    i64::try_from(step).map_err(|_| Error::argument(format!("the step is {step}; it must be at most {}", i64::MAX)))
}

pub(crate) fn path_string(path: &Path) -> Result<std::ffi::CString> {
    let text = path.to_str().ok_or_else(|| Error::argument(format!("the path {} is not UTF-8", path.display())))?;
    raw::c_string("the path", text)
}
