//! Saves checkpoints under a root.

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

use crate::choices::{Creation, WhenBusy};
use crate::comm::Comm;
use crate::error::{check, Code, Error, Result};
use crate::progress::{watch, Progress, Watcher};
use crate::raw::{self, created, path_string};
use crate::settings::{saver_setters, SaverSettings};
use crate::state::State;
use crate::storage::{Storage, StorageHandle};
use crate::store::StoreHandle;
use crate::work::{Shared, Views, Work};

/// Builds a [`Saver`]. Settings that are not set have the library's defaults. The checkpoints kept under the root are
/// the union of [`keep_latest`](Self::keep_latest), [`keep_best`](Self::keep_best) and
/// [`keep_every`](Self::keep_every); the newest, the best and any that are open for reading are always kept.
#[derive(Debug)]
#[must_use = "it is a builder: call open()"]
pub struct SaverBuilder<'a> {
    comm: Option<&'a Comm>,
    root: PathBuf,
    settings: SaverSettings,
    progress: Option<Box<Watcher<'static>>>,
    storage: Option<Shown>,
    writer: String,
    writer_version: String,
}

/// So that the builder implements `Debug`, whatever the storage.
struct Shown(Arc<dyn Storage>);

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storage")
    }
}

impl SaverBuilder<'_> {
    saver_setters!();

    /// Whether to copy the parameters and moments of the state's optimizers after [`Saver::save_async`] has returned:
    /// in the saver's threads, or just before the optimizer's next step, its drop or a load into the state needs the
    /// memory. If the state is larger than [`staging_bytes`](Self::staging_bytes) or the free memory, everything is
    /// copied at once. The default is false.
    ///
    /// # Safety
    /// From a [`Saver::save_async`] to the end of the optimizer's next step, or until [`Save::staged`] is done, nothing
    /// else may write to these parameters: not a [`ViewMut`](crate::ViewMut), not a load of another state and not a
    /// collective.
    pub unsafe fn copy_on_demand(mut self, late: bool) -> Self {
        self.settings.copy_on_demand = Some(late);
        self
    }

    /// Sets a callback for the progress of saves and [`Saver::resume`], called on the thread of the call, and for saves
    /// in the background on a thread of the library, so that two threads may call it at once. It must not block for
    /// long.
    ///
    /// A panic in it does not stop the save, because other ranks depend on it: it resumes when the call ends, or, for a
    /// save in the background, in the saver's next call.
    pub fn progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(Watcher::new(callback)));
        self
    }

    /// Saves into `storage`, where the root is a key, instead of a directory.
    pub fn storage(mut self, storage: Arc<impl Storage>) -> Self {
        self.storage = Some(Shown(storage));
        self
    }

    /// The trainer's language and version, for the manifest. The defaults are `"rust"` and this crate's version.
    pub fn writer(mut self, language: &str, version: &str) -> Self {
        (self.writer, self.writer_version) = (language.to_owned(), version.to_owned());
        self
    }

    /// Opens the root, which is created if absent. Only one live job may own a root at a time. Collective.
    ///
    /// # Errors
    /// `InvalidState`: another live job saves here; the message names its host and process, and, if that process cannot
    /// be seen, when its lease expires; `Io`, `Permission`, `InvalidArgument`, `Timeout`, `Aborted`, `PeerLost`,
    /// `Interrupted`.
    pub fn open(self) -> Result<Saver> {
        crate::load()?;
        let handle = match self.comm {
            Some(comm) => comm.creating(Creation::Comm, |reached| self.create(comm.as_ptr(), reached)),
            None => self.create(ptr::null_mut(), &Cell::default()),
        }?;
        Ok(Saver {
            handle: Some(Handle { ptr: handle, watcher: self.progress, _store: self.comm.and_then(Comm::store) }),
            in_flight: RefCell::new(None),
            _not_sync: PhantomData,
        })
    }

    fn create(&self, comm: *mut sys::tsr_comm, reached: &Cell<bool>) -> Result<NonNull<sys::tsr_saver>> {
        let writer = raw::c_string("the writer", &self.writer)?;
        let version = raw::c_string("the writer's version", &self.writer_version)?;
        let storage = self.storage.as_ref().map(|storage| StorageHandle::new(&storage.0)).transpose()?;
        let root = path_string(&self.root)?;
        let mut handle = ptr::null_mut();
        self.settings.with_raw(|raw| {
            (raw.writer, raw.writer_version) = (writer.as_ptr(), version.as_ptr());
            if let Some(watcher) = &self.progress {
                raw.progress = Some(watch);
                raw.progress_data = watcher.user_data();
            }
            raw.storage = storage.as_ref().map_or(ptr::null(), StorageHandle::as_ptr);
            reached.set(true);
            // SAFETY: all arguments are borrowed for the call, but the watcher, which the handle keeps.
            check(unsafe { sys::tsr_saver_create(comm, root.as_ptr(), raw, &mut handle) })
        })?;
        created(handle)
    }
}

/// Saves a job's [`State`] under a root directory, and loads the newest checkpoint of it.
///
/// Every rank calls the same methods in the same order. A checkpoint exists, on every rank, once its manifest is
/// written; a save that fails leaves the previous one untouched.
///
/// Dropping a saver while a save is in flight does not block: a thread completes the save, and the end of `main` waits
/// for it (at most until its deadline), so that the last checkpoint of a program is not lost. Its error is lost: call
/// [`Saver::wait`] to get it.
pub struct Saver {
    handle: Option<Handle>,
    in_flight: RefCell<Option<Arc<Shared<()>>>>,
    _not_sync: PhantomData<Cell<()>>,
}

struct Handle {
    ptr: NonNull<sys::tsr_saver>,
    watcher: Option<Box<Watcher<'static>>>, // called until the saver is destroyed
    _store: Option<Arc<StoreHandle>>,       // dropped after the saver's private communicator
}

// SAFETY: the C object may be used from any one thread at a time, and `Saver` is not Sync; the watcher's callback is Send
// and Sync.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_saver_destroy(self.ptr.as_ptr()) }
    }
}

impl Saver {
    /// Starts building a saver of the ranks of `comm` under `root`, a directory that is the same on every rank; finish
    /// with `open()`.
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
            settings: SaverSettings::default(),
            progress: None,
            storage: None,
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
        state.reading(|state| check(unsafe { sys::tsr_saver_save(self.as_ptr(), step, state) }))?;
        self.settle();
        Ok(())
    }

    /// Copies the state, returns, and saves the copy in the background. [`SaverBuilder::when_busy`] decides what
    /// happens while another save is in flight. If an earlier save failed and no call on the saver has returned its
    /// error yet, this call returns it and saves nothing; awaiting that save's future does not count, so that all ranks
    /// do the same.
    ///
    /// # Errors
    /// As [`Saver::save`]; `NotReady`: a save is in flight, and `when_busy` refuses; later errors come from the
    /// [`Save`] or from [`Saver::wait`].
    pub fn save_async(&self, step: u64, state: &State<'_>) -> Result<Save> {
        let step = step_number(step)?;
        let work = state.reading(|state| {
            // SAFETY: as in `save`; the call returns when the copy is made, or who chose copy_on_demand leaves the rest alone.
            unsafe {
                Work::start((), Views::default(), |_, work| sys::tsr_saver_save_async(self.as_ptr(), step, state, work))
            }
        })?;
        *self.in_flight.borrow_mut() = Some(work.shared());
        self.settle();
        let staged = work.staged()?;
        Ok(Save { work, staged })
    }

    /// Waits for the saves in flight, if any.
    ///
    /// # Errors
    /// The first error, once.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::tsr_saver_wait(self.as_ptr()) })?;
        self.settle();
        Ok(())
    }

    /// Whether all ranks should save now and stop. Call it on every rank at each step: once one rank was asked to stop,
    /// by the launcher ([`preempt_requested`](crate::preempt_requested)) or by `told`, all ranks get `true` at the same
    /// step and from then on. Costs one small all-reduce.
    ///
    /// # Errors
    /// `Mismatch`: the ranks are at different steps; `Timeout`, `Aborted`, `PeerLost`, `Interrupted`.
    pub fn should_stop(&self, step: u64, told: bool) -> Result<bool> {
        let (step, mut stop) = (step_number(step)?, 0);
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::tsr_saver_should_stop(self.as_ptr(), step, i32::from(told), &mut stop) })?;
        Ok(stop != 0)
    }

    /// Frees the staging memory that no save in flight uses. It is kept between saves because new memory is slow.
    ///
    /// # Errors
    /// None in practice.
    pub fn trim(&self) -> Result<()> {
        // SAFETY: the handle is alive and used by this thread alone.
        check(unsafe { sys::tsr_saver_trim(self.as_ptr()) })
    }

    /// Loads the newest committed checkpoint of the root into `state`, strictly, and returns its step. Returns 0 and
    /// changes nothing if there is none.
    ///
    /// # Errors
    /// `Mismatch`: names, dtypes or shapes differ; the message lists all differences; `Corrupt`, `Io`, `Version`,
    /// `Timeout`, `Aborted`, `PeerLost`, `Interrupted`; `InvalidState`: a view of something in the state is alive.
    pub fn resume(&self, state: &mut State<'_>) -> Result<u64> {
        let mut step = 0;
        // SAFETY: the handles are alive and used by this thread alone; what the state holds may be written.
        state.writing(|state| check(unsafe { sys::tsr_saver_resume(self.as_ptr(), state, &mut step) }))?;
        self.settle();
        Ok(u64::try_from(step).unwrap_or(0))
    }

    /// Resumes a panic of the progress callback.
    fn settle(&self) {
        if let Some(watcher) = self.handle.as_ref().and_then(|handle| handle.watcher.as_ref()) {
            watcher.settle();
        }
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

/// A save in flight. Wait for it, `.await` it (with any runtime), or drop it: the save continues. It is done when the
/// checkpoint is durable; [`staged`](Self::staged) is done earlier, when the state is copied.
#[derive(Debug)]
pub struct Save {
    work: Work<()>,
    staged: Work<()>,
}

impl Save {
    /// Waits until the checkpoint is committed.
    ///
    /// # Errors
    /// Those of [`Saver::save`].
    pub fn wait(self) -> Result<()> {
        self.work.wait()
    }

    /// Waits at most `timeout` and returns whether the save is done.
    ///
    /// # Errors
    /// The save's error, or `Interrupted`.
    pub fn wait_for(&mut self, timeout: Duration) -> Result<bool> {
        self.work.wait_for(timeout)
    }

    /// Whether the save is done, successfully or not.
    ///
    /// # Errors
    /// None in practice.
    pub fn is_done(&self) -> Result<bool> {
        self.work.is_done()
    }

    /// Calls `callback` once when the save is done, on a thread of the library. See [`Work::on_done`].
    pub fn on_done(&mut self, callback: impl FnOnce(Result<(), Code>) + Send + 'static) {
        self.work.on_done(callback);
    }

    /// Done when the whole state is copied, so that it may be written again. Without
    /// [`copy_on_demand`](SaverBuilder::copy_on_demand) that is when [`Saver::save_async`] returns. If the save fails
    /// earlier, it has the save's error. Its callback may also run inside a step, drop or load that makes the last
    /// copy.
    pub fn staged(&mut self) -> &mut Work<()> {
        &mut self.staged
    }
}

impl Future for Save {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.work).poll(context)
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
