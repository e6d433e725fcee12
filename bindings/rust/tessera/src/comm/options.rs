//! Settings of a communicator.

use std::time::Duration;

use tessera_sys as sys;

use crate::error::Result;
use crate::raw;

/// Settings of a [`Comm`](crate::Comm). What is not set is the library's default.
#[derive(Clone, Debug, Default)]
pub struct CommOptions {
    timeout: Option<Duration>,
    heartbeat_timeout: Option<Duration>,
    spin_count: Option<i32>,
    backend: Option<String>,
    name: Option<String>,
}

impl CommOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The deadline of each collective. The default is 600 s, or `TESSERA_TIMEOUT_MS` of the environment.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long another host that is waited for may give no sign of life, though it is asked, before it counts as lost
    /// (`PeerLost`); zero: it is not asked, and only the deadline ends the wait. The default is 30 s, or
    /// `TESSERA_HEARTBEAT_TIMEOUT_MS` of the environment.
    #[must_use]
    pub fn heartbeat_timeout(mut self, timeout: Duration) -> Self {
        self.heartbeat_timeout = Some(timeout);
        self
    }

    /// Busy turns before a waiting rank yields its core. The default is -1: decided by ranks and usable cores.
    #[must_use]
    pub fn spin_count(mut self, spin_count: i32) -> Self {
        self.spin_count = Some(spin_count);
        self
    }

    /// `"auto"`, `"shm"` or `"gloo"`. The default is `"auto"` (shared memory between ranks of one host, Gloo between hosts),
    /// or `TESSERA_BACKEND` of the environment. There is no backend between GPUs yet: asking for one, as by
    /// `"cuda:nccl"`, is `Unsupported`.
    #[must_use]
    pub fn backend(mut self, backend: impl Into<String>) -> Self {
        self.backend = Some(backend.into());
        self
    }

    /// The name in messages and logs. The default is `"world"`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    pub(super) fn with_raw<R>(&self, body: impl FnOnce(&sys::tsr_comm_options) -> Result<R>) -> Result<R> {
        // SAFETY: the library is loaded by the callers.
        let mut raw = unsafe { raw::options(sys::tsr_comm_options_init) }?;
        let (backend, name) = (raw::optional("the backend", &self.backend)?, raw::optional("the name", &self.name)?);
        if let Some(timeout) = self.timeout {
            raw.timeout_ms = raw::milliseconds(timeout);
        }
        if let Some(timeout) = self.heartbeat_timeout {
            raw.heartbeat_timeout_ms = raw::milliseconds(timeout);
        }
        if let Some(spin_count) = self.spin_count {
            raw.spin_count = spin_count;
        }
        if backend.is_some() {
            raw.backend = raw::pointer(&backend);
        }
        if name.is_some() {
            raw.name = raw::pointer(&name);
        }
        body(&raw)
    }
}
