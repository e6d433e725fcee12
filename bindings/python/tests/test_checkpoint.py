"""States, savers and checkpoints: what is saved comes back, in place, at any world size; damage is told."""

import itertools
import json
import math
import os
import shutil
import zipfile
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import tessera as ts
from patience import patience
from tessera.values import decode


@pytest.fixture
def saver(tmp_path: Path):
    with ts.Saver(None, tmp_path / "root") as made:
        yield made


def saved(saver: ts.Saver, **parts) -> Path:
    """The directory of a checkpoint of these parts."""
    saver.save(1, ts.State(**parts))
    with ts.Checkpoint(saver.root) as checkpoint:
        return Path(checkpoint.path)


def test_there_is_nothing_at_first(saver: ts.Saver):
    weight = np.ones(3)
    state = ts.State(weight=weight, epoch=7)
    assert saver.resume(state) == 0
    assert (weight == 1).all()
    assert state["epoch"] == 7


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"])
def test_arrays_are_loaded_in_place(saver: ts.Saver, dtype):
    array = (np.arange(12) % 2).astype(dtype).reshape(3, 4)
    before = array.copy()
    state = ts.State(array=array)
    saver.save(3, state)
    array[...] = 0
    assert saver.resume(state) == 3
    assert (array == before).all()
    with ts.Checkpoint(saver.root) as checkpoint:
        read = checkpoint["array"]
        assert read.dtype == array.dtype
        assert (read == before).all()


def test_bfloat16_arrays(saver: ts.Saver):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(5).astype(ml_dtypes.bfloat16)
    path = saved(saver, array=array)
    with ts.Checkpoint(path) as checkpoint:
        assert checkpoint.tensors["array"].dtype is ts.DType.BF16
        assert checkpoint["array"].dtype == array.dtype
        assert (checkpoint["array"] == array).all()
        bits = np.zeros(5, np.uint16)
        checkpoint.read("array", bits)
        assert (bits == array.view(np.uint16)).all()


STORED_ONLY = ["uint16", "uint32", "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", STORED_ONLY)
def test_dtypes_of_checkpoints_alone(saver: ts.Saver, name: str):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1, 2, 4]).astype(getattr(ml_dtypes, name, name))
    path = saved(saver, array=array)
    with ts.Checkpoint(path) as checkpoint:
        read = checkpoint["array"]
        assert read.dtype == array.dtype
        assert read.tobytes() == array.tobytes()
        assert checkpoint.tensors["array"].dtype.numpy == array.dtype
    with ts.init() as comm, pytest.raises(ts.Unsupported, match="cannot be reduced"):
        comm.all_reduce(array)


def test_complex128_has_no_place_in_safetensors(saver: ts.Saver):
    with pytest.raises(ts.Unsupported, match=r"'array' is c128.*torch_dcp"):
        saver.save(1, ts.State(array=np.ones(2, complex)))
    with ts.Saver(None, Path(saver.root).parent / "dcp", format="torch_dcp") as other:
        other.save(1, ts.State(array=np.full(2, 2 - 1j)))
        with ts.Checkpoint(other.root) as checkpoint:
            assert (checkpoint["array"] == 2 - 1j).all()


@pytest.mark.parametrize("form", ["safetensors", "torch_dcp", "torch_save"])
def test_a_checkpoint_is_exported(saver: ts.Saver, tmp_path: Path, form: str):
    array = np.arange(30, dtype=np.int16).reshape(5, 6)
    path = saved(saver, model={"array": array}, epoch=3)
    out = tmp_path / "out"
    with ts.Checkpoint(path) as checkpoint, ts.init() as comm:
        told: list[tuple[ts.Phase, int, int]] = []
        checkpoint.export(
            out, comm, format=form, under="model.", timeout=patience(30), progress=lambda *facts: told.append(facts)
        )
        assert {phase for phase, _, _ in told} == {ts.Phase.WRITE}
        assert told[-1][1] == told[-1][2] >= array.nbytes
        with pytest.raises(ts.InvalidArgument, match="already exists"):
            checkpoint.export(out, format=form)
        checkpoint.export(tmp_path / "alone")
        with pytest.raises(ts.InvalidArgument, match="format is 'other'"):
            checkpoint.export(tmp_path / "other", format="other")
        with pytest.raises(TypeError, match="Comm"):
            checkpoint.export(tmp_path / "other", 3)  # type: ignore[arg-type]
    with ts.Checkpoint(out) as exported:
        assert list(exported) == ["array"]
        assert (exported["array"] == array).all()
        assert exported.step == -1
    with ts.Checkpoint(tmp_path / "alone" / "model.safetensors") as exported:
        assert list(exported) == ["model.array"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "out", "root"]


NUMPY_TYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMPY_TYPES += ["float16", "float32", "float64", "complex64"]


def test_numpy_loads_what_is_exported_as_npz(saver: ts.Saver, tmp_path: Path, ranks):
    arrays = {f"layers/{name}.größe": np.arange(7).astype(name) for name in NUMPY_TYPES}
    arrays |= {"scalar": np.array(2.5), "empty": np.empty((0, 3), np.float32)}
    arrays["large"] = np.arange(600_000, dtype=np.float64).reshape(2, 1, 300, 1000)
    path = saved(saver, **arrays, epoch=3)
    with ts.Checkpoint(path) as checkpoint:
        checkpoint.export(tmp_path / "alone", format="npz")

    def export(comm: ts.Comm) -> None:
        with ts.Checkpoint(path) as checkpoint:
            checkpoint.export(tmp_path / "together", comm, format="npz")

    ranks(3, export)
    for name in ("alone", "together"):
        with zipfile.ZipFile(tmp_path / name / "model.npz") as archive:
            assert archive.testzip() is None
        with np.load(tmp_path / name / "model.npz") as found:
            assert set(found) == set(arrays)
            for key, array in arrays.items():
                assert found[key].dtype == array.dtype
                assert found[key].shape == array.shape
                assert (found[key] == array).all()


def test_a_name_that_numpy_would_take_for_another_is_not_exported_as_npz(saver: ts.Saver, tmp_path: Path):
    with (
        ts.Checkpoint(saved(saver, **{"a": np.ones(2), "a.npy": np.zeros(2)})) as checkpoint,
        pytest.raises(ts.Unsupported, match="cannot distinguish it from 'a'"),
    ):
        checkpoint.export(tmp_path / "out", format="npz")
    assert not (tmp_path / "out").exists()


def test_files_of_a_size_are_exported_with_an_index(saver: ts.Saver, tmp_path: Path):
    path = saved(saver, a=np.ones(100), b=np.zeros(100))
    with ts.Checkpoint(path) as checkpoint:
        checkpoint.export(tmp_path / "out", max_file_bytes=800)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["a", "b"]
    assert len(set(index["weight_map"].values())) == 2
    with ts.Checkpoint(tmp_path / "out") as exported:
        assert (exported["a"] == 1).all()


VALUES = {
    "none": None,
    "flag": True,
    "int": -5,
    "zero": 0,
    "least": -(2**63),
    "big": 10**60,
    "float": 0.1,
    "whole": 2.0,
    "inf": -math.inf,
    "text": "ünï\n",
    "bytes": b"\0\xff",
    "list": [1, [2.5, None]],
    "tuple": (1, ("x",)),
    "map": {1: "a", None: b"", (2, 3): {"deep": True}},
    "dict": {"lr": 0.5, "milestones": [1, 2]},
    "empty": {},
}


def test_values_come_back_with_their_types(saver: ts.Saver):
    state = ts.State(**VALUES)
    saver.save(1, state)
    for name in state:
        state[name] = "overwritten"
    assert saver.resume(state) == 1
    for name, value in VALUES.items():
        assert state[name] == value
        assert type(state[name]) is type(value)
    with ts.Checkpoint(saver.root) as checkpoint:
        assert {name: checkpoint.saved_values[name] for name in VALUES} == VALUES


def test_nan_comes_back(saver: ts.State):
    state = ts.State(loss=math.nan, nested=[math.nan])
    saver.save(1, state)
    state["loss"] = state["nested"] = None
    saver.resume(state)
    assert math.isnan(state["loss"])
    assert math.isnan(state["nested"][0])


def test_values_are_those_of_the_moment_of_the_save(saver: ts.Saver):
    state = ts.State(epoch=1)
    state["epoch"] += 1
    saver.save(1, state)
    state["epoch"] = 9
    saver.resume(state)
    assert state["epoch"] == 2


def test_containers_of_arrays_are_flattened_and_filled(saver: ts.Saver):
    inner = {"weight": np.ones(2), "step": 3, "groups": [{"lr": 0.1}]}
    layers = [np.zeros(1), {"bias": np.full(2, 5.0), 7: np.ones(1)}]
    state = ts.State(inner=inner, layers=layers)
    saver.save(1, state)
    weight = inner["weight"]
    weight[:] = 0
    inner["step"] = 0
    inner["groups"] = None
    layers[1]["bias"][:] = 0
    saver.resume(state)
    assert inner["weight"] is weight
    assert (weight == 1).all()
    assert (inner["step"], inner["groups"]) == (3, [{"lr": 0.1}])
    assert (layers[1]["bias"] == 5).all()
    with ts.Checkpoint(saver.root) as checkpoint:
        assert list(checkpoint) == ["inner.weight", "layers.0", "layers.1.7", "layers.1.bias"]


def test_tied_arrays_are_saved_once_load_apart_and_are_tied_again(saver: ts.Saver):
    """Two names of the same memory."""
    shared = np.full(1000, 1.5, np.float32)
    tied = ts.State(embed=shared, head=shared)
    embed, head = np.zeros((2, 1000), np.float32)
    apart = ts.State(embed=embed, head=head)

    def newest() -> tuple[Path, dict[str, str], int]:
        with ts.Checkpoint(saver.root) as checkpoint:
            assert list(checkpoint) == ["embed", "head"]
            path = Path(checkpoint.path)
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            return path, checkpoint.manifest["aliases"], size

    saver.save(1, tied)
    first, aliases, once = newest()
    assert aliases == {"head": "embed"}
    assert saver.resume(apart) == 1
    assert (embed == 1.5).all()
    assert (head == 1.5).all()
    head[:] = 2.5
    saver.save(2, apart)
    assert newest()[1:] == ({}, once + 4 * 1000)
    shared[:] = 0
    with ts.Checkpoint(first) as checkpoint:
        checkpoint.load(tied)
    assert (shared == 1.5).all()
    saver.save(3, tied)
    assert newest()[1:] == ({"head": "embed"}, once)


def test_an_array_that_was_replaced_is_the_one_that_is_saved(saver: ts.Saver):
    inner = {"weight": np.ones(2)}
    state = ts.State(inner=inner)
    saver.save(1, state)
    inner["weight"] = np.full(3, 2.0)
    saver.save(2, state)
    with ts.Checkpoint(saver.root) as checkpoint:
        assert checkpoint["inner.weight"].tolist() == [2, 2, 2]
        assert repr(checkpoint) == f"<tessera.Checkpoint {checkpoint.path!r}, step 2>"
    assert repr(checkpoint) == "<tessera.Checkpoint (closed)>"


class Model:
    def __init__(self):
        self.weight, self.steps = np.zeros(3), 0

    def state_dict(self):
        return {"weight": self.weight.copy(), "steps": self.steps}

    def load_state_dict(self, state):
        self.weight, self.steps = state["weight"], state["steps"]


def test_objects_that_know_their_state(saver: ts.Saver):
    model = Model()
    model.weight[:], model.steps = 4, 11
    saver.save(1, ts.State(model=model))
    other = Model()
    saver.resume(ts.State(model=other))
    assert (other.weight == 4).all()
    assert other.steps == 11


class Point(NamedTuple):
    where: np.ndarray
    name: str


def test_tuples_that_hold_arrays_get_what_was_loaded(saver: ts.Saver):
    before = np.random.RandomState(1)
    before.normal()
    at = np.array([2.0])
    saver.save(3, ts.State(rng=before.get_state(), model={"at": Point(at, "a")}, plain=((1, 2), [np.ones(1)])))
    rng, model, plain = np.random.RandomState(2), {"at": Point(np.zeros(1), "b")}, ((0, 0), [np.zeros(1)])
    where, inner = model["at"].where, plain[1]
    state = ts.State(rng=rng.get_state(), model=model, plain=plain)
    assert saver.resume(state) == 3
    rng.set_state(state["rng"])
    assert rng.normal() == before.normal()
    assert isinstance(model["at"], Point)
    assert model["at"].name == "a"
    assert model["at"].where is where
    assert where[0] == 2
    assert state["plain"] == ((1, 2), inner)
    assert inner[0][0] == 1
    saver.save(4, state)
    arrays = (np.ones(2), np.ones(3))
    state = ts.State(arrays=arrays)
    saver.save(5, state)
    saver.resume(state)
    assert state["arrays"] is arrays


def test_a_value_where_a_load_could_not_put_it_is_refused_when_given():
    weight = np.ones(2)
    ts.State(model=MappingProxyType({"weight": weight, "inner": [weight, 1]}))
    for value in (1, (weight.copy(), 1)):
        with pytest.raises(ts.InvalidArgument, match=r"model\.steps: .*mappingproxy; use a dict"):
            ts.State(model=MappingProxyType({"weight": weight, "steps": value}))


class Frozen:
    def state_dict(self):
        return MappingProxyType({"weight": np.ones(2), "steps": 1})

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_dict_that_takes_no_values_is_refused_before_a_save(saver: ts.Saver):
    with pytest.raises(ts.InvalidArgument, match=r"model\.steps: .*mappingproxy"):
        saver.save(1, ts.State(model=Frozen()))


class Deep:
    def state_dict(self):
        return {"inner": {"weight": np.ones((1,) * 9)}}

    def load_state_dict(self, state):
        raise AssertionError


def test_an_export_warns_of_what_it_leaves_out(tmp_path: Path):
    header = (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"odd":{"dtype":"F4","shape":[2],"data_offsets":[8,9]}}'
    )
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
    told: list[str] = []
    ts.log.set_callback(lambda _, line: told.append(line))
    try:
        with ts.Checkpoint(tmp_path / "a.safetensors") as checkpoint:
            assert list(checkpoint.unreadable) == ["odd"]
            checkpoint.export(tmp_path / "out")
    finally:
        ts.log.set_callback(None)
    (line,) = told
    assert "leaves out what cannot be read (1 in all): 'odd' (dtype F4 is not supported)" in line


def test_what_is_no_part_is_refused_by_name(saver: ts.Saver):
    with pytest.raises(ts.InvalidArgument, match=r"model\.inner\.weight: the array has 9 dimensions"):
        saver.save(1, ts.State(model=Deep()))
    with pytest.raises(ts.InvalidArgument, match="oddity"):
        saver.save(1, ts.State(oddity=object()))
    with pytest.raises(ts.InvalidArgument, match="odd"):
        saver.save(1, ts.State(odd={(1, 2): np.ones(2)}))
    with pytest.raises(ts.InvalidArgument, match=r"a\.b"):
        saver.save(1, ts.State(**{"a": {"b": np.ones(1)}, "a.b": 3}))
    with pytest.raises(TypeError, match="State"):
        saver.save(1, {"w": np.ones(2)})  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgument):
        saver.save(-1, ts.State(epoch=1))


def test_a_state_is_a_mapping_of_its_parts():
    weight = np.ones(2)
    state = ts.State(weight=weight, epoch=1)
    assert list(state) == ["weight", "epoch"]
    assert len(state) == 2
    assert state["weight"] is weight
    del state["epoch"]
    assert "epoch" not in state
    assert "weight" in repr(state)


def training(comm: ts.Comm, root: Path):
    """A small job: model, optimizer, sampler, state, saver."""
    params = {"w": np.full((4, 3), comm.rank + 1.0, np.float32), "b": np.zeros(4, np.float32)}
    ddp = ts.DDP(comm, params)
    opt = ts.AdamW(ddp, lr=0.1)
    data = ts.Sampler(comm, 40, seed=3)
    state = ts.State(model=ddp, optim=opt, data=data, rng=ts.PerRank(comm, f"generator of {comm.rank}"))
    saver = ts.Saver(comm, root, keep_latest=2, timeout=patience(20))
    return params, ddp, opt, data, state, saver


def train(ddp: ts.DDP, opt: ts.Optimizer, data: ts.Sampler, steps: int) -> list[int]:
    taken = []
    for _ in range(steps):
        taken += data.batch(2).tolist()
        for i, grad in enumerate(ddp.grads.values()):
            grad[...] = (i + 1) * np.cos(ddp.params[ddp.names[i]])
        ddp.ready_all()
        ddp.wait()
        opt.step()
    return taken


def test_a_job_resumes_where_it_was(ranks, tmp_path):
    def whole(comm: ts.Comm):
        params, ddp, opt, data, _, saver = training(comm, tmp_path / "unused")
        with saver:
            return train(ddp, opt, data, 8), params

    def first(comm: ts.Comm):
        _, ddp, opt, data, state, saver = training(comm, tmp_path / "root")
        with saver:
            assert saver.resume(state) == 0
            taken = train(ddp, opt, data, 5)
            saver.save_async(5, state, metrics={"loss": 0.5})
        return taken

    def second(comm: ts.Comm):
        params, ddp, opt, data, state, saver = training(comm, tmp_path / "root")
        state["rng"] = None
        with saver:
            assert saver.resume(state) == 5
        assert state["rng"] == f"generator of {comm.rank}"
        assert opt.steps == 5
        return train(ddp, opt, data, 3), params

    expected = ranks(2, whole)
    before = ranks(2, first)
    after = ranks(2, second)
    for rank in range(2):
        assert before[rank] + after[rank][0] == expected[rank][0]
        for name, array in expected[rank][1].items():
            assert (after[rank][1][name] == array).all()
    with ts.Checkpoint(tmp_path / "root") as checkpoint:
        assert checkpoint.metrics == {"loss": 0.5}
        assert checkpoint.manifest["writer"]["language"] == "python"
        assert {"model.w", "model.b", "optim.state.w.exp_avg"} <= set(checkpoint)
        assert checkpoint["model.w"].dtype == np.float32


def test_a_job_resumes_at_another_world_size(ranks, tmp_path):
    def first(comm: ts.Comm):
        _, ddp, opt, data, state, saver = training(comm, tmp_path)
        del state["rng"]
        taken = train(ddp, opt, data, 3)
        with saver:
            saver.save(3, state)
        return taken

    def second(comm: ts.Comm):
        _, ddp, opt, data, state, saver = training(comm, tmp_path)
        del state["rng"]
        with saver:
            assert saver.resume(state) == 3
        taken = []
        while data.epoch == 0:
            taken += train(ddp, opt, data, 1)
        return taken

    taken = [*ranks(4, first), *ranks(2, second)]
    assert sorted(itertools.chain(*taken)) == list(range(40))


def test_one_rank_saves_and_all_load_after_a_barrier(ranks, tmp_path):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, {"w": np.full((3, 2), 7, np.float32)})
        state = ts.State(model=ddp)
        if comm.rank == 0:
            with ts.Saver(None, tmp_path) as saver:
                saver.save(1, state)
        comm.barrier()
        ddp.params["w"][...] = comm.rank
        ts.Checkpoint(tmp_path).load(state)
        assert (ddp.params["w"] == 7).all()

    ranks(3, body)


def test_shards_are_loaded_into_other_shards(ranks, tmp_path):
    whole = np.arange(60, dtype=np.float64).reshape(10, 6)

    def pieces(layout: ts.Layout, rank: int, fill: bool):
        source = whole if fill else np.zeros_like(whole)
        return [np.ascontiguousarray(source[box.slices]) for box in layout.boxes(rank)]

    def save(comm: ts.Comm):
        layout = ts.Layout(whole.shape, [4], [ts.Shard(0)])
        part = ts.Sharded(layout, pieces(layout, comm.rank, True), comm.rank, "float64")
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, ts.State(x=part))

    def load(comm: ts.Comm):
        layout = ts.Layout(whole.shape, [2], [ts.Shard(1)])
        part = ts.Sharded(layout, pieces(layout, comm.rank, False), comm.rank)
        with ts.Checkpoint(tmp_path) as checkpoint:
            checkpoint.load(ts.State(x=part))
        for box, piece in zip(layout.boxes(comm.rank), part.pieces, strict=True):
            assert (piece == whole[box.slices]).all()

    ranks(4, save)
    ranks(2, load)
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert (checkpoint["x"] == whole).all()
    with pytest.raises(ts.InvalidArgument, match="dtype"):
        ts.Sharded(ts.Layout((1,), [2], [ts.Shard(0)]), [], 1)
    part = ts.Sharded(ts.Layout((1,), [1], [ts.Shard(0)]), [np.zeros(1)], 0)
    with pytest.raises(TypeError):
        part.pieces[0] = np.ones(1)  # type: ignore[index]  # what a state has built on
    with pytest.raises(AttributeError):
        part.pieces = [np.ones(1)]  # type: ignore[misc]
    wrong = ts.Sharded(ts.Layout(whole.shape, [2], [ts.Shard(0)]), [whole, whole], 0)
    with ts.Checkpoint(tmp_path) as checkpoint, pytest.raises(ts.InvalidArgument, match="pieces"):
        checkpoint.load(ts.State(x=wrong))


def test_a_shard_without_rows_may_be_given_as_an_empty_array(ranks, tmp_path: Path):
    """As a slice of the whole, or a DTensor's local tensor, is."""
    whole = np.arange(6.0).reshape(2, 3)

    def job(comm: ts.Comm):
        part = whole[comm.rank : comm.rank + 1].copy()  # of ranks 2 and 3 none
        state = ts.State(w=ts.Sharded(ts.Layout((2, 3), [4], [ts.Shard(0)]), [part], comm.rank))
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, state)
            part[...] = -1
            assert saver.resume(state) == 1
        assert (part == whole[comm.rank : comm.rank + 1]).all()

    ranks(4, job)
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert (checkpoint["w"] == whole).all()


def test_only_the_newest_are_kept(tmp_path: Path):
    with ts.Saver(None, tmp_path, keep_latest=2) as saver:
        for step in range(1, 5):
            saver.save(step, ts.State(step=step))
    assert sorted(path.name[:13] for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 4
        assert checkpoint.path.startswith(str(tmp_path))
    with ts.Checkpoint(tmp_path / "latest") as checkpoint:
        assert checkpoint.step == 4


def test_training_goes_on_while_a_copy_is_saved(saver: ts.Saver):
    array = np.ones(100_000)
    work = saver.save_async(1, ts.State(array=array))
    array[:] = 2
    work.wait()
    with ts.Checkpoint(saver.root) as checkpoint:
        assert (checkpoint["array"] == 1).all()
    assert work.error() is None


def test_a_save_that_fails_in_the_background_is_told_once(tmp_path: Path):
    with ts.Saver(None, tmp_path / "root") as saver:
        shutil.rmtree(tmp_path / "root")
        (tmp_path / "root").write_text("in the way")
        with pytest.raises(ts.TesseraError):
            saver.save_async(1, ts.State(array=np.ones(3))).wait()
        with pytest.raises(ts.TesseraError):
            saver.wait()
        saver.wait()


def test_strict_loading_lists_all_differences(saver: ts.Saver):
    path = saved(saver, same=np.ones(2), shape=np.ones(3), dtype=np.ones(2), gone=np.ones(1))
    same = np.zeros(2)
    state = ts.State(same=same, shape=np.ones(4), dtype=np.ones(2, np.float32), new=np.ones(1))
    with ts.Checkpoint(path) as checkpoint, pytest.raises(ts.Mismatch) as caught:
        checkpoint.load(state)
    for name in ("shape", "dtype", "gone", "new"):
        assert name in str(caught.value)
    assert not same.any()


def test_differences_can_be_allowed(saver: ts.Saver):
    path = saved(saver, a=np.ones(2), b=np.full(2, 0.5), extra=3)
    b, new = np.zeros(2, np.float32), np.full(1, 9.0)
    with ts.Checkpoint(path) as checkpoint:
        report = checkpoint.load(
            ts.State(b=b, new=new), allow_missing=True, allow_unexpected=True, allow_cast=True, verify=False
        )
    assert b.tolist() == [0.5, 0.5]
    assert new[0] == 9
    cast = ts.Cast("b", ts.DType.F64, ts.DType.F32)
    assert report == ts.LoadReport(("new",), ("a", "extra"), (cast,), (), verified=False)


def test_a_strict_load_reports_nothing_but_that_it_was_verified(saver: ts.Saver):
    state = ts.State(a=np.ones(2), epoch=3)
    saver.save(1, state)
    with ts.Checkpoint(saver.root) as checkpoint:
        assert checkpoint.load(state) == ts.LoadReport((), (), (), (), verified=True)


class Part:
    """An object with a state, which counts how often it takes one."""

    def __init__(self, value: float) -> None:
        self.weight, self.note, self.taken = np.full(2, value), [value], 0

    def state_dict(self) -> dict:
        return {"weight": self.weight, "note": self.note}

    def load_state_dict(self, state: dict) -> None:
        self.note = state["note"]
        self.taken += 1


def test_names_can_be_chosen(saver: ts.Saver):
    saver.save(1, ts.State(encoder=Part(1.0), head=Part(2.0), epoch=3))
    encoder, head = Part(-1.0), Part(-2.0)
    note = head.note
    state = ts.State(encoder=encoder, head=head, epoch=-3, new=np.full(1, 9.0))
    with ts.Checkpoint(saver.root) as checkpoint:
        report = checkpoint.load(state, only=("encoder.*", "epoc?"))
    assert encoder.weight.tolist() == [1, 1]
    assert encoder.note == [1.0]
    assert encoder.taken == 1
    assert head.weight.tolist() == [-2, -2]
    assert head.note is note
    assert head.taken == 0
    assert state["epoch"] == 3
    assert report == ts.LoadReport((), (), (), ("head.weight", "new", "head.note"), verified=True)


def test_an_optimizer_counts_by_the_moments_that_were_loaded(saver: ts.Saver):
    def made(lr: float) -> tuple[np.ndarray, ts.AdamW, ts.State]:
        w, grad = np.ones(2, np.float32), np.array([1, -2], np.float32)
        opt = ts.AdamW({"w": w}, {"w": grad}, lr=lr)
        return w, opt, ts.State(model={"w": w}, optim=opt)

    w, opt, state = made(0.1)
    for _ in range(5):
        opt.step()
    saver.save(1, state)
    opt.lr = 0.5
    opt.step()
    again, other, state = made(0.5)
    with ts.Checkpoint(saver.root) as checkpoint:
        checkpoint.load(state, only=("model.*", "optim.state.*"))
    assert (other.lr, other.steps) == (0.5, 5)
    other.step()
    assert again.tolist() == w.tolist()


def test_names_can_be_others(saver: ts.Saver):
    w, top = np.zeros(2), np.zeros(1)
    rules = {"model.head": "top", "model.encoder.": "encoder.", "rng": "random", "was.": "not.there."}
    with ts.init() as comm:
        saver.save(1, ts.State(model={"encoder": {"w": np.ones(2)}, "head": np.full(1, 2.0)}, rng=ts.PerRank(comm, 7)))
        state = ts.State(encoder={"w": w}, top=top, random=ts.PerRank(comm, 0))
        with ts.Checkpoint(saver.root) as checkpoint:
            report = checkpoint.load(state, rename=rules)
    assert w.tolist() == [1, 1]
    assert top.tolist() == [2]
    assert state["random"] == 7
    assert report == ts.LoadReport((), (), (), (), verified=True)


def test_the_first_rule_that_fits_counts(saver: ts.Saver):
    path = saved(saver, a={"b": np.ones(2)})
    for rules, name in (({"a.b": "x", "": "y."}, "x"), ({"": "y.", "a.b": "x"}, "y.a.b")):
        array = np.zeros(2)
        with ts.Checkpoint(path) as checkpoint:
            checkpoint.load(ts.State(**{name: array}), rename=rules)
        assert array.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"only": ["nope.*"]}, ts.Mismatch, "no name of the state matches 'nope.\\*'"),
        ({"only": []}, ts.InvalidArgument, "only has no pattern"),
        ({"only": [""]}, ts.InvalidArgument, "a name pattern is empty"),
        ({"only": ["a\0"]}, ts.InvalidArgument, "zero character"),
        ({"only": "a*"}, TypeError, "a list of patterns"),
        ({"only": [3]}, TypeError, "a pattern of only is 3"),
        ({"only": 3}, TypeError, "iterable"),
        ({"rename": {"b": "a"}}, ts.InvalidArgument, "'a' and 'b' of the checkpoint would both be named 'a'"),
        ({"rename": {"b.": "a"}}, ts.InvalidArgument, "the rule 'b.' -> 'a'"),
        ({"rename": {"b": 3}}, TypeError, "a name of rename is 3"),
        ({"rename": {"\ud800": "b"}}, ts.InvalidArgument, "surrogate"),
        ({"rename": {"\udcff": "b"}}, ts.InvalidArgument, "UTF-8"),
        ({"rename": 3}, TypeError, "iterable"),
    ],
)
def test_names_that_cannot_be_loaded_are_refused(saver: ts.Saver, options, error, told):
    path = saved(saver, a=np.ones(2), b=np.ones(2))
    a, b = np.zeros(2), np.zeros(2)
    with ts.Checkpoint(path) as checkpoint, pytest.raises(error, match=told):
        checkpoint.load(ts.State(a=a, b=b), **options)
    assert not a.any()
    assert not b.any()


def test_ranks_that_save_different_states_are_told(ranks, tmp_path):
    def body(comm: ts.Comm):
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, ts.State(array=np.ones(2 + comm.rank)))

    for outcome in ranks.outcomes(2, body):
        assert isinstance(outcome, ts.Mismatch)


def test_a_root_has_one_owner(tmp_path: Path):
    with ts.Saver(None, tmp_path), pytest.raises(ts.InvalidState, match=str(os.getpid())):
        ts.Saver(None, tmp_path)
    ts.Saver(None, tmp_path).close()


# ---------------------------------------------------------------- damage


def test_a_directory_without_a_manifest_is_no_checkpoint(saver: ts.Saver):
    path = saved(saver, array=np.ones(3))
    (path / "manifest.json").unlink()
    with pytest.raises(ts.NotFound, match="manifest"):
        ts.Checkpoint(path)


@pytest.mark.parametrize("damage", ["edited manifest", "truncated manifest", "flipped byte", "truncated", "missing"])
def test_damage_is_told_by_file(saver: ts.Saver, damage):
    path = saved(saver, array=np.arange(10_000.0), epoch=3)
    (file,) = path.glob("rank-*.safetensors")
    manifest = path / "manifest.json"
    if damage == "edited manifest":
        manifest.write_text(manifest.read_text().replace('"step":1', '"step":2'))
    elif damage == "truncated manifest":
        manifest.write_bytes(manifest.read_bytes()[:-40])
    elif damage == "flipped byte":
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 8)
    else:
        file.unlink()
    if "manifest" in damage:
        with pytest.raises(ts.Corrupt, match="manifest"):
            ts.Checkpoint(path)
        return
    array = np.zeros(10_000)
    with ts.Checkpoint(path) as checkpoint:
        for read in (
            checkpoint.verify,
            lambda: checkpoint["array"],
            lambda: checkpoint.load(ts.State(array=array, epoch=0)),
        ):
            with pytest.raises((ts.Corrupt, ts.TesseraIOError, ts.NotFound), match=file.name):
                read()
        if damage == "flipped byte":
            checkpoint.verify(full=False)


def test_a_file_too_many_is_told_by_verify_and_not_read(saver: ts.Saver):
    path = saved(saver, array=np.arange(10.0))
    (file,) = path.glob("rank-*.safetensors")
    (path / "rank-00007.safetensors").write_bytes(file.read_bytes())
    with ts.Checkpoint(path) as checkpoint:
        assert checkpoint["array"].sum() == 45
        with pytest.raises(ts.Corrupt, match=r"rank-00007\.safetensors"):
            checkpoint.verify()


def test_a_checkpoint_reads_as_a_mapping(saver: ts.Saver):
    path = saved(saver, a=np.ones((2, 3), np.float32), b=np.zeros(0), c=np.array(7), epoch=4)
    with ts.Checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["a", "b", "c"]
        assert len(checkpoint) == 3
        assert "a" in checkpoint
        assert "epoch" not in checkpoint
        assert checkpoint.tensors["a"] == ts.TensorInfo(ts.DType.F32, (2, 3))
        assert checkpoint["b"].shape == (0,)
        assert checkpoint["c"] == 7
        assert checkpoint.saved_values == {"epoch": 4}
        assert checkpoint.manifest["step"] == 1
        assert json.loads((path / "manifest.json").read_text()) == checkpoint.manifest
        checkpoint.verify()
        with pytest.raises(ts.NotFound, match="nothing"):
            checkpoint["nothing"]
        with pytest.raises(ts.Mismatch):
            checkpoint.read("a", np.zeros((3, 2), np.float32))
        frozen = np.zeros((2, 3), np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ts.InvalidArgument, match="read-only"):
            checkpoint.read("a", frozen)
    with pytest.raises(ts.InvalidState, match="closed"):
        checkpoint["a"]


GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden" / "torch_dcp"


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.glob("2.*")))
def test_what_pytorch_wrote_is_loaded(version: str):
    """By tests/golden/torch_dcp/make.py: read whole, and loaded as either of two ranks would."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numpy = {"F16": "f2", "BF16": ml_dtypes.bfloat16, "F32": "f4", "F64": "f8", "I32": "i4", "I64": "i8"}
    files = sorted((GOLDEN / version).glob("*/expected.json"))
    assert len(files) >= 5
    for file in files:
        expected = json.loads(file.read_text(encoding="utf-8"))
        arrays = {
            name: np.array(told["numbers"], np.float64).reshape(told["shape"]).astype(numpy[told["dtype"]])
            for name, told in expected["tensors"].items()
        }
        values = {name: decode(json.dumps(value)) for name, value in expected["values"].items()}
        with ts.Checkpoint(file.parent) as checkpoint:
            assert list(checkpoint) == sorted(arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(checkpoint[name], array, err_msg=f"{file.parent} {name}", strict=True)
            assert checkpoint.saved_values == values
            assert not checkpoint.unreadable
            checkpoint.verify()
            for rank in range(2):
                state, pieces = ts.State(**dict.fromkeys(values, "not loaded")), {}
                for name, array in arrays.items():
                    placement = ts.Shard(0) if array.ndim else ts.Replicate()
                    layout = ts.Layout(array.shape, (2,), (placement,))
                    pieces[name] = [(np.empty(box.sizes, array.dtype), array[box.slices]) for box in layout.boxes(rank)]
                    state[name] = ts.Sharded(layout, [piece for piece, _ in pieces[name]], rank, array.dtype)
                checkpoint.load(state)
                for name, parts in pieces.items():
                    for piece, part in parts:
                        np.testing.assert_array_equal(piece, part, err_msg=f"{file.parent} {name}", strict=True)
                assert {name: state[name] for name in values} == values


def test_a_closed_saver_refuses(tmp_path: Path):
    saver = ts.Saver(None, tmp_path)
    saver.close()
    saver.close()
    for call in (
        lambda: saver.save(1, ts.State()),
        lambda: saver.save_async(1, ts.State()),
        lambda: saver.resume(ts.State()),
        saver.wait,
    ):
        with pytest.raises(ts.InvalidState, match="closed"):
            call()


def test_a_state_outlives_what_it_was_made_of(tmp_path: Path):
    with ts.init() as comm:
        ddp = ts.DDP(comm, {"w": np.ones(3)})
        state = ts.State(model=ddp, data=ts.Sampler(comm, 10))
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, state)
            ddp.close()
            saver.save(2, state)
        assert ts.Checkpoint(tmp_path)["model.w"].tolist() == [1, 1, 1]


def test_a_disk_that_is_full_leaves_the_former_checkpoint(program, tmp_path: Path):
    """The limit on the size of a file stands for the disk: writes beyond it are refused by the system."""
    text = """
        import errno, resource, sys
        import numpy as np
        import tessera as ts
        with ts.Saver(None, sys.argv[1]) as saver:
            saver.save(1, ts.State(array=np.ones(1000)))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            for save in (saver.save, lambda *args: saver.save_async(*args).wait()):
                try:
                    save(2, ts.State(array=np.ones(1_000_000)))
                except ts.TesseraIOError as error:
                    print(errno.errorcode[error.errno], error.native.domain)
            try:
                saver.wait()
            except ts.TesseraIOError:
                pass
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print(ts.Checkpoint(sys.argv[1])["array"].sum())
            saver.save(3, ts.State(array=np.ones(10)))
            print(ts.Checkpoint(sys.argv[1]).step)
    """
    result = program(text).run(str(tmp_path / "root"))
    assert result.stdout.splitlines() == ["EFBIG errno", "EFBIG errno", "1000.0", "3"], result.stdout + result.stderr


def test_a_stream_is_of_a_device_that_exists():
    state = ts.State(weight=np.zeros(3))
    with pytest.raises((ts.Unsupported, ts.InvalidArgument), match="CUDA device"):
        state.set_stream(1000, None)
    with pytest.raises(TypeError, match="must be a CUDA stream"):
        state.set_stream(0, "first")
