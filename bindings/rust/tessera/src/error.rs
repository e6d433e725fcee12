//! Errors and results of calls.

use std::error::Error as StdError;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use tessera_sys as sys;

use crate::loader;
use crate::text::text;

/// The result of a call into this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:ident,)*) => {
        /// The kind of an [`Error`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* $name,)*
            /// A code of a newer library.
            Other(i32),
        }

        impl Code {
            pub(crate) fn from_raw(status: sys::tsr_status) -> Self {
                match status {
                    $(sys::$value => Code::$name,)*
                    other => Code::Other(other),
                }
            }

            /// The number that the C API uses.
            pub fn as_raw(self) -> i32 {
                match self {
                    $(Code::$name => sys::$value,)*
                    Code::Other(other) => other,
                }
            }
        }
    };
}

codes! {
    /// An argument has an invalid value.
    InvalidArgument = TSR_E_INVALID_ARGUMENT,
    /// The call is not valid in the current state.
    InvalidState = TSR_E_INVALID_STATE,
    /// A deadline passed; the message names the ranks that were waited for.
    Timeout = TSR_E_TIMEOUT,
    /// The communicator failed earlier; [`source`](std::error::Error::source) is the reason.
    Aborted = TSR_E_ABORTED,
    /// A rank died; [`Error::peer`] names it.
    PeerLost = TSR_E_PEER_LOST,
    /// The ranks, or a checkpoint and a state, differ.
    Mismatch = TSR_E_MISMATCH,
    /// An operating system call failed; [`Error::native`] is errno.
    Io = TSR_E_IO,
    /// Data fails its checksum or its format.
    Corrupt = TSR_E_CORRUPT,
    /// It does not exist.
    NotFound = TSR_E_NOT_FOUND,
    /// A wait expired; the operation continues.
    NotReady = TSR_E_NOT_READY,
    /// The interrupt callback ended the call.
    Interrupted = TSR_E_INTERRUPTED,
    /// A rank was lost after the votes of a save; the save is committed if its manifest exists.
    CommitUnknown = TSR_E_COMMIT_UNKNOWN,
    /// An allocation failed.
    NoMemory = TSR_E_NO_MEMORY,
    /// Not supported by this build, transport or data type.
    Unsupported = TSR_E_UNSUPPORTED,
    /// The library, binding or format has another version.
    Version = TSR_E_VERSION,
    /// The job token is wrong or missing, or access was denied.
    Permission = TSR_E_PERMISSION,
    /// CUDA failed; [`Error::native`] is its code.
    Cuda = TSR_E_CUDA,
    /// NCCL failed; [`Error::native`] is its code.
    Nccl = TSR_E_NCCL,
    /// A callback returned a failure.
    User = TSR_E_USER,
    /// A bug in Tessera.
    Internal = TSR_E_INTERNAL,
}

impl fmt::Display for Code {
    /// The name as in the C API, `TIMEOUT`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if loader::load().is_err() {
            return write!(f, "{self:?}"); // the very error that says why there is no library to ask
        }
        // SAFETY: the library is loaded; the string is static.
        f.write_str(&unsafe { text(sys::tsr_status_name(self.as_raw())) })
    }
}

/// The underlying code: errno, CUDA, NCCL, or a callback's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Native {
    /// The operating system's errno.
    Errno(i32),
    /// A CUDA result.
    Cuda(i32),
    /// An NCCL result.
    Nccl(i32),
    /// The value of a callback.
    User(i32),
    /// A code of a layer that is unknown to these bindings.
    Other(i32),
}

/// Why a call failed: which operation, on which rank, with which value, and what to do.
///
/// `Display` gives the message; `Debug`, which `main` prints, the code and the whole chain of causes.
#[derive(Clone)]
#[non_exhaustive]
pub struct Error(Box<Record>);

#[derive(Clone)]
struct Record {
    code: Code,
    message: String,
    rank: Option<usize>,
    peer: Option<usize>,
    operation: Option<String>,
    sequence: Option<u64>,
    native: Option<Native>,
    retriable: bool,
    cause: Option<Cause>,
}

#[derive(Clone)]
enum Cause {
    Tessera(Error),
    /// Of a callback.
    Own(Arc<dyn StdError + Send + Sync>),
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Error(Box::new(Record {
            code,
            message: message.into(),
            rank: None,
            peer: None,
            operation: None,
            sequence: None,
            native: None,
            retriable: false,
            cause: None,
        }))
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(crate) fn state(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidState, message)
    }

    /// Copies a C error and its causes; the C object stays the caller's.
    ///
    /// # Safety
    /// `error` is a live error object, and the library is loaded.
    unsafe fn from_raw(error: *const sys::tsr_error) -> Self {
        // SAFETY: the caller's promise; causes live as long as the error.
        unsafe {
            let mut domain = sys::TSR_NATIVE_NONE;
            let native = sys::tsr_error_native(error, &mut domain);
            let cause = sys::tsr_error_cause(error);
            Error(Box::new(Record {
                code: Code::from_raw(sys::tsr_error_code(error)),
                message: text(sys::tsr_error_message(error)),
                rank: usize::try_from(sys::tsr_error_rank(error)).ok(),
                peer: usize::try_from(sys::tsr_error_peer(error)).ok(),
                operation: Some(text(sys::tsr_error_operation(error))).filter(|name| !name.is_empty()),
                sequence: u64::try_from(sys::tsr_error_sequence(error)).ok(),
                native: match domain {
                    sys::TSR_NATIVE_NONE => None,
                    sys::TSR_NATIVE_ERRNO => Some(Native::Errno(native)),
                    sys::TSR_NATIVE_CUDA => Some(Native::Cuda(native)),
                    sys::TSR_NATIVE_NCCL => Some(Native::Nccl(native)),
                    sys::TSR_NATIVE_USER => Some(Native::User(native)),
                    _ => Some(Native::Other(native)),
                },
                retriable: sys::tsr_error_retriable(error) != 0,
                cause: (!cause.is_null()).then(|| Cause::Tessera(Self::from_raw(cause))),
            }))
        }
    }

    /// Copies and frees a detached C error; `None` for null.
    ///
    /// # Safety
    /// `error` is null or a detached error that nobody else frees, and the library is loaded.
    pub(crate) unsafe fn from_detached(error: *mut sys::tsr_error) -> Option<Self> {
        if error.is_null() {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let copy = Self::from_raw(error);
            sys::tsr_error_destroy(error);
            Some(copy)
        }
    }

    /// The same error, caused by that of a callback.
    pub(crate) fn caused_by(mut self, cause: Box<dyn StdError + Send + Sync>) -> Self {
        self.0.cause = Some(match cause.downcast::<Error>() {
            Ok(error) => Cause::Tessera(*error),
            Err(own) => Cause::Own(own.into()),
        });
        self
    }

    /// The error of the calling thread's last failed call into the library, through whatever binding it was made; `None`
    /// if none failed, or if it was taken already, as every method of this crate does.
    pub fn last() -> Option<Self> {
        loader::load().ok()?;
        // SAFETY: the library is loaded; the error lives until this thread's next failing call.
        unsafe {
            let error = sys::tsr_error_last();
            (!error.is_null()).then(|| Self::from_raw(error))
        }
    }

    /// The kind of error.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// What failed, with which value, and what to do.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The rank on which the error occurred.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The rank that the error is about: the dead, late or differing one.
    pub fn peer(&self) -> Option<usize> {
        self.0.peer
    }

    /// The operation that failed: `"all_reduce"`, `"save"`.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// The number of the failed collective, counted from 1 per communicator, separately for sends and receives.
    pub fn sequence(&self) -> Option<u64> {
        self.0.sequence
    }

    /// The underlying code.
    pub fn native(&self) -> Option<Native> {
        self.0.native
    }

    /// Whether the same call may succeed if repeated without rebuilding anything.
    pub fn is_retriable(&self) -> bool {
        self.0.retriable
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.code, self.0.message)?;
        let mut cause = self.source();
        while let Some(error) = cause {
            match error.downcast_ref::<Error>() {
                Some(error) => write!(f, "\n  caused by {}: {}", error.0.code, error.0.message)?,
                None => write!(f, "\n  caused by {error}")?,
            }
            cause = error.source();
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self.0.cause.as_ref()? {
            Cause::Tessera(error) => Some(error),
            Cause::Own(error) => Some(&**error),
        }
    }
}

/// Turns a status into a result, with the calling thread's error object.
pub(crate) fn check(status: sys::tsr_status) -> Result<()> {
    if status == sys::TSR_OK {
        return Ok(());
    }
    let mut error = ptr::null_mut();
    // SAFETY: a status came from the library, so it is loaded; a taken error is ours to free.
    let detached = unsafe {
        match sys::tsr_error_take(&mut error) {
            sys::TSR_OK => Error::from_detached(error),
            _ => None,
        }
    };
    let code = Code::from_raw(status);
    Err(detached
        .filter(|error| error.code() == code)
        .unwrap_or_else(|| Error::new(code, format!("{code} (no details)"))))
}
