//! Stores of the crate `object_store` as storages.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::path::Path;
use object_store::{
    Error as StoreError, MultipartUpload, ObjectStore, PutMode, PutOptions, PutPayload, Result as StoreResult,
};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::callback::CallbackResult;
use crate::storage::{KeyStatus, Storage, StorageReader, StorageTraits, StorageUpload};

/// How many parts of an upload are sent concurrently.
const IN_FLIGHT: usize = 4;

/// A [`Storage`] over a store of the crate `object_store`: S3, Google's, Azure's, local files, memory.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::sync::Arc;
/// use tessera::{Checkpoint, ObjectStorage, Saver, State};
///
/// let storage = Arc::new(ObjectStorage::new(Arc::new(object_store::memory::InMemory::new()))?);
/// let mut state = State::new();
/// state.set("epoch", 7i64)?;
/// Saver::alone("runs/a").storage(storage.clone()).open()?.save(7, &state)?;
/// assert_eq!(Checkpoint::open_in(storage, "runs/a")?.step()?, 7);
/// # Ok(()) }
/// ```
///
/// It has its own thread and runtime, so that it may be used with or without an async runtime. A store of local files
/// does not sync them: data written just before a power loss may be lost.
pub struct ObjectStorage {
    store: Arc<dyn ObjectStore>,
    runtime: Option<Runtime>, // None only while it is dropped
    puts_if_absent: bool,
}

impl ObjectStorage {
    /// A storage over `store`.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub fn new(store: Arc<dyn ObjectStore>) -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("tessera-store").enable_all().build()?;
        Ok(ObjectStorage { store, runtime: Some(runtime), puts_if_absent: true })
    }

    /// For a store that does not support `PutMode::Create`: if two savers start at once, one of them is refused at its
    /// first save.
    #[must_use]
    pub fn without_conditional_put(mut self) -> Self {
        self.puts_if_absent = false;
        self
    }

    fn handle(&self) -> CallbackResult<Handle> {
        let runtime = self.runtime.as_ref().ok_or_else(|| io::Error::other("the storage is being dropped"))?;
        Ok(runtime.handle().clone())
    }

    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = StoreResult<T>> + Send + 'static,
    ) -> CallbackResult<T> {
        receive(&started(&self.handle()?, work))
    }
}

impl fmt::Debug for ObjectStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectStorage({})", self.store)
    }
}

impl Drop for ObjectStorage {
    fn drop(&mut self) {
        // It may be dropped inside another runtime, where waiting is forbidden.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs `work` on the runtime: the calling thread may be one of another runtime, which must not run a second.
fn started<T: Send + 'static>(
    handle: &Handle,
    work: impl Future<Output = StoreResult<T>> + Send + 'static,
) -> Receiver<StoreResult<T>> {
    let (send, receiver) = mpsc::channel();
    handle.spawn(async move { send.send(work.await) });
    receiver
}

fn receive<T>(receiver: &Receiver<StoreResult<T>>) -> CallbackResult<T> {
    match receiver.recv() {
        Ok(result) => result.map_err(boxed),
        Err(_) => Err("the store's task ended without a result".into()),
    }
}

fn boxed(error: StoreError) -> Box<dyn std::error::Error + Send + Sync> {
    let kind = match &error {
        StoreError::NotFound { .. } => io::ErrorKind::NotFound,
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        StoreError::NotSupported { .. } | StoreError::NotImplemented => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string()).into()
}

fn found<T>(result: StoreResult<T>) -> StoreResult<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Storage for ObjectStorage {
    fn traits(&self) -> StorageTraits {
        // Parts are numbered by the order of the calls.
        StorageTraits { parts_in_any_order: false, puts_if_absent: self.puts_if_absent, part_bytes: 0 }
    }

    fn status(&self, key: &str) -> CallbackResult<Option<KeyStatus>> {
        let (store, path) = (Arc::clone(&self.store), Path::from(key));
        self.wait(async move {
            if let Some(meta) = found(store.head(&path).await)? {
                return Ok(Some(KeyStatus::Object { bytes: meta.size, modified: Some(meta.last_modified.into()) }));
            }
            let below = store.list_with_delimiter(Some(&path)).await?;
            Ok((!below.objects.is_empty() || !below.common_prefixes.is_empty()).then_some(KeyStatus::Directory))
        })
    }

    fn open(&self, key: &str) -> CallbackResult<Option<Box<dyn StorageReader>>> {
        let (store, path) = (Arc::clone(&self.store), Path::from(key));
        let meta = self.wait({
            let (store, path) = (Arc::clone(&store), path.clone());
            async move { found(store.head(&path).await) }
        })?;
        let Some(meta) = meta else { return Ok(None) };
        Ok(Some(Box::new(Object { store, path, size: meta.size, handle: self.handle()? })))
    }

    fn put(&self, key: &str, data: &[u8], if_absent: bool) -> CallbackResult<bool> {
        let (store, path, payload) = (Arc::clone(&self.store), Path::from(key), PutPayload::from(data.to_vec()));
        self.wait(async move {
            let mode = if if_absent { PutMode::Create } else { PutMode::Overwrite };
            match store.put_opts(&path, payload, PutOptions::from(mode)).await {
                Ok(_) => Ok(true),
                Err(StoreError::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }

    fn begin(&self, key: &str, _size: u64) -> CallbackResult<Box<dyn StorageUpload>> {
        let (store, path) = (Arc::clone(&self.store), Path::from(key));
        let upload = self.wait(async move { store.put_multipart(&path).await })?;
        let state = UploadState { upload: Some(upload), sent: VecDeque::new() };
        Ok(Box::new(Upload { handle: self.handle()?, state: Mutex::new(state) }))
    }

    fn list(&self, key: &str) -> CallbackResult<Vec<String>> {
        let (store, path) = (Arc::clone(&self.store), Path::from(key));
        self.wait(async move {
            let below = store.list_with_delimiter(Some(&path)).await?;
            let paths = below.objects.iter().map(|object| &object.location).chain(&below.common_prefixes);
            Ok(paths.filter_map(|path| path.filename().map(str::to_owned)).collect())
        })
    }

    fn remove(&self, key: &str) -> CallbackResult<()> {
        let (store, path) = (Arc::clone(&self.store), Path::from(key));
        self.wait(async move { found(store.delete(&path).await).map(|_| ()) })
    }
}

struct Object {
    store: Arc<dyn ObjectStore>,
    path: Path,
    size: u64,
    handle: Handle,
}

impl StorageReader for Object {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> CallbackResult<usize> {
        let end = self.size.min(offset.saturating_add(into.len() as u64));
        if end <= offset {
            return Ok(0);
        }
        let (store, path) = (Arc::clone(&self.store), self.path.clone());
        let data = receive(&started(&self.handle, async move { store.get_range(&path, offset..end).await }))?;
        let size = data.len().min(into.len());
        into[..size].copy_from_slice(&data[..size]);
        Ok(size)
    }
}

struct Upload {
    handle: Handle,
    state: Mutex<UploadState>,
}

struct UploadState {
    upload: Option<Box<dyn MultipartUpload>>, // None when it is finished
    sent: VecDeque<Receiver<StoreResult<()>>>,
}

impl UploadState {
    fn settle(&mut self, at_most: usize) -> CallbackResult<()> {
        while self.sent.len() > at_most {
            let Some(first) = self.sent.pop_front() else { break };
            receive(&first)?;
        }
        Ok(())
    }
}

fn over() -> io::Error {
    io::Error::other("the upload has ended")
}

impl StorageUpload for Upload {
    fn part(&self, _index: usize, _offset: u64, data: &[u8]) -> CallbackResult<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.settle(IN_FLIGHT - 1)?;
        let upload = state.upload.as_mut().ok_or_else(over)?;
        let part = {
            let _inside = self.handle.enter(); // some stores start tasks at once
            upload.put_part(PutPayload::from(data.to_vec()))
        };
        let receiver = started(&self.handle, part);
        state.sent.push_back(receiver);
        Ok(())
    }

    fn finish(&self) -> CallbackResult<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.settle(0)?;
        let mut upload = state.upload.take().ok_or_else(over)?;
        let (upload, result) = receive(&started(&self.handle, async move {
            let result = upload.complete().await;
            Ok((upload, result))
        }))?;
        if result.is_err() {
            state.upload = Some(upload); // to be aborted
        }
        result.map(|_| ()).map_err(boxed)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = state.settle(0); // what failed is why it is dropped
        if let Some(mut upload) = state.upload.take() {
            let _ = receive(&started(&self.handle, async move { upload.abort().await }));
        }
    }
}
