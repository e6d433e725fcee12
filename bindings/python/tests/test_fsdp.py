"""FSDP: whole units in blocks, shards in between, trainings like those of one rank, checkpoints at other sizes."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tessera as ts
from patience import patience
from tessera import _core

PAGE = Path(__file__).parents[3] / "docs/FSDP.md"
SECONDS = patience(20.0)

STEPS, SAMPLES = 50, 24
RANDOM = np.random.default_rng(5)
INPUTS = RANDOM.uniform(-1, 1, (SAMPLES, 5)).astype(np.float32)
TARGETS = RANDOM.uniform(-1, 1, SAMPLES).astype(np.float32)


def initial(seed: int = 0) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(seed)

    def values(*shape: int):
        return random.uniform(-0.5, 0.5, shape).astype(np.float32)

    return {"first": {"w1": values(8, 5), "b1": values(8)}, "second": {"w2": values(8)}}


def step(fsdp: ts.FSDP, part: slice, share: float, add: bool = False) -> float:
    """A forward and a backward over a part of the samples; the gradients are of the mean over a share of them."""
    with fsdp.forward("first") as params:
        hidden = np.tanh(INPUTS[part] @ params["w1"].T + params["b1"])
    with fsdp.forward("second") as params:
        error = hidden @ params["w2"] - TARGETS[part]
    d = (2 / share) * error
    with fsdp.backward("second") as (params, grads):
        d_hidden = np.outer(d, params["w2"]) * (1 - hidden**2)
        grads["w2"][...] = d @ hidden + (grads["w2"] if add else 0)
    with fsdp.backward("first") as (_, grads):
        grads["w1"][...] = d_hidden.T @ INPUTS[part] + (grads["w1"] if add else 0)
        grads["b1"][...] = d_hidden.sum(axis=0) + (grads["b1"] if add else 0)
    fsdp.wait()
    return float((error**2).mean())


def train(comm: ts.Comm, steps: int = STEPS, micro_steps: int = 1, **options: Any):
    """The loss over all samples before each step, and all parameters at the end."""
    fsdp = ts.FSDP(comm, initial(comm.rank), **options)
    optimizer = ts.AdamW(fsdp, lr=0.02)
    losses = []
    for _ in range(steps):
        loss = 0.0
        for micro in range(micro_steps):
            last = micro == micro_steps - 1
            first, stride = comm.rank + comm.world_size * micro, comm.world_size * micro_steps
            with nullcontext() if last else fsdp.no_sync():
                loss += step(fsdp, slice(first, None, stride), SAMPLES / comm.world_size, add=micro_steps > 1)
        mean = np.array([loss / micro_steps])
        comm.all_reduce(mean, op="avg")
        losses.append(float(mean[0]))
        optimizer.step()
    with fsdp.summon_full_params() as params:
        return losses, {name: array.tobytes() for name, array in params.items()}


def alone(ranks, **options: Any):
    return ranks(1, lambda comm: train(comm, **options))[0]


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({}, 1e-4),
        ({"keep_whole": ["first"]}, 1e-4),
        ({"forward_prefetch": 0, "backward_prefetch": 0, "grads_in_flight": 1}, 1e-4),
        ({"reduce_dtype": "bfloat16"}, 2e-2),
        ({"param_dtype": "float16", "reduce_dtype": "float32"}, 2e-2),
        ({"pre_divide": 2.0}, 1e-4),
        ({"keep_among": {"first": 3}}, 1e-4),
        ({"row_block": 3}, 1e-4),
        ({"flat": ["first", "second"]}, 1e-4),
    ],
    ids=["plain", "kept", "in turn", "bf16", "mixed", "divided", "kept among", "blocks", "flat"],
)
def test_ranks_train_as_one_rank_does(ranks, options, rtol):
    if "reduce_dtype" in options:
        pytest.importorskip("ml_dtypes")
    expected, _ = alone(ranks)
    runs = [ranks(3, lambda comm: train(comm, **options)) for _ in range(2)]
    for losses, params in runs[0]:
        np.testing.assert_allclose(losses, expected, rtol=rtol)
        assert params == runs[0][0][1], "every rank gathers the same"
    assert runs[0] == runs[1], "every repeat has the same bits"
    assert expected[-1] < 0.5 * expected[0]


def test_units_may_differ_in_dtypes(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), param_dtype={"second": "float16"}, reduce_dtype={"second": "float64"})
        for unit, whole, reduced in (("first", "float32", "float32"), ("second", "float16", "float64")):
            with fsdp.backward(unit) as (params, grads):
                assert {str(array.dtype) for array in params.values()} == {whole}
                assert {str(array.dtype) for array in grads.values()} == {reduced}
                for grad in grads.values():
                    grad[...] = comm.rank
                del params, grads, grad
        fsdp.wait()
        assert all((grad == 0.5).all() and grad.dtype == "float32" for grad in fsdp.shard_grads.values())
        with fsdp.forward("first") as params:
            assert all(params[name].tobytes() == array.tobytes() for name, array in initial()["first"].items())

    ranks(2, job)


def test_flat_units_and_blocks_of_rows_have_their_own_shards_and_layouts(ranks, tmp_path):
    weight = np.arange(90, dtype="float32").reshape(3, 30)
    rows = np.arange(16, dtype="float32").reshape(8, 2)
    units = {"all": {"scale": np.array(2, dtype="float32"), "w": weight}, "blocks": {"rows": rows}}

    def save(comm: ts.Comm):
        fsdp = ts.FSDP(comm, units, flat=["all"], row_block={"blocks": 3})
        shapes = {name: shard.shape for name, shard in fsdp.shards.items()}
        boxes = {name: fsdp.layout(name).boxes(comm.rank) for name in fsdp.names}
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(3, ts.State(model=fsdp))
        return shapes, boxes

    first, second, third = ranks(3, save)
    assert first[0] == {"scale": (1,), "w": (32,), "rows": (3, 2)}
    assert second[0] == {"scale": (0,), "w": (58,), "rows": (3, 2)}
    assert third[0] == {"scale": (0,), "w": (0,), "rows": (2, 2)}
    assert first[1]["w"] == [((0, 0), (1, 30)), ((1, 0), (1, 2))], "a row and two elements"
    with ts.Checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["model.w"], weight)
        np.testing.assert_array_equal(checkpoint["model.rows"], rows)
        assert checkpoint["model.scale"] == 2

    def load(comm: ts.Comm):
        empty = {unit: {name: np.zeros_like(array) for name, array in params.items()} for unit, params in units.items()}
        fsdp = ts.FSDP(comm, empty, flat=["all", "blocks"])
        with ts.Saver(comm, tmp_path) as saver:
            assert saver.resume(ts.State(model=fsdp)) == 3
        with fsdp.summon_full_params() as params:
            for unit in units.values():
                for name, array in unit.items():
                    np.testing.assert_array_equal(params[name], array)

    ranks(2, load)


def test_a_unit_kept_among_some_ranks_stays_whole_on_their_host(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), keep_among={"first": 2})
        for unit in ("first", "second"):
            with fsdp.forward(unit):
                pass
        assert (fsdp.phase("first"), fsdp.phase("second")) == ("whole", "sharded")

    ranks(4, job)


def test_replicas_train_as_one_rank_does(ranks):
    expected, _ = alone(ranks)
    for losses, _ in ranks(4, lambda comm: train(comm, shard_ranks=2)):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_micro_batches_add_up(ranks):
    expected, _ = alone(ranks)
    for losses, _ in ranks(2, lambda comm: train(comm, micro_steps=3)):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, np.inf])
def test_gradients_are_bounded_by_the_norm_of_all_shards(ranks, p):
    def job(comm: ts.Comm, **options: Any):
        fsdp = ts.FSDP(comm, initial(), **options)
        optimizer = ts.SGD(fsdp)
        step(fsdp, slice(comm.rank, None, comm.world_size), SAMPLES / comm.world_size)
        norm = optimizer.clip_grad_norm(0.01, p)
        assert optimizer.clip_grad_norm(1.0, p) == pytest.approx(0.01, rel=1e-3)
        optimizer.clip_grad_value(1e-5)
        assert max(np.abs(grad).max(initial=0) for grad in fsdp.shard_grads.values()) <= np.float32(1e-5)
        return norm

    def alone(comm: ts.Comm):
        whole = ts.FSDP(comm, initial())
        step(whole, slice(None), SAMPLES)
        return np.concatenate([grad.ravel() for grad in whole.shard_grads.values()])

    (grads,) = ranks(1, alone)
    for options in ({}, {"shard_ranks": 2}):
        for norm in ranks(4, lambda comm, options=options: job(comm, **options)):
            assert norm == pytest.approx(np.linalg.norm(grads, p), rel=1e-5)


def test_a_model_is_saved_and_loaded_at_other_sizes(ranks, tmp_path):
    """Optimizer and all: the losses go on as if nothing had been."""

    def job(comm: ts.Comm, steps: int):
        fsdp = ts.FSDP(comm, initial(comm.rank))
        optimizer = ts.AdamW(fsdp, lr=0.02)
        losses = []
        with ts.Saver(comm, tmp_path) as saver:
            state = ts.State(model=fsdp, optim=optimizer)
            first = saver.resume(state)
            for _ in range(first, steps):
                losses.append(step(fsdp, slice(comm.rank, None, comm.world_size), SAMPLES / comm.world_size))
                optimizer.step()
            saver.save(steps, state)
        return losses

    expected, _ = alone(ranks, steps=25)
    done = 0
    for size in (3, 1, 5, 2, 4):
        done += 5
        losses = np.mean(ranks(size, lambda comm, steps=done: job(comm, steps)), axis=0)
        if SAMPLES % size == 0:
            np.testing.assert_allclose(losses, expected[done - 5 : done], rtol=1e-4)
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint["model.w1"].shape == (8, 5)
        assert checkpoint["optim.state.w1.exp_avg"].shape == (8, 5)


def test_parameters_without_values_need_no_memory_for_all_of_them(ranks):
    def job(comm: ts.Comm):
        units = {"first": {"w1": ts.Deferred((8, 5)), "b1": ts.Deferred((8,), "float64")}, "second": {"w2": np.ones(3)}}
        fsdp = ts.FSDP(comm, units)
        assert not fsdp.shards["w1"].any()
        layout = fsdp.layout("w1")
        rows = layout.boxes(comm.rank)[0].slices[0]
        fsdp.shards["w1"][...] = np.arange(8)[rows, None]
        with fsdp.summon_full_params("first") as params:
            assert (params["w1"] == np.arange(8)[:, None]).all()
            assert params["b1"].dtype == np.float64
        assert layout.shape == (8, 5)
        return fsdp.shards["w1"].shape

    assert ranks(3, job) == [(3, 5), (3, 5), (2, 5)]


def test_deferred_parameters_are_resumed_in_less_memory_than_one_whole_tensor_takes(program):
    """Saved by 2 ranks, resumed by 4: what each had at most, shared memory included, besides what it began with."""
    written = program(
        """
        import sys
        import numpy as np
        import tessera as ts

        def resident(what):
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith(what)) * 1024

        what, folder = sys.argv[1:]
        with ts.init() as comm:
            before = resident("VmRSS")
            fsdp = ts.FSDP(comm, {"u": {"w": ts.Deferred((64, 1 << 19)), "b": ts.Deferred((7,), "float64")}})
            rows = fsdp.layout("w").boxes(comm.rank)[0].slices[0]
            with ts.Saver(comm, folder) as saver:
                state = ts.State(model=fsdp)
                if what == "save":
                    fsdp.shards["w"][...] = np.arange(64)[rows, None]
                    fsdp.shards["b"][...] = 0.5
                    saver.save(3, state)
                else:
                    assert saver.resume(state) == 3
                    grown = resident("VmHWM") - before
                    assert grown < 64 << 21, f"{grown} bytes; all of w has {64 << 21}"
            assert all((row == number).all() for row, number in zip(fsdp.shards["w"], range(64)[rows], strict=True))
            assert (fsdp.shards["b"] == 0.5).all()
        """
    )
    for size, what in ((2, "save"), (4, "load")):
        run = written.launch(size, what, str(written.path.parent / "checkpoints"))
        assert run.returncode == 0, run.stderr


def test_parameters_of_rank_0_reach_ranks_that_gave_none(ranks):
    """And those of which rank 0 has no values are zero, whatever the others have."""

    def job(comm: ts.Comm):
        own = {name: array if (name == "w1") == (comm.rank == 0) else ts.Deferred(array.shape) for name, array in given}
        fsdp = ts.FSDP(comm, {"u": own})
        with fsdp.summon_full_params() as params:
            return params["w1"].tobytes(), params["b1"].any()

    given = initial()["first"].items()
    assert ranks(3, job) == [(initial()["first"]["w1"].tobytes(), False)] * 3


def test_ranks_without_rows_train_save_and_load_with_the_others(ranks, tmp_path):
    def job(comm: ts.Comm, first: float):
        fsdp = ts.FSDP(comm, {"u": {"w": np.full((2, 3), first, np.float32), "b": np.full(1, first, np.float32)}})
        optimizer = ts.SGD(fsdp, lr=1.0)
        with ts.Saver(comm, tmp_path) as saver:
            state = ts.State(model=fsdp, optim=optimizer)
            begin = saver.resume(state)
            with fsdp.forward("u") as params:
                assert (params["w"] == 8 - 1.5 * begin).all()
            with fsdp.backward("u") as (_, grads):
                for name in grads:
                    grads[name][...] = comm.rank * 3 / (comm.world_size - 1)
            fsdp.wait()
            assert optimizer.clip_grad_norm(100.0) == pytest.approx(1.5 * np.sqrt(7))
            optimizer.step()
            saver.save(begin + 1, state)
        return fsdp.shards["w"].shape, fsdp.shards["b"].shape, fsdp.layout("b").boxes(comm.rank)

    assert [shapes[:2] for shapes in ranks(4, lambda comm: job(comm, 8))] == [
        ((1, 3), (1,)),
        ((1, 3), (0,)),
        ((0, 3), (0,)),
        ((0, 3), (0,)),
    ]
    assert [boxes for _, _, boxes in ranks(3, lambda comm: job(comm, 0))][1:] == [[], []]


def test_views_do_not_outlive_their_block(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        with (
            pytest.raises(ts.InvalidState, match=r'"first" cannot be resharded: 1 views'),
            fsdp.forward("first") as params,
        ):
            held = params["w1"].T
            with pytest.raises(ValueError, match="read-only"):
                held[0, 0] = 1
        del held
        with fsdp.forward("second") as params:
            assert params["w2"].sum() == pytest.approx(initial()["second"]["w2"].sum(), abs=1e-6)
        with pytest.raises(ts.InvalidState, match="held"), fsdp.backward("second") as (_, grads):
            kept = grads["w2"]
        kept[...] = comm.rank
        del kept
        with fsdp.backward("first") as (_, grads):
            for grad in grads.values():
                grad[...] = 1
            del grad
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = comm.rank
        fsdp.wait()
        assert (fsdp.shard_grads["w2"] == 0.5).all()

    ranks(2, job)


def test_of_many_names_the_nearest_are_told():
    names = {f"layers.{i}.attention.weight": np.zeros(1, np.float32) for i in range(40)}
    with ts.init() as comm, ts.FSDP(comm, {"all": names}) as fsdp, fsdp.forward("all") as params:
        with pytest.raises(KeyError) as told:
            params["layers.7.attentoin.weight"]
        assert "40 are known, the closest: layers.7.attention.weight" in str(told.value)
        with pytest.raises(KeyError, match=r"40 are known, the first: layers\.0\.attention\.weight, layers\.1\."):
            params["?"]


def test_after_its_block_a_parameter_or_gradient_is_refused(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        with fsdp.forward("first") as forward:
            assert list(forward) == ["w1", "b1"]
            assert "w2" not in forward
            with pytest.raises(KeyError, match="unit 'first' has no parameter 'w2'; known: w1, b1"):
                forward["w2"]
            assert forward.get("w2") is None
        with fsdp.summon_full_params() as summoned:
            assert repr(summoned) == "<whole parameters w1, b1, w2>"
        with fsdp.backward("second") as (backward, grads):
            grads["w2"] = np.ones(8, np.float32)
        for mapping, name in ((forward, "w1"), (summoned, "w2"), (backward, "w2"), (grads, "w2")):
            with pytest.raises(ts.InvalidState, match=f"'{name}' is valid only inside its block"):
                mapping[name]
            with pytest.raises(ts.InvalidState, match="is valid only inside its block"):
                dict(mapping)
        with pytest.raises(ts.InvalidState, match="gradient of 'w2' is valid only inside"):
            grads["w2"] = np.ones(8, np.float32)
        assert (list(forward), len(forward), "b1" in forward) == (["w1", "b1"], 2, True)
        assert repr(forward) == "<whole parameters w1, b1 (ended)>"
        with fsdp.backward("first") as (_, grads):
            fsdp.unused("w1")
            fsdp.unused("b1")
        fsdp.wait()

    ranks(2, job)


def test_the_cpu_has_no_streams():
    with ts.init() as comm, ts.FSDP(comm, initial()) as fsdp:
        fsdp.set_stream()
        with pytest.raises(ts.InvalidArgument, match="the CPU has no streams"):
            fsdp.set_stream(1)
        with pytest.raises(TypeError, match="must be a CUDA stream"):
            fsdp.set_stream("first")
        with fsdp.forward("first"), pytest.raises(ts.InvalidState, match='"first" is unsharded'):
            fsdp.set_stream()


def test_parameters_on_a_device_need_a_communicator_for_it():
    with ts.init() as comm, pytest.raises(ts.Unsupported, match=r'"w" is on CUDA device 3, .* no transport for it'):
        ts.FSDP(comm, {"u": {"w": ts.Deferred((4,), device=3)}})


def test_a_unit_is_whole_in_its_blocks_alone(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        with pytest.raises(ts.InvalidState, match='parameter "w1" of unit "first" is sharded'):
            _core.fsdp_whole(fsdp._handle, 0)
        with pytest.raises(ts.InvalidState, match='unit "second" is sharded and is not being unsharded'):
            _core.fsdp_await(fsdp._handle, 1)
        with fsdp.forward("first"):
            with pytest.raises(ts.InvalidState, match='parameter "w2" of unit "second" is still being unsharded'):
                _core.fsdp_whole(fsdp._handle, 2)
            with pytest.raises(
                ts.InvalidState, match=r'gradient of "w1" exists only between backward\(\) and grads_ready\(\)'
            ):
                _core.fsdp_grad(fsdp._handle, 0)

    ranks(2, job)


def test_a_unit_is_not_sharded_in_its_backward_or_while_a_collective_reads_it(ranks):
    left = Event()

    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), forward_prefetch=0)
        all_of_it = np.empty((2, 8, 5), np.float32)
        if comm.rank == 0:
            with (
                pytest.raises(ts.InvalidState, match=r'"first" cannot be resharded: .* a background operation'),
                fsdp.forward("first") as params,
            ):
                work = comm.all_gather(params["w1"], all_of_it, async_op=True)
            left.set()
            work.wait()
        else:
            with fsdp.forward("first") as params:
                assert left.wait(SECONDS)
                comm.all_gather(params["w1"], all_of_it)
        assert (all_of_it == initial()["first"]["w1"]).all()
        work = None
        fsdp.abandon()
        with fsdp.backward("first") as (_, grads):
            with (
                pytest.raises(ts.InvalidState, match=r'unit "first" is in its backward; call grads_ready\(\) first'),
                fsdp.summon_full_params("first"),
            ):
                pass
            grads["w1"][...] = 1
            fsdp.unused("b1")
        fsdp.abandon()

    ranks(2, job)


def test_a_model_that_is_closed_in_a_block_is_gone_after_it_and_its_peers_hear_of_that(ranks):
    closed = Event()

    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), forward_prefetch=0)
        if comm.rank == 0:
            with fsdp.forward("first"):
                assert closed.wait(SECONDS)
            with pytest.raises((ts.PeerLost, ts.Aborted), match="rank 1"), fsdp.forward("second"):
                pass
            return
        with pytest.raises(ts.InvalidState, match="closed"), fsdp.forward("first") as params:
            fsdp.close()
            assert (params["w1"] == initial()["first"]["w1"]).all(), "the memory is there until the block ends"
        with pytest.raises(ts.InvalidState, match="is valid only inside its block"):
            params["w1"]
        with pytest.raises(ts.InvalidState, match="closed"), fsdp.backward("first"):
            pass
        closed.set()

    ranks(2, job)


def test_a_gradient_of_another_shape_or_dtype_is_refused(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), reduce_dtype={"first": "float64"})
        with fsdp.backward("second") as (_, grads):
            for wrong in (np.zeros(9, np.float32), np.zeros((8, 1), np.float32), np.float32(0), np.zeros(8), [0.0] * 8):
                with pytest.raises(ts.InvalidArgument, match=r"'w2' has shape \(8,\) and dtype float32, got shape"):
                    grads["w2"] = wrong
            with pytest.raises(ValueError, match="broadcast"):
                grads["w2"][...] = np.zeros(9, np.float32)
            with pytest.raises(ts.NotFound, match="unit 'second' has no gradient of 'w1'; known: w2"):
                grads["w1"] = np.zeros((8, 5), np.float32)
            with pytest.raises(KeyError, match="unit 'second' has no gradient of 'w1'; known: w2"):
                grads["w1"]
            grads["w2"] = np.full(8, comm.rank, np.float32)
        with fsdp.backward("first") as (_, grads):
            with pytest.raises(ts.InvalidArgument, match=r"and dtype float64, got .* float32"):
                grads["w1"] = np.zeros((8, 5), np.float32)
            grads["w1"] = np.full((8, 5), comm.rank, np.float64)
            fsdp.unused("b1")
        fsdp.wait()
        assert (fsdp.shard_grads["w1"] == 0.5).all()
        assert (fsdp.shard_grads["w2"] == 0.5).all()

    ranks(2, job)


def test_nan_in_a_gradient_stays_and_every_rank_is_told_an_infinite_norm(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 1
            grads["w2"][0] = np.nan if comm.rank == 1 else 1
        with fsdp.backward("first"):
            fsdp.unused("w1")
            fsdp.unused("b1")
        fsdp.wait()
        assert ts.SGD(fsdp).clip_grad_norm(1.0) == np.inf
        return fsdp.shard_grads["w2"].tolist()

    first, second = ranks(2, job)
    assert np.isnan(first[0])
    assert first[1:] + second == [1.0] * 7


def test_frozen_parameters_and_unused_ones(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), frozen=["w1"])
        assert set(fsdp.shard_grads) == {"b1", "w2"}
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 2
        with fsdp.backward("first") as (_, grads):
            assert set(grads) == {"b1"}
            if comm.rank == 0:
                grads["b1"][...] = 8
            else:
                fsdp.unused("b1")
        fsdp.wait()
        assert (fsdp.shard_grads["b1"] == 4).all()
        ts.SGD(fsdp, lr=1.0).step()
        fsdp.set_accumulate(True)
        for unit in ("second", "first"):
            with fsdp.backward(unit) as (_, grads):
                for name in grads:
                    grads[name][...] = 1
        fsdp.wait()
        assert (fsdp.shard_grads["b1"] == 5).all()
        fsdp.zero_grad()
        assert not fsdp.shard_grads["b1"].any()

    ranks(2, job)


@pytest.mark.parametrize("flat", [(), ("u",)])
def test_frozen_parameters_of_any_dtype_stay_as_they_are(ranks, tmp_path: Path, flat):
    """As weights that are quantised do, with what is trained beside them in another dtype."""
    frozen = {
        "u8": np.arange(250, 260, dtype=np.uint16).astype(np.uint8),
        "i64": np.array([[2**62, -1], [5, 7]]),
        "yes": np.array([True, False, True]),
    }

    def job(comm: ts.Comm):
        def made(values):
            model = {"u": {**values, "w": np.ones(3, np.float32)}}
            return ts.FSDP(comm, model, frozen=list(values), flat=flat, param_dtype="bf16")

        def check(fsdp):
            with fsdp.forward("u") as params:
                for name, values in frozen.items():
                    assert params[name].dtype == values.dtype
                    assert np.array_equal(params[name], values)

        fsdp = made(frozen)
        check(fsdp)
        with fsdp.backward("u") as (_, grads):
            assert set(grads) == {"w"}
            grads["w"][...] = 1
        fsdp.wait()
        ts.SGD(fsdp, lr=1.0).step()
        check(fsdp)
        other = made({name: np.zeros_like(values) for name, values in frozen.items()})
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, ts.State(model=fsdp))
            assert saver.resume(ts.State(model=other)) == 1
        check(other)

    ranks(2, job)


def test_optimizers_leave_what_no_rank_used(ranks):
    """With its moments and its count of steps, as PyTorch does where a gradient is None."""

    def job(comm: ts.Comm):
        def pass_(fsdp, used):
            for unit in ("second", "first"):
                with fsdp.backward(unit) as (_, grads):
                    for name in grads:
                        if name in used and (name != "b1" or comm.rank == 0):  # b1: of rank 0 alone
                            grads[name][...] = 0.5
                        else:
                            fsdp.unused(name)
            fsdp.wait()

        for make in (
            lambda fsdp: ts.SGD(fsdp, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
            lambda fsdp: ts.AdamW(fsdp, lr=0.1),
        ):
            often, seldom = ts.FSDP(comm, initial()), ts.FSDP(comm, initial())
            of_often, of_seldom = make(often), make(seldom)
            for used in (["w1"], ["b1", "w1"], ["w1"], ["b1", "w1"], ["w1"]):
                pass_(seldom, used)
                assert [seldom.used(name) for name in ("w1", "b1", "w2")] == [True, "b1" in used, False]
                of_seldom.step()
                if "b1" in used:
                    pass_(often, used)
                    of_often.step()
            assert (seldom.shards["b1"] == often.shards["b1"]).all(), "as if the other steps had not been"
            assert (seldom.shards["w2"] == ts.FSDP(comm, initial()).shards["w2"]).all()
            assert of_seldom.steps == 5

        fsdp = ts.FSDP(comm, initial())
        optimizer = ts.SGD(fsdp, lr=0.1)
        fsdp.set_accumulate(True)
        before = fsdp.shards["b1"].copy()
        pass_(fsdp, ["w1", "b1"])
        pass_(fsdp, ["w1"])
        optimizer.step()
        assert (fsdp.shards["b1"] != before).all(), "gradients add up"
        before = fsdp.shards["b1"].copy()
        for zero_grad in (optimizer.zero_grad, fsdp.zero_grad):
            zero_grad()
            pass_(fsdp, ["w1"])
            optimizer.step()
            assert (fsdp.shards["b1"] == before).all()

    ranks(2, job)


def test_an_optimizer_steps_once_for_gradients_that_were_reduced(ranks, tmp_path):
    """And a save is refused of shards of which one rank's were not updated."""

    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        optimizer = ts.SGD(fsdp, lr=0.1)
        with pytest.raises(ts.InvalidState, match="before any gradients were reduced"):
            optimizer.step()
        step(fsdp, slice(None), SAMPLES)
        optimizer.step()
        with fsdp.no_sync():
            step(fsdp, slice(None), SAMPLES)
        before = {name: shard.copy() for name, shard in fsdp.shards.items()}
        with pytest.raises(ts.InvalidState, match="no gradients were reduced since its last step"):
            optimizer.step()
        assert all((fsdp.shards[name] == shard).all() for name, shard in before.items())
        step(fsdp, slice(None), SAMPLES)
        if comm.rank == 0:
            optimizer.step()
        state = ts.State(model=fsdp, optim=optimizer)
        with ts.Saver(comm, tmp_path) as saver:
            with pytest.raises(ts.Mismatch, match=r"rank 1.*param_groups\.0\.step' of 1 where rank 0 has .* 2"):
                saver.save(2, state)
            if comm.rank == 1:
                optimizer.step()
            saver.save(2, state)

    ranks(2, job)


def test_a_reduction_over_replicas_may_wait(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, {"u": {"w": np.zeros(4, np.float32)}}, shard_ranks=2)

        def backward(value: float):
            with fsdp.backward("u") as (_, grads):
                grads["w"][...] = value * comm.rank
            fsdp.wait()

        fsdp.set_all_reduce(False)
        backward(2)
        assert not fsdp.shard_grads["w"].any()
        fsdp.set_all_reduce(True)
        backward(4)
        assert (fsdp.shard_grads["w"] == 9).all()

    ranks(4, job)


def test_memory_that_is_left_to_units_has_what_shards_have(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, {"a": {"v": np.zeros(4, np.float32)}, "b": {"w": np.zeros(4, np.float32)}})

        def step(expected: float):
            for unit, name in (("a", "v"), ("b", "w")):
                with fsdp.forward(unit) as params:
                    assert (params[name] == expected).all()
            for unit, name in (("b", "w"), ("a", "v")):
                with fsdp.backward(unit) as (_, grads):
                    grads[name][...] = 1
            with pytest.raises(ts.InvalidState, match="during a backward pass"):
                fsdp.set_reshard_after_backward(True)
            fsdp.wait()
            assert {fsdp.phase(unit) for unit in fsdp.units} == {"sharded"}

        with pytest.raises(ts.NotFound, match="no unit 'c'"):
            fsdp.set_reshard_after_backward(False, "a", "c")
        optimizer = ts.SGD(fsdp, lr=1)
        for units in ((), ("b",)):
            fsdp.set_reshard_after_backward(not units)
            fsdp.set_reshard_after_backward(False, *units)
            for shard in fsdp.shards.values():
                shard[...] = 3
            step(3)
            step(3)
            optimizer.step()
            step(2)
            for shard in fsdp.shards.values():
                shard[...] = 7
            step(7)

    ranks(2, job)


def test_a_step_that_failed_is_abandoned(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), keep_whole=["first"])
        assert [fsdp.phase(unit) for unit in fsdp.units] == ["sharded", "sharded"]
        with pytest.raises(ZeroDivisionError), fsdp.forward("first") as params:
            assert params["w1"].any()
            assert fsdp.phase("first") == "whole"
            raise ZeroDivisionError
        assert fsdp.phase("first") == "whole"
        with pytest.raises(ts.InvalidState, match='"first" is unsharded'):
            ts.SGD(fsdp).step()
        with pytest.raises(ZeroDivisionError), fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 1
            assert fsdp.phase("second") == "backward"
            raise ZeroDivisionError
        held = fsdp.shards, fsdp.shard_grads  # these may be
        fsdp.abandon()
        assert [fsdp.phase(unit) for unit in fsdp.units] == ["sharded", "sharded"]
        assert not any(grad.any() for grad in held[1].values())
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = comm.rank
        assert fsdp.phase("second") == "reducing"
        with fsdp.backward("first") as (_, grads):
            view = grads["w1"]
            fsdp.unused("w1")
            fsdp.unused("b1")
            with pytest.raises(ts.InvalidState, match="views of its unsharded"):
                fsdp.abandon()
            del view
        fsdp.wait()
        assert (fsdp.shard_grads["w2"] == 0.5).all()

    ranks(2, job)


def test_nothing_is_loaded_while_a_unit_is_whole(ranks, tmp_path):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        state = ts.State(model=fsdp)
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, state)
            with fsdp.forward("first"), pytest.raises(ts.InvalidState, match='unit "first" is unsharded'):
                saver.resume(state)
            fsdp.abandon()
            assert saver.resume(state) == 1

    ranks(2, job)


BAD: Mapping[str, tuple[Any, type[Exception], str]] = MappingProxyType(
    {
        "a unit that is no mapping": ([np.ones(3)], TypeError, "dict of parameters by unit"),
        "no unit": ({}, ts.InvalidArgument, "the model has no units"),
        "no parameter": ({"u": {}}, ts.InvalidArgument, '"u" has no parameters'),
        "a scalar": ({"u": {"w": np.array(1.0)}}, ts.InvalidArgument, r"shape \[1\]"),
        "integers": ({"u": {"w": np.ones(3, np.int32)}}, ts.InvalidArgument, "floating-point"),
        "a parameter in two units": (
            {"u": {"w": np.ones(3)}, "v": {"module.w": np.ones(3)}},
            ts.InvalidArgument,
            "two parameters are named",
        ),
        "not contiguous": (
            {"u": {"w": np.ones((4, 4))[:, ::2]}},
            ts.InvalidArgument,
            r'\("w"\) of unit "u" is not contiguous: stride 2 of dimension 1, expected 1; make a contiguous copy',
        ),
        "backwards": ({"u": {"w": np.ones(4)[::-1]}}, ts.InvalidArgument, "stride -1 of dimension 0, expected 1"),
        "of a record": (
            {"u": {"w": np.zeros(3, [("a", "f4"), ("b", "i1")])["a"]}},  # 5 bytes apart
            ts.InvalidArgument,
            "stride 0 of dimension 0, expected 1",
        ),
        "text": ({"u": {"w": "w"}}, TypeError, "'w'"),
    }
)


@pytest.mark.parametrize("what", BAD)
def test_bad_models_are_refused(ranks, what):
    units, error, said = BAD[what]

    def job(comm: ts.Comm):
        with pytest.raises(error, match=said):
            ts.FSDP(comm, units)
        assert ts.FSDP(comm, initial()).names == ("w1", "b1", "w2"), "nothing is out of use"

    ranks(2, job)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_model_of_one_rank_is_an_error_of_all(ranks, what):
    units, error, said = BAD[what]
    good, bad = ranks.outcomes(2, lambda comm: ts.FSDP(comm, initial() if comm.rank == 0 else units))
    assert isinstance(bad, error)
    assert re.search(said, str(bad))
    assert isinstance(good, ts.TesseraError)
    assert not isinstance(good, ts.TesseraTimeout), "it waited for its deadline"
    assert "rank 1" in str(good)
    if what not in ("a unit that is no mapping", "text"):  # these never reach the library
        assert re.search(said, str(good)), "all are told why"


def test_a_full_state_is_gathered_tensor_by_tensor(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), flat=["second"])
        optimizer = ts.AdamW(fsdp)
        state = ts.State(model=fsdp, optim=optimizer, epoch=3, fixed=np.arange(3))
        everywhere = dict(state.gather(comm, root=None))
        on_one = dict(state.gather(comm, root=1))
        assert [*on_one] == [*everywhere]
        for name, array in on_one.items():
            assert (array is None) == (comm.rank != 1)
            assert comm.rank != 1 or array.tobytes() == everywhere[name].tobytes()
        assert "optim.state.w1.exp_avg_sq" in everywhere
        np.testing.assert_array_equal(everywhere["fixed"], np.arange(3))
        for unit in initial().values():
            for name, array in unit.items():
                np.testing.assert_array_equal(everywhere[f"model.{name}"], array)
        with pytest.raises(ts.InvalidArgument, match="root is 9"):
            next(state.gather(comm, root=9))
        other = ts.State(model=fsdp) if comm.rank == 0 else ts.State(net=fsdp)
        with pytest.raises(ts.Mismatch, match="the ranks gather different tensors"):
            next(other.gather(comm))

    ranks(3, job)


def test_mistakes_are_told_by_name(ranks):
    def job(comm: ts.Comm):
        with pytest.raises(ts.NotFound, match="'other'"):
            ts.FSDP(comm, initial(), keep_whole=["other"])
        with pytest.raises(ts.NotFound, match="'w9'"):
            ts.FSDP(comm, initial(), frozen=["w9"])
        with pytest.raises(ts.NotFound, match="param_dtype names 'other'"):
            ts.FSDP(comm, initial(), param_dtype={"other": "float16"})
        with pytest.raises(ts.InvalidArgument, match="both name 'first'"):
            ts.FSDP(comm, initial(), keep_whole=["first"], keep_among={"first": 2})
        for what in ("flat", "row_block", "keep_among"):
            with pytest.raises(ts.NotFound, match=f"{what} names 'other'"):
                ts.FSDP(comm, initial(), **{what: {"other": 2}})
        for options, said in (
            ({"keep_among": {"second": 3}}, 'unit "second": reshard_after_forward is 3'),
            ({"row_block": -1}, "row_block is -1"),
            ({"row_block": 2, "flat": ["second"]}, 'unit "second" is flat'),
            ({"shard_ranks": 3}, "not divisible by shard_ranks 3"),
            ({"forward_prefetch": -1}, "at least 0"),
            ({"grads_in_flight": 0}, "at least 1"),
            ({"pre_divide": 0.0}, "above 0"),
            ({"param_dtype": "int32"}, "param_dtype"),
            ({"reduce_dtype": {"second": "int32"}}, 'unit "second": reduce_dtype'),
        ):
            with pytest.raises(ts.InvalidArgument, match=said):
                ts.FSDP(comm, initial(), **options)
        fsdp = ts.FSDP(comm, initial())
        assert fsdp.units == ("first", "second")
        assert fsdp.names == ("w1", "b1", "w2")
        with pytest.raises(ts.NotFound, match="'third'"), fsdp.forward("third"):
            pass
        with pytest.raises(ts.NotFound, match="'w9'"):
            fsdp.unused("w9")
        with pytest.raises(ts.InvalidState, match='2 of 2 units were never marked ready: "first", "second"'):
            fsdp.wait()
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 1
            with pytest.raises(ts.InvalidState, match="backward"), fsdp.forward("first"):
                pass
        with fsdp.backward("second") as (_, grads):  # of another use in the same step
            grads["w2"][...] = 1
        assert not fsdp.used("w2"), "the step goes on"
        optimizer = ts.SGD(fsdp)
        with pytest.raises(ts.InvalidState, match="end the step first"):
            optimizer.step()
        fsdp.close()
        with pytest.raises(ts.InvalidState, match="closed"):
            fsdp.wait()

    ranks(2, job)


def test_a_gradient_that_was_not_written_is_named(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), grads_in_flight=1)
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 1
        with (
            pytest.raises(ts.InvalidState, match='1 of 2 gradients of unit "first" were not written: "b1"'),
            fsdp.backward("first") as (_, grads),
        ):
            grads["w1"][...] = 1
        with fsdp.backward("first"):
            fsdp.unused("b1")
        fsdp.wait()
        assert (fsdp.shard_grads["w1"] == 1).all()
        assert (fsdp.shard_grads["b1"] == 0).all()

    ranks(2, job)


@pytest.mark.parametrize("rows", [slice(7), slice(1, None)])
def test_a_gradient_of_which_a_part_was_written_is_named(ranks, rows):
    """One of another shape, say; the rest would be another unit's."""

    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial())
        with (
            pytest.raises(ts.InvalidState, match='1 of 1 gradients of unit "second" were not written: "w2"'),
            fsdp.backward("second") as (_, grads),
        ):
            grads["w2"][rows] = 1
        with fsdp.backward("second") as (_, grads):
            grads["w2"][...] = 1

    ranks(2, job)


F32 = np.float32
ONE = initial()["first"]
DIFFERENT: Mapping[str, tuple[Callable[[], Any], dict[str, Any], str, str]] = MappingProxyType(
    {  # what rank 1 has, and what the ranks are told of rank 1 and of rank 0
        "a unit's name": (lambda: {"first": ONE, "other": initial()["second"]}, {}, 'unit "other"', 'unit "second"'),
        "a unit more": (lambda: initial() | {"third": {"w3": np.ones(2, F32)}}, {}, 'unit "third"', "nothing"),
        "a unit less": (lambda: {"first": ONE}, {}, "nothing", 'unit "second"'),
        "the order of units": (lambda: dict(reversed(initial().items())), {}, 'unit "second"', 'unit "first"'),
        "a parameter's unit": (
            lambda: {"first": {"w1": ONE["w1"]}, "second": {"b1": ONE["b1"], **initial()["second"]}},
            {},
            'unit "first" of 1 parameters',
            'unit "first" of 2 parameters',
        ),
        "a parameter's name": (
            lambda: initial() | {"second": {"v2": np.ones(8, F32)}},
            {},
            'parameter 0 "v2"',
            'parameter 0 "w2"',
        ),
        "the order of parameters": (
            lambda: initial() | {"first": dict(reversed(ONE.items()))},
            {},
            'parameter 0 "b1"',
            'parameter 0 "w1"',
        ),
        "a shape": (lambda: initial() | {"second": {"w2": np.ones((2, 4), F32)}}, {}, "[2, 4]", "[8]"),
        "a dtype": (lambda: initial() | {"second": {"w2": np.ones(8)}}, {}, '"w2" f64', '"w2" f32'),
        "what is trained": (initial, {"frozen": ["w2"]}, 'parameter "w2" is not trained', "nothing"),
        "an option of a unit": (
            initial,
            {"keep_whole": ["second"]},
            'unit "second" with reshard_after_forward 0',
            'unit "second" with reshard_after_forward 1',
        ),
        "an option": (initial, {"param_dtype": "float16"}, "the option param_dtype f16", "the option param_dtype none"),
    }
)


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_are_refused_on_every_rank(ranks, what):
    units, options, said_of_1, said_of_0 = DIFFERENT[what]

    def job(comm: ts.Comm):
        return ts.FSDP(comm, initial()) if comm.rank == 0 else ts.FSDP(comm, units(), **options)

    for outcome in ranks.outcomes(2, job):
        assert isinstance(outcome, ts.Mismatch)
        of_1, of_0 = str(outcome).split(", rank 0 has ")
        assert said_of_1 in of_1, str(outcome)
        assert said_of_0 in of_0, str(outcome)


def test_ranks_that_enter_different_units_are_told(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), forward_prefetch=0)
        with fsdp.forward(("first", "second")[comm.rank]):
            pass

    outcomes = ranks.outcomes(2, job)
    assert all(isinstance(outcome, (ts.Mismatch, ts.Aborted)) for outcome in outcomes), outcomes
    told = [str(outcome) for outcome in outcomes if isinstance(outcome, ts.Mismatch)]
    assert told
    assert all('"first"' in text and '"second"' in text for text in told)


def test_after_a_failed_collective_every_call_says_why_and_the_shards_are_as_they_were(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, initial(), forward_prefetch=0)
        optimizer = ts.AdamW(fsdp)
        step(fsdp, slice(None), SAMPLES)
        before = {name: shard.copy() for name, shard in fsdp.shards.items()}
        with pytest.raises((ts.Mismatch, ts.Aborted)), fsdp.forward(("first", "second")[comm.rank]):
            pass
        for block in (fsdp.forward, fsdp.backward, fsdp.summon_full_params):
            with pytest.raises(ts.Aborted, match=r'unshards unit ".+" while rank'), block("first"):
                pass
        for call in (
            fsdp.wait,
            fsdp.abandon,
            fsdp.zero_grad,
            optimizer.step,
            lambda: optimizer.clip_grad_norm(1.0),
            lambda: optimizer.clip_grad_value(1.0),
        ):
            with pytest.raises(ts.Aborted, match=r'unshards unit ".+" while rank'):
                call()
        assert optimizer.steps == 0
        assert all((fsdp.shards[name] == shard).all() for name, shard in before.items())

    ranks(2, job)


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_examples_run(program, number):
    """The complete ones, under a launcher, on two ranks, as they stand there."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    examples = [block for block in blocks if "import tessera" in block]
    assert len(examples) == 2
    written = program("import os, sys\nos.chdir(sys.argv[1])\n" + examples[number])
    run = written.launch(2, str(written.path.parent))
    assert run.returncode == 0, run.stderr
    assert (written.path.parent / "runs/fsdp/latest").exists() == (number == 0), "the first one saves"
    told = re.findall(r"step (\d+): loss \d", run.stdout)
    assert told == (["0", "100", "200", "300", "400"] if number == 0 else [])
