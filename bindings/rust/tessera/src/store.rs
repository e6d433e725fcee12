//! The key-value store through which the ranks of a job find each other.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use tessera_sys as sys;

use crate::error::{check, Code, Result};
use crate::raw::{self, created};
use crate::settings::{store_setters, StoreSettings};

/// Settings of a [`Store`] and a [`StoreServer`]. Settings that are not set have the library's defaults.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    settings: StoreSettings,
}

impl StoreOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    store_setters!();
}

/// A store's TCP server. It serves from its own thread until it is dropped; its clients then get errors.
#[derive(Debug)]
pub struct StoreServer {
    handle: NonNull<sys::tsr_store_server>,
}

// SAFETY: the C object is served by its own thread; reading its port is thread-safe, and dropping is exclusive.
unsafe impl Send for StoreServer {}
unsafe impl Sync for StoreServer {}

impl StoreServer {
    /// Serves only on `host`, a numeric address or a name; port 0 selects a free port.
    ///
    /// # Errors
    /// [`Code::Io`]: the address is in use; [`Code::Permission`]: there is no job token; [`Code::InvalidArgument`].
    pub fn bind(host: &str, port: u16, options: &StoreOptions) -> Result<Self> {
        crate::load()?;
        let host = raw::c_string("the host", host)?;
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: all arguments are borrowed for the call.
            check(unsafe { sys::tsr_store_serve(host.as_ptr(), port, options, &mut handle) })
        })?;
        Ok(StoreServer { handle: created(handle)? })
    }

    /// The port on which it listens.
    ///
    /// # Errors
    /// None in practice.
    pub fn port(&self) -> Result<u16> {
        let mut port = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::tsr_store_server_port(self.handle.as_ptr(), &mut port) })?;
        Ok(port)
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_store_server_destroy(self.handle.as_ptr()) }
    }
}

/// A connection to a store. It may be used from many threads at once.
#[derive(Clone, Debug)]
pub struct Store(pub(crate) Arc<StoreHandle>);

/// Communicators keep a clone: the C object must outlive them.
#[derive(Debug)]
pub(crate) struct StoreHandle(NonNull<sys::tsr_store>);

// SAFETY: every function of a store but destroy takes it `const`, which the C API defines as thread-safe.
unsafe impl Send for StoreHandle {}
unsafe impl Sync for StoreHandle {}

impl Drop for StoreHandle {
    fn drop(&mut self) {
        // SAFETY: this was the last owner.
        unsafe { sys::tsr_store_destroy(self.0.as_ptr()) }
    }
}

impl Store {
    /// Connects to `tcp://host:port`, or to `file:///directory` on a shared file system.
    ///
    /// # Errors
    /// [`Code::Timeout`]: the server does not answer; [`Code::Permission`]: the token is refused; [`Code::Io`],
    /// [`Code::Version`], [`Code::InvalidArgument`].
    pub fn open(uri: &str, options: &StoreOptions) -> Result<Self> {
        crate::load()?;
        let uri = raw::c_string("the address", uri)?;
        let mut handle = ptr::null_mut();
        options.settings.with_raw(|options| {
            // SAFETY: all arguments are borrowed for the call.
            check(unsafe { sys::tsr_store_open(uri.as_ptr(), options, &mut handle) })
        })?;
        Ok(Store(Arc::new(StoreHandle(created(handle)?))))
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::tsr_store {
        self.0 .0.as_ptr()
    }

    /// Sets `key` (at most 1 KiB) to `value` (at most 8 MiB).
    ///
    /// # Errors
    /// [`Code::Io`], [`Code::Timeout`], [`Code::InvalidArgument`].
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = raw::c_string("the key", key)?;
        // SAFETY: all arguments are borrowed for the call; so in every method below.
        check(unsafe { sys::tsr_store_set(self.as_ptr(), key.as_ptr(), value.as_ptr().cast(), value.len()) })
    }

    /// The current value of `key`, or `None`.
    ///
    /// # Errors
    /// [`Code::Io`], [`Code::Timeout`], [`Code::InvalidArgument`].
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = raw::c_string("the key", key)?;
        let read = raw::read_sized(|data, capacity, size| unsafe {
            sys::tsr_store_get(self.as_ptr(), key.as_ptr(), data.cast(), capacity, size)
        });
        match read {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.code() == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until `key` exists; `None` uses the store's own deadline.
    ///
    /// # Errors
    /// [`Code::Timeout`], [`Code::Io`], [`Code::Interrupted`], [`Code::InvalidArgument`].
    pub fn wait(&self, key: &str, timeout: Option<Duration>) -> Result<()> {
        let key = raw::c_string("the key", key)?;
        let timeout = timeout.map_or(-1, raw::milliseconds);
        check(unsafe { sys::tsr_store_wait(self.as_ptr(), key.as_ptr(), timeout) })
    }

    /// Adds `delta` atomically to the integer at `key` (0 if absent), and returns the sum.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`]: the value is not an integer; [`Code::Io`], [`Code::Timeout`].
    pub fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let key = raw::c_string("the key", key)?;
        let mut sum = 0;
        check(unsafe { sys::tsr_store_add(self.as_ptr(), key.as_ptr(), delta, &mut sum) })?;
        Ok(sum)
    }

    /// Sets `key` atomically to `desired` if it holds `expected` (`None`: if it is absent). Returns whether it did.
    ///
    /// # Errors
    /// [`Code::Io`], [`Code::Timeout`], [`Code::InvalidArgument`].
    pub fn compare_set(&self, key: &str, expected: Option<&[u8]>, desired: &[u8]) -> Result<bool> {
        let key = raw::c_string("the key", key)?;
        let (data, size) = expected.map_or((ptr::null(), 0), |value| (value.as_ptr().cast(), value.len()));
        let mut swapped = 0;
        check(unsafe {
            let desired_data = desired.as_ptr().cast();
            sys::tsr_store_compare_set(
                self.as_ptr(),
                key.as_ptr(),
                data,
                size,
                desired_data,
                desired.len(),
                &mut swapped,
            )
        })?;
        Ok(swapped != 0)
    }

    /// Deletes `key`. Returns whether it existed.
    ///
    /// # Errors
    /// [`Code::Io`], [`Code::Timeout`], [`Code::InvalidArgument`].
    pub fn delete(&self, key: &str) -> Result<bool> {
        let key = raw::c_string("the key", key)?;
        let mut existed = 0;
        check(unsafe { sys::tsr_store_delete(self.as_ptr(), key.as_ptr(), &mut existed) })?;
        Ok(existed != 0)
    }
}
