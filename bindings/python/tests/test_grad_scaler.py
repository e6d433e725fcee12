"""Dynamic scaling of losses: steps made or left out, alike on every rank, and the scale that follows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tessera as ts


class Local:
    def __init__(self) -> None:
        self.value = np.ones(3, np.float32)
        self.grad = np.zeros(3, np.float32)
        self.optimizer = ts.SGD({"w": self.value}, {"w": self.grad}, lr=1.0)


def test_steps_are_made_or_left_out_and_the_scale_follows():
    local = Local()
    scaler = ts.GradScaler(init_scale=8, growth_interval=2)
    for grad, made, scale in (
        (0.25, True, 8),
        (0.25, True, 16),
        (math.inf, False, 8),
        (0, True, 8),
        (math.nan, False, 4),
    ):
        local.grad[0] = scaler.scale(grad)
        before = local.value.copy()
        assert scaler.step(local.optimizer) is made
        scaler.update()
        assert (local.value == before - [grad, 0, 0]).all() if made else (local.value == before).all()
        assert scaler.get_scale() == scale
    assert local.optimizer.steps == 3
    assert repr(scaler) == "<tessera.GradScaler of 4>"


def test_what_is_scaled_stays_what_it_is():
    scaler = ts.GradScaler(init_scale=4)
    assert scaler.scale(0.5) == 2.0
    scaled = scaler.scale(np.ones((2, 2), np.float32))
    assert scaled.dtype == np.float32
    assert (scaled == 4).all()


def test_gradients_may_be_bounded_before_the_step():
    local = Local()
    scaler = ts.GradScaler(init_scale=4)
    local.grad[:] = [12, 0, 16]
    scaler.unscale_(local.optimizer)
    assert local.optimizer.clip_grad_norm(1.0) == 5
    assert scaler.step(local.optimizer)
    np.testing.assert_allclose(local.value, [0.4, 1, 0.2], rtol=1e-5)


def test_over_a_sharded_model_all_ranks_decide_alike(ranks):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, {"u": {"w": np.ones(6, np.float32)}})
        optimizer = ts.AdamW(fsdp)
        scaler = ts.GradScaler(init_scale=4, growth_interval=1)
        made = []
        for last in (math.inf, 2.0):  # of the last row, which rank 2 has
            with fsdp.backward("u") as (_, grads):
                grads["w"][...] = 4
                grads["w"][5] = last
            fsdp.wait()
            made.append(scaler.step(optimizer))
            scaler.update()
        return made, scaler.get_scale(), optimizer.steps, bool((fsdp.shards["w"] < 1).all())

    assert ranks(3, job) == [([False, True], 4.0, 1, True)] * 3


# Gradients of 2^-30: nothing in float16 (its least is 2^-24), unless the loss was scaled.
@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_that_float16_cannot_hold_are_there_with_it(ranks, scaled):
    def job(comm: ts.Comm):
        fsdp = ts.FSDP(comm, {"u": {"w": np.ones(4, np.float32)}}, reduce_dtype="float16")
        optimizer = ts.SGD(fsdp, lr=2.0**29)
        scaler = ts.GradScaler() if scaled else ts.GradScaler(init_scale=1)
        for _ in range(2):
            with fsdp.backward("u") as (_, grads):
                grads["w"][...] = scaler.scale(2.0**-30)
            fsdp.wait()
            assert scaler.step(optimizer)
            scaler.update()
        return fsdp.shards["w"].tolist()

    assert ranks(2, job) == [[0.0 if scaled else 1.0] * 2] * 2


def test_is_saved_and_loaded_with_a_state(tmp_path):
    with ts.init() as comm:
        local = Local()
        scaler = ts.GradScaler(init_scale=32, growth_interval=2)
        scaler.step(local.optimizer)
        scaler.update()
        saver = ts.Saver(comm, tmp_path)
        saver.save(1, ts.State(amp={"scaler": scaler}))
        other = ts.GradScaler()
        assert saver.resume(ts.State(amp={"scaler": other})) == 1
        assert other.get_scale() == 32
        other.step(local.optimizer)
        other.update()
        assert other.get_scale() == 64, "the second step of two"
        saver.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_scale": 0.0}, "init_scale is 0"),
        ({"init_scale": math.nan}, "init_scale is nan"),
        ({"growth_factor": 1.0}, "growth_factor is 1"),
        ({"backoff_factor": 1.5}, "backoff_factor is 1.5"),
        ({"growth_interval": 0}, "growth_interval is 0"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ts.InvalidArgument, match=said):
        ts.GradScaler(**options)


def test_what_comes_in_the_wrong_order_is_refused():
    local = Local()
    scaler = ts.GradScaler()
    with pytest.raises(ts.InvalidState, match="no gradients were unscaled"):
        scaler.update()
    scaler.unscale_(local.optimizer)
    with pytest.raises(ts.InvalidState, match="already unscaled"):
        scaler.unscale_(local.optimizer)
    scaler.step(local.optimizer)
    with pytest.raises(ts.InvalidState, match=r"call update\(\) first"):
        scaler.step(local.optimizer)
    with pytest.raises(TypeError, match="optimizer is a float"):
        scaler.step(1.0)
    with pytest.raises(TypeError, match="growth_interval"):
        ts.GradScaler(growth_interval=1.5)
    scaler.close()
    assert repr(scaler) == "<tessera.GradScaler (closed)>"
    for call in (scaler.update, scaler.get_scale, lambda: scaler.step(local.optimizer)):
        with pytest.raises(ts.InvalidState, match="closed"):
            call()
    closed = Local()
    closed.optimizer.close()
    with pytest.raises(ts.InvalidState, match="closed"):
        ts.GradScaler().step(closed.optimizer)
