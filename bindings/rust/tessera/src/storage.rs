//! Checkpoints outside the local file system: the trait, and its callbacks for C.

use std::ffi::{c_char, c_void, CString};
use std::fmt;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tessera_sys as sys;

use crate::callback::{answer, CallbackResult, FAILED};
use crate::error::{check, Result};
use crate::raw::{self, created};

/// The status of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyStatus {
    /// An object.
    Object {
        /// Its size.
        bytes: u64,
        /// The modification time by the storage's clock. If unknown, the lease of a job that died on another machine
        /// must be removed by hand.
        modified: Option<SystemTime>,
    },
    /// A prefix of other keys: `runs/a` if `runs/a/latest` exists.
    Directory,
}

/// Optional features of a storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageTraits {
    /// An upload's parts may come in any order and concurrently. If not, a save reads its data twice.
    pub parts_in_any_order: bool,
    /// `put` with `if_absent` is atomic.
    pub puts_if_absent: bool,
    /// The minimum size of all parts but the last; 0 for 8 MiB. Parts are larger if there would be more than 10,000.
    pub part_bytes: u64,
}

/// A storage for checkpoints, for [`SaverBuilder::storage`](crate::SaverBuilder::storage) and
/// [`Checkpoint::open_in`](crate::Checkpoint::open_in): an object store, or anything that keeps named objects.
///
/// Keys are strings of parts joined by `/`, without a leading or trailing one. An object appears atomically and
/// complete when `put` or an upload's `finish` returns, and every later call, from any process, sees it. A storage
/// needs neither renames nor locks; `docs/STORAGE.md` describes how a save is committed without them.
///
/// Every method may be called from many threads at once, including threads of the library, and must not use the saver
/// or checkpoint that it serves. It should have its own deadlines. A panic in it becomes an error of the save or load.
pub trait Storage: Send + Sync + 'static {
    /// Its optional features.
    fn traits(&self) -> StorageTraits {
        StorageTraits::default()
    }
    /// The status of `key`; `None` if it does not exist.
    ///
    /// # Errors
    /// Any.
    fn status(&self, key: &str) -> CallbackResult<Option<KeyStatus>>;
    /// Opens an object for reading; `None` if it does not exist.
    ///
    /// # Errors
    /// Any.
    fn open(&self, key: &str) -> CallbackResult<Option<Box<dyn StorageReader>>>;
    /// Writes a small object atomically. With `if_absent`, which is used only with `puts_if_absent`, an existing object
    /// is kept, and the result is false.
    ///
    /// # Errors
    /// Any.
    fn put(&self, key: &str, data: &[u8], if_absent: bool) -> CallbackResult<bool>;
    /// Begins a large object of `size` bytes, or up to 4095 fewer. It replaces an existing object.
    ///
    /// # Errors
    /// Any.
    fn begin(&self, key: &str, size: u64) -> CallbackResult<Box<dyn StorageUpload>>;
    /// The names directly below `key`; empty if there are none. An empty key is the top level.
    ///
    /// # Errors
    /// Any.
    fn list(&self, key: &str) -> CallbackResult<Vec<String>>;
    /// Removes an object. It is not an error if it does not exist.
    ///
    /// # Errors
    /// Any.
    fn remove(&self, key: &str) -> CallbackResult<()>;
    /// Removes an empty directory, in storages that have directories.
    ///
    /// # Errors
    /// Any.
    fn remove_directory(&self, _key: &str) -> CallbackResult<()> {
        Ok(())
    }
}

/// An object opened for reading, by many threads at once.
pub trait StorageReader: Send + Sync {
    /// Bytes.
    fn size(&self) -> u64;
    /// Fills `into` from byte `offset` on. Returns the number of bytes, fewer only at the object's end.
    ///
    /// # Errors
    /// Any.
    fn read(&self, offset: u64, into: &mut [u8]) -> CallbackResult<usize>;
}

/// A large object that is being written. If it is dropped without `finish`, everything written must be removed.
pub trait StorageUpload: Send + Sync {
    /// Writes part `index`, counted from 0, at byte `offset`. Called from many threads and in any order if the storage
    /// has `parts_in_any_order`, else in sequence.
    ///
    /// # Errors
    /// Any.
    fn part(&self, index: usize, offset: u64, data: &[u8]) -> CallbackResult<()>;
    /// Called after all parts: the object appears, complete and durable.
    ///
    /// # Errors
    /// Any.
    fn finish(&self) -> CallbackResult<()>;
}

/// The library's handle for a storage; objects made with it keep the storage alive.
pub(crate) struct StorageHandle(NonNull<sys::tsr_storage>);

impl StorageHandle {
    pub(crate) fn new(storage: &Arc<dyn Storage>) -> Result<Self> {
        let traits = storage.traits();
        let mut capabilities = 0;
        if traits.parts_in_any_order {
            capabilities |= sys::TSR_STORAGE_PARTS_IN_ANY_ORDER;
        }
        if traits.puts_if_absent {
            capabilities |= sys::TSR_STORAGE_PUT_IF_ABSENT;
        }
        let table = sys::tsr_storage_vtable {
            struct_size: size_of::<sys::tsr_storage_vtable>(),
            capabilities,
            reserved: 0,
            part_bytes: i64::try_from(traits.part_bytes).unwrap_or(i64::MAX),
            status: Some(on_status),
            open: Some(on_open),
            read: Some(on_read),
            close: Some(on_close),
            put: Some(on_put),
            begin: Some(on_begin),
            part: Some(on_part),
            finish: Some(on_finish),
            drop: Some(on_drop),
            list: Some(on_list),
            remove: Some(on_remove),
            remove_directory: Some(on_remove_directory),
        };
        let user_data: *mut Arc<dyn Storage> = Box::into_raw(Box::new(Arc::clone(storage)));
        let mut handle = ptr::null_mut();
        // SAFETY: the library is loaded and copies the table. It owns the box from now on, unless it fails.
        let made = check(unsafe { sys::tsr_storage_create(&table, user_data.cast(), Some(free), &mut handle) });
        if let Err(error) = made {
            // SAFETY: the box from above, which nobody else has.
            drop(unsafe { Box::from_raw(user_data) });
            return Err(error);
        }
        Ok(StorageHandle(created(handle)?))
    }

    pub(crate) fn as_ptr(&self) -> *const sys::tsr_storage {
        self.0.as_ptr()
    }
}

impl Drop for StorageHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_storage_destroy(self.0.as_ptr()) }
    }
}

impl fmt::Debug for StorageHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StorageHandle")
    }
}

/// # Safety
/// `user_data` is the box of `StorageHandle::new`, which lives until `free`.
unsafe fn storage<'a>(user_data: *mut c_void) -> &'a dyn Storage {
    // SAFETY: the caller's promise.
    unsafe { &**user_data.cast_const().cast::<Arc<dyn Storage>>() }
}

/// # Safety
/// C's `data` and `size` are a range of bytes, or `size` is 0.
unsafe fn bytes<'a>(data: *const c_void, size: i64) -> &'a [u8] {
    match usize::try_from(size) {
        // SAFETY: the caller's promise.
        Ok(size) if size > 0 => unsafe { slice::from_raw_parts(data.cast(), size) },
        _ => &[],
    }
}

fn whole(number: u64) -> CallbackResult<i64> {
    i64::try_from(number).map_err(|_| format!("the size {number} is too large").into())
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

// SAFETY of all callbacks: the library passes what storage.h says, and the user data of `StorageHandle::new`.

unsafe extern "C" fn on_status(
    key: *const c_char,
    kind: *mut i32,
    size: *mut i64,
    modified_ms: *mut i64,
    message: *mut c_char,
    user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            match storage(user_data).status(&raw::text(key))? {
                None => return Ok(sys::TSR_E_NOT_FOUND),
                Some(KeyStatus::Directory) => *kind = sys::TSR_STORAGE_DIRECTORY,
                Some(KeyStatus::Object { bytes, modified }) => {
                    *kind = sys::TSR_STORAGE_OBJECT;
                    *size = whole(bytes)?;
                    let since = modified.and_then(|when| when.duration_since(UNIX_EPOCH).ok());
                    *modified_ms = since.map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(0));
                }
            }
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_open(
    key: *const c_char,
    object: *mut *mut c_void,
    size: *mut i64,
    message: *mut c_char,
    user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let Some(reader) = storage(user_data).open(&raw::text(key))? else { return Ok(sys::TSR_E_NOT_FOUND) };
            *size = whole(reader.size())?;
            *object = Box::into_raw(Box::new(reader)).cast();
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_read(
    object: *mut c_void,
    offset: i64,
    data: *mut c_void,
    size: i64,
    got: *mut i64,
    message: *mut c_char,
    _user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let reader = &*object.cast_const().cast::<Box<dyn StorageReader>>();
            let room = usize::try_from(size)?;
            // The library reads only what was read into it.
            let into = slice::from_raw_parts_mut(data.cast::<u8>(), room);
            *got = i64::try_from(reader.read(unsigned(offset), into)?)?;
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_close(object: *mut c_void, _user_data: *mut c_void) {
    let reader = unsafe { Box::from_raw(object.cast::<Box<dyn StorageReader>>()) };
    raw::contained(|| drop(reader));
}

unsafe extern "C" fn on_put(
    key: *const c_char,
    data: *const c_void,
    size: i64,
    if_absent: i32,
    message: *mut c_char,
    user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let put = storage(user_data).put(&raw::text(key), bytes(data, size), if_absent != 0)?;
            Ok(if put { sys::TSR_OK } else { sys::TSR_E_INVALID_STATE })
        })
    }
}

unsafe extern "C" fn on_begin(
    key: *const c_char,
    size: i64,
    upload: *mut *mut c_void,
    message: *mut c_char,
    user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let begun = storage(user_data).begin(&raw::text(key), unsigned(size))?;
            *upload = Box::into_raw(Box::new(begun)).cast();
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_part(
    upload: *mut c_void,
    index: i64,
    offset: i64,
    data: *const c_void,
    size: i64,
    message: *mut c_char,
    _user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let upload = &*upload.cast_const().cast::<Box<dyn StorageUpload>>();
            upload.part(usize::try_from(index)?, unsigned(offset), bytes(data, size))?;
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_finish(upload: *mut c_void, message: *mut c_char, _user_data: *mut c_void) -> i32 {
    unsafe {
        answer(message, || {
            (*upload.cast_const().cast::<Box<dyn StorageUpload>>()).finish()?;
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_drop(upload: *mut c_void, _user_data: *mut c_void) {
    let upload = unsafe { Box::from_raw(upload.cast::<Box<dyn StorageUpload>>()) };
    raw::contained(|| drop(upload));
}

unsafe extern "C" fn on_list(
    key: *const c_char,
    found: sys::tsr_storage_found_fn,
    found_data: *mut c_void,
    message: *mut c_char,
    user_data: *mut c_void,
) -> i32 {
    unsafe {
        answer(message, || {
            let Some(found) = found else { return Ok(FAILED) };
            for name in storage(user_data).list(&raw::text(key))? {
                let name = CString::new(name)?;
                found(name.as_ptr(), found_data);
            }
            Ok(sys::TSR_OK)
        })
    }
}

unsafe extern "C" fn on_remove(key: *const c_char, message: *mut c_char, user_data: *mut c_void) -> i32 {
    unsafe { answer(message, || storage(user_data).remove(&raw::text(key)).map(|()| sys::TSR_OK)) }
}

unsafe extern "C" fn on_remove_directory(key: *const c_char, message: *mut c_char, user_data: *mut c_void) -> i32 {
    unsafe { answer(message, || storage(user_data).remove_directory(&raw::text(key)).map(|()| sys::TSR_OK)) }
}

unsafe extern "C" fn free(user_data: *mut c_void) {
    let storage = unsafe { Box::from_raw(user_data.cast::<Arc<dyn Storage>>()) };
    raw::contained(|| drop(storage));
}
