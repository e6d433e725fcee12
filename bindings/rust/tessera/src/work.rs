//! Asynchronous operations.
//!
//! While an operation runs, the library reads and writes its buffers from another thread. A borrow cannot guarantee that
//! they stay: `mem::forget` ends a borrow without running any `Drop`, and a `Drop` that waited would block. So the
//! operation owns its buffers. They are moved into memory that two parties hold, this handle and the library's
//! completion callback, and are freed when both have let go: drop the handle at any time, nothing waits and nothing
//! dangles.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use std::{ffi::c_void, mem};

use tessera_sys as sys;

use crate::element::Element;
use crate::error::{check, Code, Error, Result};
use crate::raw::{self, created};
use crate::tensor::{flat_shape, raw_tensor};

/// An operation in flight, and the buffers it owns until it is done.
///
/// Take them back with [`wait`](Work::wait) or `.await` (no particular runtime is needed). If it is dropped, the
/// operation continues and its buffers are freed at its end.
#[must_use = "the buffers are in it; dropped, the operation goes on unobserved"]
pub struct Work<B> {
    handle: Handle,
    shared: Arc<Shared<B>>,
}

struct Handle(NonNull<sys::tsr_work>);

// SAFETY: every function of a work but destroy takes it `const`, which the C API defines as thread-safe.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again; the operation goes on without it.
        unsafe { sys::tsr_work_destroy(self.0.as_ptr()) }
    }
}

/// C tensors and their shapes, at addresses that do not change when this is moved, and what else an operation needs.
#[derive(Default)]
pub(crate) struct Views {
    tensors: Vec<sys::tsr_tensor>,
    _shapes: Vec<Box<[i64]>>,
    _kept: Vec<Box<dyn Any + Send>>,
}

// SAFETY: plain data; the buffers that it points into are kept beside it, and are `Send`, as is what is kept in it.
unsafe impl Send for Views {}

impl Views {
    /// Adds a one-dimensional tensor.
    pub(crate) fn of<T: Element>(self, data: *mut T, len: usize) -> Self {
        self.shaped(data, flat_shape(len).into())
    }

    /// Adds a tensor of this shape.
    pub(crate) fn shaped<T: Element>(self, data: *mut T, shape: Vec<i64>) -> Self {
        self.with_shape(raw_tensor(data.cast(), &[], T::DTYPE), shape)
    }

    /// Adds a tensor with this shape.
    pub(crate) fn with_shape(mut self, mut tensor: sys::tsr_tensor, shape: Vec<i64>) -> Self {
        let shape = shape.into_boxed_slice();
        tensor.shape = shape.as_ptr();
        tensor.ndim = i32::try_from(shape.len()).unwrap_or(i32::MAX);
        self.tensors.push(tensor);
        self._shapes.push(shape);
        self
    }

    pub(crate) fn tensors(&self) -> &[sys::tsr_tensor] {
        &self.tensors
    }

    /// Keeps what the operation uses besides the buffers until it is done.
    pub(crate) fn keep(mut self, used: impl Any + Send) -> Self {
        self._kept.push(Box::new(used));
        self
    }
}

pub(crate) struct Shared<B>(Mutex<Progress<B>>);

struct Progress<B> {
    /// Taken out by whoever waits, once the operation is done.
    buffers: Option<B>,
    /// What C was handed: views of the buffers, which it may read until the operation is done.
    _views: Views,
    status: Option<sys::tsr_status>,
    waker: Option<Waker>,
    callback: Option<Callback>,
}

type Callback = Box<dyn FnOnce(Result<(), Code>) + Send>;

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Progress<B>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether it is done; who has waited for it knows that before the library's thread reports it.
    pub(crate) fn is_done(&self) -> bool {
        let progress = self.lock();
        progress.status.is_some() || progress.buffers.is_none()
    }
}

impl<B: Send + 'static> Work<B> {
    /// Starts an operation on `buffers`, of which `views` are views.
    ///
    /// # Safety
    /// `issue` calls one C function that starts an operation, on nothing but these views and what they keep, with the
    /// work pointer it is given. The memory that the views show does not move when `buffers` or what they keep is moved.
    pub(crate) unsafe fn start(
        buffers: B,
        views: Views,
        issue: impl FnOnce(&[sys::tsr_tensor], *mut *mut sys::tsr_work) -> sys::tsr_status,
    ) -> Result<Self> {
        let mut work = ptr::null_mut();
        check(issue(&views.tensors, &mut work))?; // refused: nothing was started
        let buffers = Some(buffers);
        let progress = Progress { buffers, _views: views, status: None, waker: None, callback: None };
        let shared = Arc::new(Shared(Mutex::new(progress)));
        let Some(handle) = NonNull::new(work) else {
            mem::forget(Arc::clone(&shared)); // may be in use for ever; never so in practice
            return created(work).map(|_| unreachable!("it is null"));
        };
        let user_data = Arc::into_raw(Arc::clone(&shared)).cast_mut().cast();
        // SAFETY: the callback gets a reference of its own, which `release` gives back after the call.
        let registered =
            check(unsafe { sys::tsr_work_on_done(handle.as_ptr(), Some(done::<B>), user_data, Some(release::<B>)) });
        // If it could not be registered, that reference keeps the buffers for ever: a leak, but nothing dangles.
        registered.map(|()| Work { handle: Handle(handle), shared })
    }

    /// Waits until the operation is done, at most until its own deadline, and returns the buffers.
    ///
    /// # Errors
    /// The operation's error: the buffers' content is then unspecified and they are freed. Or [`Code::Interrupted`]:
    /// the operation continues; to try again, use [`Work::wait_for`].
    pub fn wait(mut self) -> Result<B> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_work_wait(self.handle.0.as_ptr(), -1) })?;
        self.take()
    }

    /// Waits at most `timeout` and returns whether the operation is done.
    ///
    /// # Errors
    /// The operation's error, or [`Code::Interrupted`].
    pub fn wait_for(&mut self, timeout: Duration) -> Result<bool> {
        // SAFETY: the handle is alive.
        match check(unsafe { sys::tsr_work_wait(self.handle.0.as_ptr(), raw::milliseconds(timeout)) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Code::NotReady => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes a CUDA stream wait for the operation, and returns: what the stream gets later sees the result. An operation on
    /// the CPU, or not yet on its stream since others are queued before it, is waited for as by [`Work::wait`].
    ///
    /// # Errors
    /// The operation's error; [`Code::InvalidArgument`]: a stream of another device; [`Code::Interrupted`].
    ///
    /// # Safety
    /// `stream` is a CUDA stream of the tensors' device, or null for its default stream.
    pub unsafe fn order(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: the handle is alive; the stream is the caller's word.
        check(unsafe { sys::tsr_work_order(self.handle.0.as_ptr(), stream, -1) })
    }

    /// Whether the operation is done, successfully or not.
    ///
    /// # Errors
    /// None in practice.
    pub fn is_done(&self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_work_test(self.handle.0.as_ptr(), &mut done) })?;
        Ok(done != 0)
    }

    /// The error of an operation that is done; `None` if it succeeded.
    ///
    /// # Errors
    /// [`Code::NotReady`]: it is not done.
    pub fn error(&self) -> Result<Option<Error>> {
        let mut error = ptr::null_mut();
        // SAFETY: the handle is alive; the error is ours to free.
        unsafe {
            check(sys::tsr_work_error(self.handle.0.as_ptr(), &mut error))?;
            Ok(Error::from_detached(error))
        }
    }

    /// For a save: the work that is done when the whole state is copied. Call it once for each save.
    pub(crate) fn staged(&self) -> Result<Work<()>> {
        // SAFETY: the handle is alive; the work uses no buffers.
        unsafe { Work::start((), Views::default(), |_, staged| sys::tsr_work_staged(self.handle.0.as_ptr(), staged)) }
    }

    /// Calls `callback` once when the operation is done: on a thread of the library, or immediately if it is already
    /// done. It must neither block nor use the communicator. A panic in it is caught.
    ///
    /// A second callback replaces one that has not been called.
    pub fn on_done(&mut self, callback: impl FnOnce(Result<(), Code>) + Send + 'static) {
        let mut progress = self.shared.lock();
        match progress.status {
            None => progress.callback = Some(Box::new(callback)),
            Some(status) => {
                drop(progress);
                run(Box::new(callback), status);
            }
        }
    }

    pub(crate) fn shared(&self) -> Arc<Shared<B>> {
        Arc::clone(&self.shared)
    }

    /// The buffers of an operation that is done, or its error.
    fn take(&mut self) -> Result<B> {
        if let Some(error) = self.error()? {
            return Err(error);
        }
        let taken = self.shared.lock().buffers.take();
        taken.ok_or_else(|| Error::state("the result was already taken"))
    }
}

impl<B: Send + 'static> Future for Work<B> {
    type Output = Result<B>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut progress = self.shared.lock();
        if progress.status.is_none() {
            progress.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        drop(progress);
        Poll::Ready(self.take())
    }
}

impl<B> Unpin for Work<B> {}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("done", &self.shared.is_done()).finish()
    }
}

fn run(callback: Callback, status: sys::tsr_status) {
    let result = if status == sys::TSR_OK { Ok(()) } else { Err(Code::from_raw(status)) };
    raw::contained(|| callback(result));
}

/// The library's completion callback.
unsafe extern "C" fn done<B>(status: sys::tsr_status, user_data: *mut c_void) {
    // SAFETY: `start` passed a reference of an Arc, which lives until `release`.
    let shared = unsafe { &*user_data.cast_const().cast::<Shared<B>>() };
    let (waker, callback) = {
        let mut progress = shared.lock();
        progress.status = Some(status);
        (progress.waker.take(), progress.callback.take())
    };
    if let Some(callback) = callback {
        run(callback, status);
    }
    if let Some(waker) = waker {
        raw::contained(|| waker.wake());
    }
}

unsafe extern "C" fn release<B>(user_data: *mut c_void) {
    // SAFETY: the reference that `start` made, given back once.
    let shared = unsafe { Arc::from_raw(user_data.cast_const().cast::<Shared<B>>()) };
    raw::contained(|| drop(shared));
}
