"""Storages: what is saved into one comes back, whoever provides it; what it raises is told on every rank."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import tessera as ts
from patience import patience
from tessera import _core
from tessera.storage import ObjectStatus, Reader, Storage, Upload, from_fsspec

fsspec = pytest.importorskip("fsspec")

ROWS = 3001
BIG = 1031  # columns: a rank file has parts at 2 and 3 ranks


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """A server that speaks S3, and how to reach it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {"endpoint_url": f"http://{host}:{port}", "key": "x", "secret": "x", "skip_instance_cache": True}
    finally:
        server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> Iterator[Storage]:
    if request.param == "s3":
        filesystem = fsspec.filesystem(
            "s3", client_kwargs={"region_name": "us-east-1"}, **request.getfixturevalue("s3")
        )
        bucket = f"bucket-{os.getpid()}-{len(filesystem.ls(''))}"
        filesystem.call_s3("create_bucket", Bucket=bucket)
        yield from_fsspec(filesystem, bucket)
        filesystem.rm(bucket, recursive=True)
    elif request.param == "file":
        yield from_fsspec(fsspec.filesystem("file"), str(tmp_path))
    else:
        filesystem = fsspec.filesystem("memory")
        prefix = f"/{request.node.originalname}"
        yield from_fsspec(filesystem, prefix)
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm(prefix, recursive=True)


def rows_of(comm: ts.Comm, value: float, columns: int = BIG) -> tuple[np.ndarray, ts.State]:
    """This rank's rows of a matrix whose element (i, j) is i + j / 2 + value."""
    layout = ts.Layout((ROWS, columns), (comm.world_size,), [ts.Shard(0)])
    (box,) = layout.boxes(comm.rank)
    first, count = box.offsets[0], box.sizes[0]
    part = (np.arange(first, first + count)[:, None] + np.arange(columns)[None, :] / 2 + value).astype(np.float32)
    return part, ts.State(w=ts.Sharded(layout, [part], comm.rank), step=int(value))


def keys(storage: Storage, key: str) -> list[str]:
    """Every object below."""
    found = []
    for name in storage.list(key):
        below = f"{key}/{name}"
        status = storage.status(below)
        assert status is not None
        found += keys(storage, below) if status.is_directory else [below]
    return sorted(found)


def test_ranks_save_and_others_load(ranks, storage: Storage):
    def save(comm: ts.Comm) -> None:
        with ts.Saver(comm, "runs/a", keep_latest=2, storage=storage) as saver:
            part, state = rows_of(comm, 1)
            for step in (1, 2, 3):
                if step % 2:
                    saver.save_async(step, state, metrics={"loss": 1 / step})
                else:
                    saver.save(step, state)
                saver.wait()
                part += 1

    ranks(3, save)
    names = keys(storage, "runs/a")
    assert len([name for name in names if name.endswith("manifest.json")]) == 2
    assert len(names) == 2 * 4 + 1, names

    def load(comm: ts.Comm) -> None:
        with ts.Saver(comm, "runs/a", storage=storage) as saver:
            part, state = rows_of(comm, 0)
            expected = part + 3
            assert saver.resume(state) == 3
            assert (part == expected).all()

    ranks(2, load)
    with ts.Checkpoint("runs/a/latest", storage=storage) as checkpoint:
        assert checkpoint.step == 3
        assert checkpoint.metrics == {"loss": 1 / 3}
        checkpoint.verify()
        whole = checkpoint["w"]
        assert whole[ROWS - 1, 2] == ROWS - 1 + 1 + 3
    with pytest.raises(ts.NotFound, match="no checkpoint at runs/b"):
        ts.Checkpoint("runs/b", storage=storage)


def test_a_second_live_job_is_refused(storage: Storage):
    with ts.Saver(None, "r", storage=storage), pytest.raises(ts.InvalidState, match="another live job"):
        ts.Saver(None, "r", storage=storage)
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(x=np.ones(3)))
    assert [name for name in keys(storage, "r") if "/." in name] == []


def test_damage_is_found(storage: Storage):
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(x=np.arange(70000.0)))
    (name,) = [name for name in keys(storage, "r") if name.endswith(".safetensors")]
    reader = storage.open(name)
    assert reader is not None
    data = bytearray(reader.size)
    reader.read(0, memoryview(data))
    storage.put(name, memoryview(bytes(data[:-1])), False)
    with ts.Checkpoint("r", storage=storage) as checkpoint, pytest.raises(ts.Corrupt, match="truncated"):
        checkpoint["x"]
    data[-1] ^= 1
    storage.put(name, memoryview(bytes(data)), False)
    with ts.Checkpoint("r", storage=storage) as checkpoint, pytest.raises(ts.Corrupt, match="checksum"):
        checkpoint["x"]
    storage.remove(name)
    with (
        ts.Checkpoint("r", storage=storage) as checkpoint,
        pytest.raises(ts.Corrupt, match=r"rank-00000\.safetensors is missing"),
    ):
        checkpoint["x"]


class Dictionary(Storage):
    """A storage written by hand, as a user would; a call by name can be made to raise."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.raises: dict[str, BaseException] = {}
        self.threads: set[int] = set()
        self.bytes_read = 0

    def _enter(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        if name in self.raises:
            raise self.raises[name]

    def status(self, key: str) -> ObjectStatus | None:
        self._enter("status")
        with self.lock:
            if key in self.objects:
                return ObjectStatus(size=len(self.objects[key]))
            return ObjectStatus(is_directory=True) if any(k.startswith(f"{key}/") for k in self.objects) else None

    def open(self, key: str) -> Reader | None:
        self._enter("open")
        data = self.objects.get(key)
        return None if data is None else Bytes(self, data)

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        self._enter("put latest" if key.endswith("latest") else "put")
        with self.lock:
            self.objects[key] = bytes(data)
        return True

    def begin(self, key: str, size: int) -> Upload:
        self._enter("begin")
        return Parts(self, key)

    def list(self, key: str) -> Iterable[str]:
        self._enter("list")
        with self.lock:
            below = [k[len(key) + 1 :] for k in self.objects if k.startswith(f"{key}/")]
        return sorted({name.partition("/")[0] for name in below})

    def remove(self, key: str) -> None:
        self._enter("remove")
        with self.lock:
            self.objects.pop(key, None)


class Bytes:
    def __init__(self, storage: Dictionary, data: bytes) -> None:
        self.storage, self.data, self.size = storage, data, len(data)

    def read(self, offset: int, into: memoryview) -> int:
        self.storage._enter("read")
        part = self.data[offset : offset + len(into)]
        into[: len(part)] = part
        with self.storage.lock:
            self.storage.bytes_read += len(part)
        return len(part)

    def close(self) -> None:
        pass


class Parts:
    def __init__(self, storage: Dictionary, key: str) -> None:
        self.storage, self.key = storage, key
        self.parts: list[bytes] = []
        self.dropped = False

    def part(self, index: int, offset: int, data: memoryview) -> None:
        self.storage._enter("part")
        assert index == len(self.parts)
        assert offset == sum(map(len, self.parts))
        self.parts.append(bytes(data))

    def finish(self) -> None:
        self.storage._enter("finish")
        self.storage.objects[self.key] = b"".join(self.parts)

    def drop(self) -> None:
        assert not self.dropped
        self.dropped = True


class Meddling(Dictionary):
    """Does something else, once, in the first part that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.part_bytes = 65536
        self.meddle: Callable[[], None] | None = None

    def _enter(self, name: str) -> None:
        super()._enter(name)
        if name == "part" and self.meddle is not None:
            meddle, self.meddle = self.meddle, None
            meddle()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_saver_that_its_storage_uses_or_closes_refuses_and_saves_all_the_same(in_background: bool):
    storage = Meddling()
    saver = ts.Saver(None, "r", storage=storage)
    told: list[str] = []
    returned = threading.Event()

    def meddle() -> None:
        assert not in_background or returned.wait(
            patience(30)
        )  # while save_async runs, the saver is in use and cannot be closed
        for use in (saver.wait, lambda: saver.save(2, ts.State(x=np.ones(3)))):
            with pytest.raises(ts.InvalidState) as error:
                use()
            told.append(str(error.value))
        if in_background:
            saver.close()

    storage.meddle = meddle
    state = ts.State(x=np.arange(100_000.0))
    if in_background:
        work = saver.save_async(1, state)
        returned.set()
        work.wait(patience(30))
    else:
        saver.save(1, state)
    assert len(told) == 2
    saver.close()
    with ts.Checkpoint("r", storage=storage) as checkpoint:
        assert checkpoint["x"][-1] == 99_999


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (OSError("the disk melted"), ts.TesseraIOError, "OSError: the disk melted"),
        (TimeoutError("slow"), ts.TesseraTimeout, "TimeoutError: slow"),
        (PermissionError("no"), ts.PermissionDenied, "PermissionError: no"),
        (KeyError("k"), ts.UserError, "KeyError: 'k'"),
        (ts.Unsupported("not here"), ts.Unsupported, "not here"),
    ],
)
@pytest.mark.parametrize("where", ["put", "begin", "part", "finish", "list"])
def test_what_a_method_raises_is_told_on_every_rank(ranks, where, raised, kind, text):
    storage = Dictionary()
    storage.part_bytes = 65536

    def save(comm: ts.Comm) -> None:
        with ts.Saver(comm, "r", storage=storage) as saver:
            _, state = rows_of(comm, 1, 64)
            saver.save(1, state)
            comm.barrier()
            if comm.rank == 0:
                storage.raises[where] = raised
            comm.barrier()
            with pytest.raises(kind, match=f"the storage's {where} of 'r/step-00000002-.*{text}"):
                saver.save(2, state)
            comm.barrier()
            storage.raises.clear()

    ranks(2, save)
    with ts.Checkpoint("r", storage=storage) as checkpoint:
        assert checkpoint.step == 1
        storage.raises["read"] = raised
        with pytest.raises(kind, match=text):
            checkpoint["w"]


@pytest.mark.parametrize("together", [True, False])
def test_ranks_that_load_together_read_each_byte_once(ranks, together):
    storage = Dictionary()
    size = 3
    saved = np.arange(3 << 19, dtype=np.float64)  # 12 MiB
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(w=saved))
    before = storage.bytes_read

    def load(comm: ts.Comm) -> None:
        w = np.zeros_like(saved)
        with ts.Checkpoint("r", storage=storage) as checkpoint:
            checkpoint.load(ts.State(w=w), comm=comm if together else None)
        assert (w == saved).all()

    ranks(size, load)
    copies = 1 if together else size
    assert 0 <= storage.bytes_read - before - copies * saved.nbytes <= size * 65536  # manifest and header of each


def test_ranks_that_load_different_checkpoints_together_are_told(ranks):
    storage = Dictionary()
    for root in ("a", "b"):
        with ts.Saver(None, root, storage=storage) as saver:
            saver.save(1, ts.State(w=np.ones(3)))

    def load(comm: ts.Comm) -> None:
        with (
            ts.Checkpoint("ab"[comm.rank], storage=storage) as checkpoint,
            pytest.raises(ts.Mismatch, match=r"rank 1 loads b/step-00000001-.*, but rank 0 loads a/step-00000001-"),
        ):
            checkpoint.load(ts.State(w=np.zeros(3)), comm=comm)

    ranks(2, load)


def test_a_rank_that_loads_alone_while_others_load_together_is_named(ranks):
    storage = Dictionary()
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(w=np.ones(3)))

    def load(comm: ts.Comm) -> None:
        with ts.Checkpoint("r", storage=storage) as checkpoint:
            checkpoint.load(ts.State(w=np.zeros(3)), comm=None if comm.rank == 1 else comm)
        comm.barrier()

    for error in ranks.outcomes(2, load):
        assert isinstance(error, ts.Mismatch), error
        assert "checkpoint vote" in str(error)


def test_a_hint_that_cannot_be_written_is_no_failure():
    storage = Dictionary()
    storage.raises["put latest"] = OSError("no")
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(x=np.ones(3)))
    assert ts.Checkpoint("r", storage=storage).step == 1


def test_a_background_save_calls_from_another_thread():
    storage = Dictionary()
    with ts.Saver(None, "r", storage=storage) as saver:
        storage.threads.clear()
        saver.save_async(1, ts.State(x=np.ones(3))).wait()
        assert threading.get_ident() not in storage.threads
        storage.raises["put"] = OSError("later")
        work = saver.save_async(2, ts.State(x=np.ones(3)))
        with pytest.raises(ts.TesseraIOError, match="later"):
            work.wait()
        storage.raises.clear()
        with pytest.raises(ts.TesseraIOError, match="later"):
            saver.wait()
        saver.save(3, ts.State(x=np.ones(3)))
    manifest = [key for key in storage.objects if key.endswith("manifest.json")]
    assert [json.loads(storage.objects[key])["step"] for key in sorted(manifest)] == [1, 3]


def test_ctrl_c_in_a_method_is_ctrl_c():
    storage = Dictionary()
    with ts.Saver(None, "r", storage=storage) as saver:
        storage.raises["list"] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            saver.save(1, ts.State(x=np.ones(3)))
        storage.raises.clear()
        saver.save(2, ts.State(x=np.ones(3)))


def test_ctrl_c_is_not_lost_in_a_destructor_that_runs_meanwhile(monkeypatch):
    class Freed:
        def __del__(self):
            ts.Saver(None, "other", storage=Dictionary()).close()

    made = _core._from_native
    monkeypatch.setattr(_core, "_from_native", lambda *arguments: (Freed(), made(*arguments))[1])
    test_ctrl_c_in_a_method_is_ctrl_c()


def test_what_is_no_storage_is_refused():
    with pytest.raises(ts.InvalidArgument, match=r"it must be a tessera\.Storage"):
        ts.Saver(None, "r", storage=fsspec.filesystem("memory"))
    small = Dictionary()
    small.part_bytes = 5
    with pytest.raises(ts.InvalidArgument, match="part_bytes is 5"):
        ts.Checkpoint("r", storage=small)


def test_a_storage_is_released_with_its_last_user():
    import gc
    import weakref

    storage = Dictionary()
    with ts.Saver(None, "r", storage=storage) as saver:
        saver.save(1, ts.State(x=np.ones(3)))
    checkpoint = ts.Checkpoint("r", storage=storage)
    alive = weakref.ref(storage)
    del storage
    gc.collect()
    assert alive() is not None
    assert checkpoint["x"].sum() == 3
    checkpoint.close()
    del saver, checkpoint
    gc.collect()
    assert alive() is None


def test_names_in_local_files_are_durable_before_a_save_returns(tmp_path, monkeypatch):
    events: list[tuple[str, str]] = []
    fsync, filesystem = os.fsync, fsspec.filesystem("file")
    mv = type(filesystem).mv

    def recorded_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_mv(self: Any, source: str, target: str, **options: Any) -> None:
        events.append(("mv", target))
        mv(self, source, target, **options)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(type(filesystem), "mv", recorded_mv)
    with ts.init() as comm, ts.Saver(comm, "a/root", storage=from_fsspec(filesystem, str(tmp_path))) as saver:
        saver.save(3, ts.State(w=np.ones(5, np.float32)))
    moved = [target for kind, target in events if kind == "mv"]
    assert any(target.endswith("manifest.json") for target in moved)
    for target in moved:
        after = events[events.index(("mv", target)) :]
        assert ("fsync", os.path.dirname(target)) in after, target
    synced = {path for kind, path in events if kind == "fsync"}
    assert {str(tmp_path), str(tmp_path / "a")} <= synced, "those that got the new directories"
