//! Checkpoints in storages: of the program's own, and of the crate `object_store`.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{deadline, ranks};
use object_store::{local::LocalFileSystem, memory::InMemory, ObjectStore};
use tessera::{
    CallbackResult, Checkpoint, Code, Comm, DType, KeyStatus, Layout, LoadOptions, Native, ObjectStorage, Placement,
    Saver, State, Storage, StorageReader, StorageTraits, StorageUpload, Tensor,
};

const ROWS: usize = 3001;
const COLUMNS: usize = 1031;

/// This rank's rows of a matrix whose element (i, j) is i + j / 2 + value, and the state of them.
fn rows(comm: &Comm, columns: usize, value: f32) -> (State<'static>, Tensor) {
    let rank = comm.rank().unwrap();
    let layout = Layout::new(&[ROWS, columns], &[comm.world_size().unwrap()], &[Placement::Shard(0)]).unwrap();
    let region = layout.regions(rank).unwrap().remove(0);
    let mut part = vec![0.0f32; region.sizes[0] * columns];
    for (place, element) in part.iter_mut().enumerate() {
        *element = (region.offsets[0] + place / columns) as f32 + (place % columns) as f32 / 2.0 + value;
    }
    let part = Tensor::new(part, &region.sizes).unwrap();
    let mut state = State::new();
    state.add_sharded("w", &layout, DType::F32, std::slice::from_ref(&part), rank).unwrap();
    (state, part)
}

fn of_ones() -> State<'static> {
    State::new().with("x", &Tensor::new(vec![1.0f32; 5], [5]).unwrap())
}

fn save_and_load(storage: &Arc<impl Storage>) {
    ranks(3, |comm| {
        let saver =
            Saver::at(&comm, "runs/a").storage(storage.clone()).keep_latest(2).timeout(deadline()).open().unwrap();
        for step in 1..=3u8 {
            let (state, _) = rows(&comm, COLUMNS, step.into());
            if step % 2 == 0 {
                saver.save(step.into(), &state).unwrap();
            } else {
                saver.save_async(step.into(), &state).unwrap().wait().unwrap();
            }
        }
    });
    ranks(2, |comm| {
        let saver = Saver::at(&comm, "runs/a").storage(storage.clone()).timeout(deadline()).open().unwrap();
        let (mut state, part) = rows(&comm, COLUMNS, 0.0);
        let expected: Vec<f32> = part.to_vec::<f32>().unwrap().iter().map(|element| element + 3.0).collect();
        assert_eq!(saver.resume(&mut state).unwrap(), 3);
        assert_eq!(part.to_vec::<f32>().unwrap(), expected);
    });
    let checkpoint = Checkpoint::open_in(storage.clone(), "runs/a/latest").unwrap();
    assert_eq!(checkpoint.step().unwrap(), 3);
    let whole = checkpoint.read("w").unwrap().to_vec::<f32>().unwrap();
    assert_eq!(whole[(ROWS - 1) * COLUMNS + 2], ROWS as f32 + 3.0);
    let names = storage.list("runs/a").unwrap();
    assert_eq!(names.iter().filter(|name| name.starts_with("step-")).count(), 2, "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
    let newest = names.iter().filter(|name| name.starts_with("step-")).max().unwrap();
    storage.remove(&format!("runs/a/{newest}/rank-00001.safetensors")).unwrap();
    assert_eq!(checkpoint.read("w").unwrap_err().code(), Code::NotFound);
    assert_eq!(Checkpoint::open_in(storage.clone(), "runs/b").unwrap_err().code(), Code::NotFound);
}

fn of(store: impl ObjectStore) -> Arc<ObjectStorage> {
    Arc::new(ObjectStorage::new(Arc::new(store)).unwrap())
}

#[test]
fn object_stores_hold_checkpoints() {
    save_and_load(&of(InMemory::new()));
    let folder = tempfile::tempdir().unwrap();
    save_and_load(&of(LocalFileSystem::new_with_prefix(folder.path()).unwrap().with_automatic_cleanup(true)));
    save_and_load(&Arc::new(ObjectStorage::new(Arc::new(InMemory::new())).unwrap().without_conditional_put()));
}

#[test]
fn an_object_store_is_used_inside_an_async_runtime_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let storage = of(InMemory::new());
        Saver::alone("r").storage(storage.clone()).open().unwrap().save(4, &of_ones()).unwrap();
        assert_eq!(Checkpoint::open_in(storage, "r").unwrap().step().unwrap(), 4);
    });
}

#[test]
fn a_second_live_job_is_refused() {
    let storage = of(InMemory::new());
    let first = Saver::alone("r").storage(storage.clone()).open().unwrap();
    let error = Saver::alone("r").storage(storage.clone()).open().unwrap_err();
    assert_eq!(error.code(), Code::InvalidState);
    drop(first);
    Saver::alone("r").storage(storage).open().unwrap();
}

/// Objects in a map, with a method that fails.
#[derive(Default)]
struct Map {
    objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    fails: Arc<Mutex<Option<(&'static str, Failure)>>>,
    bytes_read: Arc<AtomicUsize>,
    any_order: bool,
    tiny_parts: bool, // smaller than the library takes
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    Io(io::ErrorKind),
    Text,
    Panic,
}

fn enter(fails: &Mutex<Option<(&'static str, Failure)>>, method: &str) -> CallbackResult<()> {
    let failure = *fails.lock().unwrap();
    match failure {
        Some((name, failure)) if name == method => match failure {
            Failure::Io(kind) => Err(io::Error::new(kind, "injected").into()),
            Failure::Text => Err("injected".into()),
            Failure::Panic => panic!("injected (expected in this test)"),
        },
        _ => Ok(()),
    }
}

impl Storage for Map {
    fn traits(&self) -> StorageTraits {
        let part_bytes = if self.tiny_parts { 1 } else { 65536 };
        StorageTraits { parts_in_any_order: self.any_order, puts_if_absent: self.any_order, part_bytes }
    }
    fn status(&self, key: &str) -> CallbackResult<Option<KeyStatus>> {
        let objects = self.objects.lock().unwrap();
        if let Some(data) = objects.get(key) {
            return Ok(Some(KeyStatus::Object { bytes: data.len() as u64, modified: None }));
        }
        let below = format!("{key}/");
        Ok(objects.keys().any(|other| other.starts_with(&below)).then_some(KeyStatus::Directory))
    }
    fn open(&self, key: &str) -> CallbackResult<Option<Box<dyn StorageReader>>> {
        let data = self.objects.lock().unwrap().get(key).cloned();
        let (fails, bytes_read) = (Arc::clone(&self.fails), Arc::clone(&self.bytes_read));
        Ok(data.map(|data| -> Box<dyn StorageReader> { Box::new(Bytes { data, fails, bytes_read }) }))
    }
    fn put(&self, key: &str, data: &[u8], if_absent: bool) -> CallbackResult<bool> {
        enter(&self.fails, "put")?;
        let mut objects = self.objects.lock().unwrap();
        if if_absent && objects.contains_key(key) {
            return Ok(false);
        }
        objects.insert(key.to_owned(), data.to_vec());
        Ok(true)
    }
    fn begin(&self, key: &str, _size: u64) -> CallbackResult<Box<dyn StorageUpload>> {
        enter(&self.fails, "begin")?;
        let (objects, fails) = (Arc::clone(&self.objects), Arc::clone(&self.fails));
        Ok(Box::new(Parts { key: key.to_owned(), parts: Mutex::default(), objects, fails, any_order: self.any_order }))
    }
    fn list(&self, key: &str) -> CallbackResult<Vec<String>> {
        enter(&self.fails, "list")?;
        let below = format!("{key}/");
        let objects = self.objects.lock().unwrap();
        let names: BTreeSet<_> = objects
            .keys()
            .filter_map(|other| other.strip_prefix(&below))
            .map(|rest| rest.split('/').next().unwrap_or(rest).to_owned())
            .collect();
        Ok(names.into_iter().collect())
    }
    fn remove(&self, key: &str) -> CallbackResult<()> {
        self.objects.lock().unwrap().remove(key);
        Ok(())
    }
}

struct Bytes {
    data: Vec<u8>,
    fails: Arc<Mutex<Option<(&'static str, Failure)>>>,
    bytes_read: Arc<AtomicUsize>,
}

impl StorageReader for Bytes {
    fn size(&self) -> u64 {
        self.data.len() as u64
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> CallbackResult<usize> {
        enter(&self.fails, "read")?;
        let rest = &self.data[usize::try_from(offset)?..];
        let size = rest.len().min(into.len());
        into[..size].copy_from_slice(&rest[..size]);
        self.bytes_read.fetch_add(size, Ordering::Relaxed);
        Ok(size)
    }
}

struct Parts {
    key: String,
    parts: Mutex<BTreeMap<usize, Vec<u8>>>,
    objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    fails: Arc<Mutex<Option<(&'static str, Failure)>>>,
    any_order: bool,
}

impl StorageUpload for Parts {
    fn part(&self, index: usize, _offset: u64, data: &[u8]) -> CallbackResult<()> {
        enter(&self.fails, "part")?;
        let mut parts = self.parts.lock().unwrap();
        assert!(self.any_order || index == parts.len(), "part {index} is not the next one");
        parts.insert(index, data.to_vec());
        Ok(())
    }
    fn finish(&self) -> CallbackResult<()> {
        enter(&self.fails, "finish")?;
        let whole = self.parts.lock().unwrap().values().flatten().copied().collect();
        self.objects.lock().unwrap().insert(self.key.clone(), whole);
        Ok(())
    }
}

#[test]
fn a_storage_of_the_programs_own_holds_checkpoints() {
    save_and_load(&Arc::new(Map::default()));
    save_and_load(&Arc::new(Map { any_order: true, ..Map::default() }));
}

#[test]
fn what_a_method_fails_with_is_told_on_every_rank() {
    let failures = [
        (Failure::Io(io::ErrorKind::ConnectionReset), Code::Io),
        (Failure::Io(io::ErrorKind::TimedOut), Code::Timeout),
        (Failure::Io(io::ErrorKind::PermissionDenied), Code::Permission),
        (Failure::Text, Code::User),
        (Failure::Panic, Code::User),
    ];
    for method in ["put", "begin", "part", "finish", "list"] {
        for (failure, code) in failures {
            let storage = Arc::new(Map::default());
            ranks(2, |comm| {
                let saver = Saver::at(&comm, "r").storage(storage.clone()).timeout(deadline()).open().unwrap();
                let (state, _) = rows(&comm, 64, 1.0);
                saver.save(1, &state).unwrap();
                comm.barrier().unwrap();
                if comm.rank().unwrap() == 0 {
                    *storage.fails.lock().unwrap() = Some((method, failure));
                }
                comm.barrier().unwrap();
                let error = saver.save(2, &state).unwrap_err();
                assert_eq!(error.code(), code, "{method}, {failure:?}: {error}");
                assert!(error.message().contains("injected"), "{error}");
                if code == Code::User {
                    assert_eq!(error.native(), Some(Native::User(-1)));
                }
                comm.barrier().unwrap();
                *storage.fails.lock().unwrap() = None;
            });
            let checkpoint = Checkpoint::open_in(storage.clone(), "r").unwrap();
            assert_eq!(checkpoint.step().unwrap(), 1);
            *storage.fails.lock().unwrap() = Some(("read", failure));
            assert_eq!(checkpoint.read("w").unwrap_err().code(), code);
        }
    }
}

#[test]
fn a_save_that_fails_in_the_background_is_told_by_its_future_and_once_by_the_next_call() {
    let storage = Arc::new(Map::default());
    let saver = Saver::alone("r").storage(storage.clone()).open().unwrap();
    let fail = |failure| *storage.fails.lock().unwrap() = failure;
    let weight = Tensor::new(vec![1.0f32; 1 << 16], [1 << 16]).unwrap(); // more than one part
    let state = State::new().with("weight", &weight);
    saver.save(1, &state).unwrap();
    for method in ["begin", "part", "finish"] {
        fail(Some((method, Failure::Io(io::ErrorKind::ConnectionReset))));
        let error = saver.save_async(2, &state).unwrap().wait().unwrap_err();
        assert_eq!(error.code(), Code::Io, "{method}: {error}");
        assert!(error.message().contains("injected"), "{error}");
        fail(None);
        let again = saver.save_async(3, &state).map(drop).unwrap_err();
        assert_eq!((again.code(), again.message()), (error.code(), error.message()), "{method}");
        saver.wait().unwrap();
        assert_eq!(Checkpoint::open_in(storage.clone(), "r").unwrap().step().unwrap(), 1, "nothing was saved");
    }
    saver.save_async(4, &state).unwrap().wait().unwrap();
    assert_eq!(Checkpoint::open_in(storage.clone(), "r").unwrap().step().unwrap(), 4);
}

#[test]
fn ranks_that_load_together_read_each_byte_once() {
    const RANKS: usize = 3;
    const ELEMENTS: usize = 3 << 20;
    let saved = ELEMENTS * size_of::<f32>();
    let storage = Arc::new(Map::default());
    for root in ["a", "b"] {
        let state = State::new().with("w", &Tensor::new(vec![2.0f32; ELEMENTS], [ELEMENTS]).unwrap());
        Saver::alone(root).storage(storage.clone()).open().unwrap().save(1, &state).unwrap();
    }
    let load = |comm: &Comm, root: &str, options: &LoadOptions<'_>| {
        let w = Tensor::new(vec![0.0f32; ELEMENTS], [ELEMENTS]).unwrap();
        let mut state = State::new().with("w", &w);
        Checkpoint::open_in(storage.clone(), root)?.load(&mut state, options)?;
        assert!(w.to_vec::<f32>().unwrap().iter().all(|element| *element == 2.0), "rank {}", comm.rank()?);
        Ok::<(), tessera::Error>(())
    };
    for together in [true, false] {
        let before = storage.bytes_read.load(Ordering::Relaxed);
        ranks(RANKS, |comm| {
            let options = if together { LoadOptions::new().comm(&comm) } else { LoadOptions::new() };
            load(&comm, "a", &options).unwrap();
        });
        let read = storage.bytes_read.load(Ordering::Relaxed) - before;
        let data = if together { saved } else { RANKS * saved };
        // Besides it each rank reads the manifest and the header.
        assert!((data..=data + RANKS * 65536).contains(&read), "{read} bytes were read of {saved}");
    }
    ranks(2, |comm| {
        let root = if comm.rank().unwrap() == 0 { "a" } else { "b" };
        let error = load(&comm, root, &LoadOptions::new().comm(&comm)).unwrap_err();
        assert_eq!(error.code(), Code::Mismatch);
        assert!(error.message().contains("rank 1 loads b/step-00000001-"), "{error}");
    });
}

#[test]
fn a_storage_is_released_with_its_last_user() {
    let storage = Arc::new(Map::default());
    let saver = Saver::alone("r").storage(storage.clone()).open().unwrap();
    saver.save(1, &of_ones()).unwrap();
    let checkpoint = Checkpoint::open_in(storage.clone(), "r").unwrap();
    assert_eq!(Arc::strong_count(&storage), 3);
    drop(saver);
    drop(checkpoint);
    assert_eq!(Arc::strong_count(&storage), 1);
}

#[test]
fn a_storage_that_one_rank_refuses_is_refused_on_all() {
    let objects = Arc::default();
    ranks(2, |comm| {
        let bad = comm.rank().unwrap() == 1;
        let of = |tiny_parts| Arc::new(Map { objects: Arc::clone(&objects), tiny_parts, ..Map::default() });
        let error = Saver::at(&comm, "r").storage(of(bad)).open().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains("vtable.part_bytes is 1"), "{error}");
        assert_eq!(error.peer() == Some(1), !bad, "{error}");
        Saver::at(&comm, "r").storage(of(false)).open().unwrap();
    });
}
