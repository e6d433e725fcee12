"""The engine: it trains as DDP does at every stage, saves and loads at other sizes, and names what is wrong."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tessera as ts
from tessera.engine import EngineCounts, LossScale, config_schedule, resolve_config

README = Path(__file__).parents[1] / "README.md"
RANDOM = np.random.default_rng(3)
BATCH = 12  # samples of a step
INPUTS = RANDOM.uniform(-1, 1, (20 * BATCH, 5))
TARGETS = RANDOM.uniform(-1, 1, 20 * BATCH)


def initial(seed: int = 0, dtype: str = "float64") -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(seed)

    def values(*shape: int):
        return random.uniform(-0.5, 0.5, shape).astype(dtype)

    return {"first": {"w1": values(8, 5), "b1": values(8)}, "second": {"w2": values(8)}}


def adamw(stage: int = 0, **more: Any) -> dict[str, Any]:
    """A configuration whose defaults are not those of the optimizer."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    return {
        "train_batch_size": BATCH,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.3,
        **more,
    }


def sgd(accumulation: int = 1, stage: int = 0, **more: Any) -> dict[str, Any]:
    """With a rate of 1, so that parameters are minus the sum of their gradients."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def samples(step: int, rank: int, micro: int, engine: Any) -> slice:
    """A rank's part of a step's samples; `engine` has the sizes."""
    begin = step * BATCH + (rank * engine.gradient_accumulation_steps + micro) * engine.train_micro_batch_size
    return slice(begin, begin + engine.train_micro_batch_size)


def backprop(params: Mapping[str, Any], part: slice, factor: float) -> tuple[float, dict[str, Any]]:
    """The mean loss, and its gradients times a factor."""
    hidden = np.tanh(INPUTS[part] @ params["w1"].T + params["b1"])
    error = hidden @ params["w2"] - TARGETS[part]
    d = error * (2 * factor / len(error))
    d_hidden = np.outer(d, params["w2"]) * (1 - hidden**2)
    grads = {"w1": d_hidden.T @ INPUTS[part], "b1": d_hidden.sum(axis=0), "w2": d @ hidden}
    return float((error**2).mean()), grads


def run_pass(engine: ts.Engine, part: slice) -> float:
    with engine.forward("first") as params:
        hidden = np.tanh(INPUTS[part] @ params["w1"].T + params["b1"])
    with engine.forward("second") as params:
        error = hidden @ params["w2"] - TARGETS[part]
    d = error * (2 * engine.loss_factor / len(error))
    adds = engine.adds_gradients
    with engine.backward("second") as (params, grads):
        d_hidden = np.outer(d, params["w2"]) * (1 - hidden**2)
        grads["w2"][...] = d @ hidden + (grads["w2"] if adds else 0)
    with engine.backward("first") as (_, grads):
        grads["w1"][...] = d_hidden.T @ INPUTS[part] + (grads["w1"] if adds else 0)
        grads["b1"][...] = d_hidden.sum(axis=0) + (grads["b1"] if adds else 0)
    engine.backward_done()
    return float((error**2).mean())


def run_steps(engine: ts.Engine, rank: int, steps: range) -> list[float]:
    """The loss of each pass."""
    losses = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps):
            losses.append(run_pass(engine, samples(step, rank, micro, engine)))
            engine.step()
    return losses


def filled_pass(engine: ts.Engine, value: float) -> None:
    """A pass in which every gradient has this value everywhere."""
    adds = engine.adds_gradients
    for unit in engine.units:
        with engine.forward(unit):
            pass
    for unit in reversed(engine.units):
        with engine.backward(unit) as (_, grads):
            for name in grads:
                grads[name][...] = value + (grads[name] if adds else 0)
    engine.backward_done()


def values(engine: ts.Engine) -> dict[str, Any]:
    """Copies of all parameters."""
    found = {}
    engine.eval()
    for unit in engine.units:
        with engine.forward(unit) as params:
            found |= {name: np.array(array) for name, array in params.items()}
    engine.train()
    return found


def one_tensor() -> dict[str, dict[str, Any]]:
    return {"u": {"w": np.zeros(6, np.float32)}}


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- training


def by_hand(comm: ts.Comm, steps: int) -> dict[str, Any]:
    """What `adamw` means, by DDP."""
    params = {name: array for unit in initial().values() for name, array in unit.items()}
    ddp = ts.DDP(comm, params)
    optimizer = ts.AdamW(ddp, lr=0.02, weight_decay=0.1)
    micro = BATCH // comm.world_size
    for step in range(steps):
        begin = step * BATCH + comm.rank * micro
        _, grads = backprop(params, slice(begin, begin + micro), 1)
        for name, grad in grads.items():
            ddp.grads[name] = grad
        ddp.ready_all()
        ddp.wait()
        optimizer.clip_grad_norm(0.3)
        optimizer.step()
    return params


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_ddp_does(ranks, stage: int, accumulation: int):
    expected = ranks(2, lambda comm: by_hand(comm, 15))[0]
    start = initial()["first"]["w1"]

    def job(comm: ts.Comm):
        given = initial(comm.rank)  # all begin with rank 0's
        engine = ts.Engine(comm, given, adamw(stage, gradient_accumulation_steps=accumulation))
        assert engine.train_micro_batch_size == BATCH // 2 // accumulation
        losses = run_steps(engine, comm.rank, range(15))
        in_place = (given["first"]["w1"] == values(engine)["w1"]).all()
        assert in_place == (stage == 0), "the arrays are trained at stage 0 alone"
        assert engine.counts == EngineCounts(15, 15 * BATCH, 0, 15 * accumulation)
        return losses, values(engine)

    results = ranks(2, job)
    for _, found in results:
        assert_close(found, expected)
    assert not np.allclose(results[0][1]["w1"], start, atol=0.05)


@pytest.mark.parametrize("stage", [0, 3])
def test_bf16_computes_in_bf16_and_keeps_the_parameters_dtype(ranks, stage: int):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(stage=stage, bf16={"enabled": True}))
        with engine.forward("u") as params:
            assert params["w"].dtype == ml_dtypes.bfloat16
        with engine.backward("u") as (_, grads):
            assert grads["w"].dtype == ml_dtypes.bfloat16
            grads["w"][...] = comm.rank
        engine.backward_done()
        assert engine.step()
        state = dict(ts.State(engine=engine).gather(comm, root=None))
        assert state["engine.model.w"].dtype == np.float32
        assert (state["engine.model.w"] == -0.5).all()

    ranks(2, job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_add_up_until_a_boundary(ranks, stage: int):
    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(3, stage))
        assert (engine.train_batch_size, engine.gradient_accumulation_steps) == (6, 3)
        assert engine.loss_factor == pytest.approx(1 / 3)
        for micro in range(1, 8):
            assert engine.is_boundary == (micro % 3 == 0)
            assert engine.adds_gradients == (stage < 2 and micro % 3 != 1)
            filled_pass(engine, comm.rank * 2)
            assert engine.step() == (micro % 3 == 0)
        assert (values(engine)["w"] == -6).all()
        assert engine.grad_norm == pytest.approx(3 * math.sqrt(6))
        engine.set_boundary(True)
        filled_pass(engine, 1)
        assert engine.step()
        engine.set_boundary(False)
        for _ in range(4):
            filled_pass(engine, 1)
            assert not engine.step()
        engine.set_boundary(None)
        filled_pass(engine, 1)
        assert engine.step()
        assert (values(engine)["w"] == -13).all()
        assert engine.counts == EngineCounts(4, 24, 0, 13)

    ranks(2, job)


@pytest.mark.parametrize("stage", [0, 1])
def test_passes_in_no_sync_are_reduced_by_the_next(ranks, stage: int):
    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(stage=stage))
        with engine.no_sync():
            for _ in range(3):
                filled_pass(engine, comm.rank)
            with pytest.raises(ts.InvalidState, match="inside no_sync"):
                engine.step()
            with pytest.raises(ts.InvalidState, match="no_sync is already on"), engine.no_sync():
                pass
        filled_pass(engine, comm.rank)
        assert engine.step()
        assert (values(engine)["w"] == -2).all(), "the mean of 0 and 4"
        with pytest.raises(LookupError, match="mine"), engine.no_sync():
            raise LookupError("mine")
        filled_pass(engine, 1)
        assert engine.step(), "no_sync is over"

    ranks(2, job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_infinity_of_one_rank_skips_the_step_of_all(ranks, stage: int):
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}
    scheduler = {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 1}}

    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(stage=stage, fp16=fp16, scheduler=scheduler))
        with engine.forward("u") as params:
            assert params["w"].dtype == np.float16
        assert (engine.loss_scale, engine.loss_factor, engine.grad_norm) == (16, 16, None)
        before = engine.lr
        filled_pass(engine, np.inf if comm.rank == 1 else 1)
        assert not engine.step()
        assert (engine.loss_scale, engine.lr, engine.grad_norm) == (8, before, math.inf)
        assert not values(engine)["w"].any()
        filled_pass(engine, 8)
        assert engine.step()
        assert engine.counts == EngineCounts(2, 4, 1, 2)
        assert engine.grad_norm == pytest.approx(math.sqrt(6)), "without the scale"
        assert engine.lr != before

    ranks(2, job)


def test_a_loss_scale_at_its_minimum_is_an_error_of_all_ranks(ranks):
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}

    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(stage=2, fp16=fp16))
        filled_pass(engine, np.nan if comm.rank == 0 else 1)
        with pytest.raises(ts.InvalidState, match="the loss scale is at its minimum 1"):
            engine.step()

    ranks(2, job)


def test_a_file_that_one_rank_lacks_is_refused_on_all(ranks, tmp_path: Path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(sgd()))

    def job(comm: ts.Comm):
        ts.Engine(comm, one_tensor(), path).close()
        with pytest.raises(ts.NotFound, match=r"missing\.json cannot be read"):
            ts.Engine(comm, one_tensor(), tmp_path / "missing.json" if comm.rank == 1 else path)

    ranks(2, job)


def test_arguments_that_one_rank_refuses_are_refused_on_all(ranks):
    """Before the library has them, so that no rank waits for it."""
    deep: dict[str, Any] = {}
    deep["self"] = deep
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"config": sgd(optimizer={"type": {1}})}, ts.InvalidArgument, "a set is no value of JSON: {1}"),
        ({"config": sgd(optimizer={"type": "SGD", "params": {"lr": math.nan}})}, ts.InvalidArgument, "is nan; JSON"),
        ({"config": deep}, ts.InvalidArgument, "Circular reference"),
        ({"config": 5}, TypeError, "config is a int"),
        ({"config": None}, TypeError, "config is a NoneType"),
        ({"config": "a\0b{"}, ts.InvalidArgument, "zero character"),
        ({"units": None}, TypeError, "units is a NoneType"),
        ({"units": {3: {"w": np.zeros(2)}}}, TypeError, "a unit's name is 3"),
        ({"units": {"u": {"w": "no array"}}}, TypeError, "parameter 'w'"),
        ({"schedule": 0.5}, TypeError, "schedule is a float"),
    ]

    def job(comm: ts.Comm):
        for wrong, kind, said in refused:
            given: dict[str, Any] = {"units": one_tensor(), "config": sgd(), **(wrong if comm.rank == 1 else {})}
            with pytest.raises(Exception) as caught:
                ts.Engine(comm, **given)
            if comm.rank == 1:
                assert isinstance(caught.value, kind), caught.value
                assert said in str(caught.value)
            else:
                assert isinstance(caught.value, ts.InvalidArgument) and caught.value.rank == 1, caught.value
                assert str(caught.value).startswith("rank 1: ") and said in str(caught.value)
        engine = ts.Engine(comm, one_tensor(), sgd())
        filled_pass(engine, 1)
        assert engine.step(), "the communicator is as it was"

    ranks(3, job)


def test_flags_are_bools(alone: ts.Comm):
    engine = ts.Engine(alone, one_tensor(), sgd())
    for call in (engine.train, engine.set_boundary):
        for value in ("false", 1, 0.0, [], np.int8(1)):
            with pytest.raises(TypeError, match=r"(mode|boundary) is .*; it must be a bool"):
                call(value)
    engine.train(np.bool_(False))
    assert not engine.training
    engine.set_boundary(np.bool_(True))
    assert engine.is_boundary


def test_batch_sizes_change_between_steps(ranks):
    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(2))
        engine.train_batch_size = np.int64(12)
        assert (engine.gradient_accumulation_steps, engine.config["train_batch_size"]) == (6, 12)
        engine.train_micro_batch_size = 3
        assert (engine.train_batch_size, engine.gradient_accumulation_steps) == (36, 6)
        with pytest.raises(ts.InvalidArgument, match=r"train_batch_size 8 is not divisible by .* 3 \* 2"):
            engine.train_batch_size = 8
        with pytest.raises(TypeError, match=r"train_batch_size is 1\.5"):
            setattr(engine, "train_batch_size", 1.5)  # noqa: B010
        with pytest.raises(ts.InvalidArgument, match="train_micro_batch_size_per_gpu is 0"):
            engine.train_micro_batch_size = 0
        filled_pass(engine, 1)
        engine.step()
        with pytest.raises(ts.InvalidState, match="train_batch_size cannot be changed while the gradients of 1"):
            engine.train_batch_size = 12

    ranks(2, job)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_may_be_ready_one_by_one(ranks, stage: int):
    def job(comm: ts.Comm):
        engine = ts.Engine(comm, initial(), adamw(stage))
        with engine.backward("second") as (_, grads):
            grads["w2"][...] = 1
        with engine.backward("first") as (params, grads):
            grads["b1"][...] = comm.rank
            engine.ready("b1")
            with pytest.raises(ts.InvalidState, match=r'"b1".*ready twice'):
                engine.ready("b1")
            held = grads["w1"]
            with pytest.raises(ts.InvalidState, match='unit "first" cannot be resharded: 1 views'):
                engine.ready("w1")
            held[...] = 3
            del held
            engine.ready("w1")
            with pytest.raises(ts.InvalidState, match="valid only inside its block"):
                params["b1"]
            with pytest.raises(ts.InvalidState, match="valid only inside its block"):
                grads["b1"]
        engine.backward_done()
        assert engine.step()
        assert engine.grad_norm == pytest.approx(math.sqrt(8 + 8 * 0.25 + 40 * 9))

    ranks(2, job)


def test_gradients_that_are_not_ready_are_zeros_or_refused(ranks):
    def job(comm: ts.Comm, stage: int):
        engine = ts.Engine(comm, initial(), adamw(stage))
        for unit in ("second", "first"):
            with pytest.raises(LookupError), engine.backward(unit):
                raise LookupError
        engine.backward_done()
        assert engine.step()
        assert engine.grad_norm == 0
        strict = {"stage": stage, "ignore_unused_parameters": False}
        engine = ts.Engine(comm, initial(), adamw(zero_optimization=strict))
        with engine.backward("second") as (_, grads):
            grads["w2"][...] = 1
        with pytest.raises(LookupError), engine.backward("first") as (_, grads):
            grads["w1"][...] = 1
            engine.ready("w1")
            raise LookupError
        with pytest.raises(ts.InvalidState, match="b1" if stage == 0 else "first"):
            engine.backward_done()
        with engine.backward("first") as (_, grads):  # goes on where it was left
            grads["b1"][...] = 1
        engine.backward_done()
        assert engine.step()
        assert engine.grad_norm == pytest.approx(math.sqrt(56))

    for stage in (0, 1, 2, 3):
        ranks(2, lambda comm, stage=stage: job(comm, stage))


# ---------------------------------------------------------------- optimizer and schedule


def test_the_optimizer_and_the_schedule_are_the_engines(alone: ts.Comm):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = ts.Engine(alone, one_tensor(), sgd(scheduler=scheduler))
    optimizer, schedule = engine.optimizer, engine.schedule
    assert schedule is not None
    expected = config_schedule(sgd(scheduler=scheduler))
    for step in range(6):
        assert engine.lr == optimizer.lr == pytest.approx(expected.lr_at(step, 1.0))
        assert (optimizer.steps, schedule.steps) == (step, step)
        filled_pass(engine, 0)
        engine.step()
    engine.lr = np.float32(0.25)
    assert (engine.lr, optimizer.lr) == (0.25, 0.25)
    engine.close()
    assert (optimizer.steps, schedule.steps) == (6, 6)
    with pytest.raises(ts.InvalidState, match="closed"):
        _ = engine.optimizer


def test_a_schedule_of_the_program_is_stepped(alone: ts.Comm):
    schedule = ts.LRSchedule.exponential(0.5)
    engine = ts.Engine(alone, one_tensor(), sgd(), schedule)
    filled_pass(engine, 1)
    engine.step()
    assert (engine.lr, schedule.steps) == (0.5, 1)
    schedule.close()
    filled_pass(engine, 1)
    engine.step()
    assert engine.lr == 0.25
    assert ts.Engine(alone, one_tensor(), sgd()).schedule is None


# ---------------------------------------------------------------- states


def test_is_saved_and_loaded_at_other_sizes_and_stages(ranks, tmp_path: Path):
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 5}}
    scheduler["params"]["warmup_max_lr"] = 0.05

    def job(comm: ts.Comm, stage: int, accumulation: int, steps: range, saves: bool):
        config = adamw(stage, gradient_accumulation_steps=accumulation, scheduler=scheduler)
        engine = ts.Engine(comm, initial(comm.rank), config)
        state = ts.State(engine=engine, note="mine")
        with ts.Saver(comm, tmp_path) as saver:
            assert saver.resume(state) == steps.start if saves else True
            run_steps(engine, comm.rank, steps)
            if saves:
                saver.save(steps.stop, state)
        return values(engine), engine.counts[:3], engine.lr

    expected = ranks(1, lambda comm: job(comm, 0, 1, range(20), False))[0]
    done = 0
    for size, stage, accumulation in ((2, 2, 1), (3, 0, 2), (1, 3, 4), (4, 1, 3), (2, 3, 2)):
        part = range(done, done + 4)
        results = ranks(size, lambda comm, stage=stage, n=accumulation, part=part: job(comm, stage, n, part, True))
        done += 4
    assert done == 20
    for found, counts, lr in results:
        assert_close(found, expected[0])
        assert (counts, lr) == (expected[1], pytest.approx(expected[2]))
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint["engine.model.w1"].shape == (8, 5)
        assert checkpoint["engine.optim.state.w1.exp_avg"].shape == (8, 5)
        assert checkpoint.saved_values["engine.engine.global_steps"] == 20
        assert checkpoint.saved_values["engine.schedule.steps"] == 20


def test_a_state_is_refused_while_gradients_wait(ranks, tmp_path: Path):
    def job(comm: ts.Comm):
        engine = ts.Engine(comm, one_tensor(), sgd(2))
        state = ts.State(engine=engine)
        with ts.Saver(comm, tmp_path) as saver:
            filled_pass(engine, 1)
            engine.step()
            with pytest.raises(ts.InvalidState, match="the state cannot be saved or loaded"):
                saver.save(1, state)
            filled_pass(engine, 1)
            engine.step()
            saver.save(2, state)
        other = ts.Engine(comm, {"u": {"w": np.zeros(5, np.float32)}}, sgd())
        with ts.Saver(comm, tmp_path) as saver, pytest.raises(ts.Mismatch, match=r"engine\.model\.w"):
            saver.resume(ts.State(engine=other))

    ranks(2, job)


# ---------------------------------------------------------------- configurations


def test_a_configuration_is_a_dict_a_text_or_a_path(tmp_path: Path):
    config = {"train_batch_size": np.int64(8), "gradient_clipping": np.float32(0.5), "fp16": {"enabled": np.True_}}
    text = '// ours\n{"train_batch_size": 8, "gradient_clipping": 0.5, "fp16": {"enabled": true,},}'
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    resolved = resolve_config(config, 2)
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert (resolved["gradient_clipping"], resolved["precision"], resolved["ranks"]) == (0.5, "fp16", 2)
    assert resolved["optimizer"] is None and resolved["reports"] == []
    for same in (MappingProxyType({**config, "fp16": MappingProxyType(config["fp16"])}), text, path, str(path)):
        assert resolve_config(same, np.int32(2)) == resolved


def test_what_other_engines_have_is_passed_through():
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "RAdam", "params": {"lr": 0.1}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
        "steps_per_prin": 3,
    }
    resolved = resolve_config(config, 1)
    assert resolved["optimizer"] == {"type": "RAdam", "params": {"lr": 0.1}, "core": False}
    assert resolved["scheduler"]["core"] is False
    (report,) = resolved["reports"]
    assert (report["key"], report["kind"]) == ("steps_per_prin", "unknown")
    assert 'did you mean "steps_per_print"' in report["text"]
    with pytest.raises(ts.Unsupported, match=r'"scheduler\.type".*StepLR'):
        config_schedule(config)


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ("{", ts.InvalidArgument, "line 1, column 2: expected a key in double quotes"),
        ('{"a": 1} {', ts.InvalidArgument, "line 1, column 10: '{' comes after the end"),
        ('{\n"train_batch_size": 8,\n "a": 1 "b": 2}', ts.InvalidArgument, "line 3, column 9: expected a comma"),
        ('{"a": 1,\n"a": 2}', ts.InvalidArgument, 'line 2, column 1: the key "a" occurs twice'),
        ("[{}]", ts.InvalidArgument, "a configuration is an object"),
        ("{" * 99, ts.InvalidArgument, "expected a key"),
        ('{"a":' * 99, ts.InvalidArgument, "nested more than 32 levels"),
        ("{" + " " * (1 << 18), ts.InvalidArgument, "at most 262144 are allowed"),
        ('{"\0": 1}', ts.InvalidArgument, "the configuration .* contains a zero character"),
        ({}, ts.InvalidArgument, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 7}, ts.InvalidArgument, "train_batch_size 7 does not equal .* data-parallel ranks = 6"),
        ({"train_batch_size": 2**60}, ts.InvalidArgument, r"at most 2\^40"),
        ({"train_batch_size": 2**80}, ts.InvalidArgument, "line 2"),
        ({"train_batch_size": "auto"}, ts.InvalidArgument, r'"train_batch_size" \(line 2, column 3\) is "auto"'),
        (
            {"train_batch_size": 8, "fp16": {"enabled": True, "hysteresis": 0}},
            ts.InvalidArgument,
            r'"fp16\.hysteresis" \(line 5, column 5\) is 0; it must be at least 1',
        ),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 4}}, ts.InvalidArgument, "stages are 0 to 3"),
        (
            {"train_batch_size": 8, "zero_optimization": {"offload_param": {"device": "nvme"}}},
            ts.Unsupported,
            r'"zero_optimization\.offload_param\.device" .* is "nvme"',
        ),
        (
            {"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ts.InvalidArgument,
            r'"bf16\.enabled" .* disable the other',
        ),
        ({"a": {1, 2}}, ts.InvalidArgument, "cannot be written as JSON: a set is no value of JSON"),
        ({"a": {"b": [1, math.nan]}}, ts.InvalidArgument, r'JSON: "a\.b\[1\]" is nan; JSON has only finite numbers'),
        ({"a": np.float32("inf")}, ts.InvalidArgument, r'JSON: "a" is inf; JSON'),
        ({(1, 2): 3}, ts.InvalidArgument, "cannot be written as JSON"),
        (None, TypeError, "config is a NoneType; it must be a dict, the text of a ds_config or a path"),
        (b"{}", TypeError, "config is a bytes"),
        ("missing.json", ts.NotFound, r"the configuration missing\.json cannot be read"),
        ("x" * 250_000, ts.InvalidArgument, r"has no brace and is not a path: 'x{97}\.\.\.'"),
        ("/", ts.TesseraIOError, "cannot be read"),
    ],
)
def test_a_bad_configuration_is_refused_by_key_and_line(config: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        resolve_config(config, 2)
    with pytest.raises(error, match=said), ts.init() as comm:
        ts.Engine(comm, one_tensor(), {**config, **_two(config)} if isinstance(config, dict) else config)


def _two(config: dict[Any, Any]) -> dict[str, Any]:
    """What makes a batch that 2 ranks refuse one that a single rank refuses too."""
    return {"train_micro_batch_size_per_gpu": 2} if config.get("train_batch_size") == 7 else {}


def test_a_configuration_that_contains_itself_is_refused():
    config: dict[str, Any] = {"train_batch_size": 8}
    config["self"] = config
    with pytest.raises(ts.InvalidArgument, match="Circular reference"):
        resolve_config(config, 1)


@pytest.mark.parametrize(
    ("ranks", "error", "said"),
    [(0, ts.InvalidArgument, "ranks is 0"), (1.5, TypeError, "ranks is 1.5"), (2**40, ts.InvalidArgument, "ranks is")],
)
def test_a_bad_number_of_ranks_is_refused(ranks: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        resolve_config({"train_batch_size": 8}, ranks)


def test_ranks_with_other_configurations_or_models_are_named(ranks):
    def job(comm: ts.Comm):
        with pytest.raises(ts.Mismatch, match=r"gradient_clipping"):
            ts.Engine(comm, one_tensor(), sgd() | {"gradient_clipping": comm.rank})
        with pytest.raises(ts.Mismatch, match="schedule"):
            ts.Engine(comm, one_tensor(), sgd(), ts.LRSchedule.exponential(0.5 + comm.rank))
        with pytest.raises(ts.Mismatch, match='"w"'):
            ts.Engine(comm, {"u": {"w": np.zeros(6 + comm.rank, np.float32)}}, sgd(stage=1))
        with pytest.raises(ts.InvalidArgument, match=r"optimizer"):  # rank 1's fault, told to all
            ts.Engine(comm, one_tensor(), sgd() if comm.rank == 0 else {"train_batch_size": 2})
        engine = ts.Engine(comm, one_tensor(), sgd())
        filled_pass(engine, 1)
        assert engine.step(), "nothing of it harms what comes later"

    ranks(2, job)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda comm: ts.Engine(one_tensor(), comm, sgd()), TypeError, "comm is a dict.*swapped"),
        (lambda comm: ts.Engine(comm, sgd(), one_tensor()), TypeError, "unit 'train_micro.*must be a dict of arrays"),
        (lambda comm: ts.Engine(comm, [np.zeros(2)], sgd()), TypeError, "units is a list"),
        (lambda comm: ts.Engine(comm, {"u": np.zeros(2)}, sgd()), TypeError, "unit 'u' is a ndarray"),
        (lambda comm: ts.Engine(comm, {3: {"w": np.zeros(2)}}, sgd()), TypeError, "a unit's name is 3"),
        (lambda comm: ts.Engine(comm, {None: {"w": np.zeros(2)}}, sgd()), TypeError, "a unit's name is None"),
        (lambda comm: ts.Engine(comm, {"u": {4: np.zeros(2)}}, sgd()), TypeError, "parameter names must be str"),
        (lambda comm: ts.Engine(comm, {"u": {"w": ts.Deferred((2,))}}, sgd()), TypeError, "a Deferred is not a tensor"),
        (lambda comm: ts.Engine(comm, {}, sgd()), ts.InvalidArgument, "no units"),
        (lambda comm: ts.Engine(comm, {"u": {}}, sgd()), ts.InvalidArgument, 'unit "u" has no parameters'),
        (lambda comm: ts.Engine(comm, {"u": {"w": np.zeros(2, int)}}, sgd()), ts.TesseraError, '"w".*i64'),
        (lambda comm: ts.Engine(comm, {"u": {"w": np.zeros((4, 4))[:, ::2]}}, sgd()), ts.InvalidArgument, '"w"'),
        (
            lambda comm: ts.Engine(comm, {"u": {"w": np.zeros(2)}, "v": {"w": np.zeros(2)}}, sgd()),
            ts.InvalidArgument,
            '"w"',
        ),
        (lambda comm: ts.Engine(comm, one_tensor(), {"train_batch_size": 8}), ts.InvalidArgument, 'no "optimizer"'),
        (
            lambda comm: ts.Engine(comm, one_tensor(), sgd() | {"optimizer": {"type": "Muon"}}),
            ts.Unsupported,
            r'"optimizer\.type" \(line \d+, column \d+\) is "Muon"',
        ),
        (lambda comm: ts.Engine(comm, one_tensor(), sgd(), 0.5), TypeError, "schedule is a float"),
        (
            lambda comm: ts.Engine(
                comm, one_tensor(), sgd(scheduler={"type": "WarmupLR"}), ts.LRSchedule.exponential(1)
            ),
            ts.InvalidArgument,
            "leave one of the two out",
        ),
        (lambda comm: config_schedule(sgd()), ts.InvalidArgument, 'no "scheduler"'),
    ],
)
def test_bad_arguments_are_refused(alone: ts.Comm, make: Callable[[ts.Comm], object], error: Any, said: str):
    with pytest.raises(error, match=said):
        make(alone)
    filled_pass(ts.Engine(alone, one_tensor(), sgd()), 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_out_of_order_are_refused(alone: ts.Comm, stage: int):
    engine = ts.Engine(alone, one_tensor(), sgd(2, stage))
    for call, error, said in (
        (engine.step, ts.InvalidState, "without a backward pass"),
        (lambda: engine.forward("v").__enter__(), ts.NotFound, "there is no unit 'v'; known: u"),
        (lambda: engine.backward("v").__enter__(), ts.NotFound, "there is no unit 'v'; known: u"),
        (lambda: engine.ready("v"), ts.NotFound, "there is no parameter 'v'; known: w"),
        (lambda: engine.ready(0), TypeError, "the name is 0"),
        (lambda: setattr(engine, "lr", -1), ts.InvalidArgument, "lr|rate"),
        (lambda: setattr(engine, "lr", "high"), TypeError, "lr is 'high'"),
        (lambda: setattr(engine, "loss_scale", 3), AttributeError, "loss_scale"),
    ):
        with pytest.raises(error, match=said):
            call()
    if stage >= 2:
        with pytest.raises(ts.InvalidState, match=f"no_sync is not possible at stage {stage}"), engine.no_sync():
            pass
    with engine.backward("u") as (_, grads):
        for call, said in (
            (engine.step, "backward_done"),
            (lambda: engine.set_boundary(True), "the boundary cannot be set"),
            (lambda: setattr(engine, "train_batch_size", 4), "train_batch_size cannot be changed"),
            (lambda: setattr(engine, "train_micro_batch_size", 4), "cannot be changed"),
        ):
            with pytest.raises(ts.InvalidState, match=said):
                call()
        if stage < 2:
            with pytest.raises(ts.InvalidState, match="no_sync cannot begin"), engine.no_sync():
                pass
        grads["w"][...] = 1
    engine.backward_done()
    with pytest.raises(ts.InvalidState, match=r"step\(\) was not called after the last"), engine.backward("u"):
        pass
    with pytest.raises(ts.InvalidState, match="the boundary cannot be set"):
        engine.set_boundary(True)
    assert not engine.step()
    filled_pass(engine, 1)
    assert engine.step()
    assert (values(engine)["w"] == -2).all(), "refusals change nothing"


@pytest.mark.parametrize("stage", [0, 3])
def test_views_do_not_outlive_their_block(alone: ts.Comm, stage: int):
    engine = ts.Engine(alone, initial(), adamw(stage))
    with (
        pytest.raises(ts.InvalidState, match=r'"first" cannot be resharded: 1 views'),
        engine.forward("first") as params,
    ):
        held = params["w1"].T
        with pytest.raises(ValueError, match="read-only"):
            held[0, 0] = 1
    with pytest.raises(ts.InvalidState, match="the parameter 'w1' is valid only inside its block"):
        params["w1"]
    del held
    with engine.forward("first") as params:
        assert (params["w1"] == initial()["first"]["w1"]).all()
    with pytest.raises(ts.InvalidState, match="still held"), engine.backward("second") as (_, grads):
        kept = grads["w2"]
        kept[...] = 1
    with pytest.raises(ts.InvalidState, match="still held"):
        engine.backward_done()
    del kept
    with engine.backward("second"):
        pass
    with engine.backward("first") as (_, grads):
        grads["w1"] = np.ones((8, 5))
        grads["b1"] = np.ones(8)
        with pytest.raises(ts.InvalidArgument, match="shape"):
            grads["b1"] = np.ones(7)
        with pytest.raises(ts.NotFound, match="unit 'first' has no gradient of 'w2'"):
            grads["w2"] = np.ones(8)
    engine.backward_done()
    assert engine.step()
    assert engine.grad_norm == pytest.approx(math.sqrt(56))


def test_a_closed_engine_refuses_every_call(alone: ts.Comm, tmp_path: Path):
    engine = ts.Engine(alone, one_tensor(), sgd())
    assert repr(engine) == "<tessera.Engine of 1 parameters in 1 units>"
    engine.close()
    engine.close()
    assert engine.closed and repr(engine).endswith("(closed)>")
    for call in (
        lambda: engine.forward("u").__enter__(),
        lambda: engine.backward("u").__enter__(),
        lambda: engine.ready("w"),
        engine.backward_done,
        engine.step,
        engine.train,
        engine.eval,
        lambda: engine.set_boundary(None),
        lambda: engine.no_sync().__enter__(),
        lambda: engine.training,
        lambda: engine.is_boundary,
        lambda: engine.adds_gradients,
        lambda: engine.loss_factor,
        lambda: engine.loss_scale,
        lambda: engine.counts,
        lambda: engine.grad_norm,
        lambda: engine.lr,
        lambda: setattr(engine, "lr", 1),
        lambda: engine.train_batch_size,
        lambda: setattr(engine, "train_batch_size", 1),
        lambda: setattr(engine, "train_micro_batch_size", 1),
        lambda: engine.config,
        lambda: engine.optimizer,
        lambda: ts.State(engine=engine)._prepare(),
    ):
        with pytest.raises(ts.InvalidState, match="the Engine is closed"):
            call()
    assert (engine.units, engine.names) == (("u",), ("w",))


def test_a_closed_communicator_is_refused():
    with ts.init() as comm:
        pass
    with pytest.raises(ts.InvalidState, match="the Comm is closed"):
        ts.Engine(comm, one_tensor(), sgd())


def test_training_is_a_mode(alone: ts.Comm):
    engine = ts.Engine(alone, one_tensor(), sgd(stage=3))
    assert engine.training
    engine.eval()
    assert not engine.training
    engine.train()
    assert engine.training


# ---------------------------------------------------------------- lifetimes


@pytest.mark.parametrize("stage", [0, 1])
def test_arrays_live_as_long_as_they_are_trained(alone: ts.Comm, stage: int):
    array = np.zeros(6, np.float32)
    gone = weakref.ref(array)
    engine = ts.Engine(alone, {"u": {"w": array}}, sgd(stage=stage))
    del array
    gc.collect()
    assert (gone() is None) == (stage > 0)
    optimizer, state = engine.optimizer, ts.State(engine=engine)
    state._prepare()
    filled_pass(engine, 1)
    engine.close()
    del engine, state
    gc.collect()
    assert (gone() is None) == (stage > 0)
    assert optimizer.steps == 0
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_view_outlives_its_engine(alone: ts.Comm):
    engine = ts.Engine(alone, one_tensor(), sgd(stage=2))
    with pytest.raises(ts.InvalidState, match="still held"), engine.forward("u") as params:
        held = params["w"]
    engine.close()
    del engine
    gc.collect()
    assert not held.any()


# ---------------------------------------------------------------- loss scale


def test_a_loss_scale_shrinks_and_grows():
    scale = LossScale(initial=8, window=2, hysteresis=2, minimum=2)
    assert [scale.update(overflow) for overflow in (True, True, True)] == [8, 4, 2]
    with pytest.raises(ts.InvalidState, match="at its minimum 2"):
        scale.update(True)
    assert [scale.update(overflow) for overflow in (False, np.False_, False, False)] == [2, 2, 4, 4]
    assert scale.value == 4
    assert repr(scale) == "<tessera.LossScale of 4>"
    fixed = LossScale(fixed=128)
    assert (fixed.update(True), fixed.value) == (128, 128)


def test_a_loss_scale_continues_from_its_state():
    scale = LossScale(initial=8, window=2, hysteresis=2)
    for overflow in (True, True, False, False):
        scale.update(overflow)
    state = scale.state()
    assert state == {"scale": 4.0, "iteration": 4, "last_overflow": 1, "hysteresis": 1}
    other = LossScale(initial=1024, window=2, hysteresis=2)
    other.load_state(json.loads(json.dumps(state)))
    for overflow in (False, False, True, True, False):
        assert other.update(overflow) == scale.update(overflow)
    assert other.state() == scale.state()
    fixed = LossScale(fixed=2)
    fixed.load_state(state)
    assert fixed.value == 2


def test_a_loss_scale_takes_what_a_configuration_resolves_to():
    """As tessera.torch.engine does."""
    fp16 = resolve_config({"train_batch_size": 1, "fp16": {"enabled": True, "initial_scale_power": 5}}, 1)["fp16"]
    scale = LossScale(
        fixed=fp16["loss_scale"],
        initial=fp16["initial_scale"],
        window=fp16["loss_scale_window"],
        hysteresis=fp16["hysteresis"],
        restores_every_step=fp16["consecutive_hysteresis"],
        minimum=fp16["min_loss_scale"],
    )
    assert scale.value == 32


def test_bad_loss_scales_are_refused():
    scale = LossScale()
    for call, error, said in (
        (lambda: LossScale(initial=0), ts.InvalidArgument, "the initial scale is 0"),
        (lambda: LossScale(initial="high"), TypeError, "initial is 'high'"),
        (lambda: LossScale(fixed=math.nan), ts.InvalidArgument, "loss_scale is nan"),
        (lambda: LossScale(window=0), ts.InvalidArgument, "loss_scale_window is 0"),
        (lambda: LossScale(hysteresis=1.5), TypeError, "hysteresis is 1.5"),
        (lambda: LossScale(factor=2), TypeError, "there is no option 'factor'"),
        (lambda: scale.load_state({"scale": 1}), ts.InvalidArgument, "lacks iteration, last_overflow, hysteresis"),
        (lambda: scale.load_state([]), TypeError, "the state is a list"),
        (lambda: scale.update("False"), TypeError, "overflow is 'False'; it must be a bool"),
        (lambda: scale.update(math.nan), TypeError, "overflow is nan"),
        (lambda: scale.update(None), TypeError, "overflow is None"),
        (lambda: scale.load_state(scale.state() | {"scale": -1}), ts.InvalidArgument, "the saved loss scale is -1"),
        (lambda: scale.load_state(scale.state() | {"iteration": 2**70}), ts.InvalidArgument, "iteration is"),
        (lambda: scale.load_state(scale.state() | {"hysteresis": None}), TypeError, "hysteresis is None"),
    ):
        with pytest.raises(error, match=said):
            call()
    assert scale.state() == LossScale().state()
    scale.close()
    assert repr(scale) == "<tessera.LossScale (closed)>"
    with pytest.raises(ts.InvalidState, match="the LossScale is closed"):
        scale.update(False)


def test_the_example_of_the_readme_trains():
    part = README.read_text().split("## DeepSpeed's engine")[1]
    code = re.search(r"```python\n(.*?)```", part, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert np.abs(names["error"]).mean() < 0.5
