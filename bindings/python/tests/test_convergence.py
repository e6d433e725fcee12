"""Whole trainings: ranks with a share of the batch equal one rank with all of it, however the gradients are reduced."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tessera as ts

STEPS, SAMPLES = 50, 24
RANDOM = np.random.default_rng(5)
INPUTS = RANDOM.uniform(-1, 1, (SAMPLES, 5)).astype(np.float32)
TARGETS = RANDOM.uniform(-1, 1, SAMPLES).astype(np.float32)
INITIAL = {
    "w1": RANDOM.uniform(-0.5, 0.5, (8, 5)).astype(np.float32),
    "b1": RANDOM.uniform(-0.5, 0.5, 8).astype(np.float32),
    "w2": RANDOM.uniform(-0.5, 0.5, 8).astype(np.float32),
}


class Way(NamedTuple):
    """How a training reduces its gradients."""

    options: Mapping[str, Any] = MappingProxyType({})
    micro_steps: int = 1  # parts of a rank's share of the batch, of which the last one synchronises
    by_hand: bool = False  # backward reduces nothing; the trainer averages what it left
    rtol: float = 1e-4
    bits_of_plain: bool | None = None  # None: perhaps


WAYS = {
    "plain": Way(bits_of_plain=True),
    "no_sync": Way(micro_steps=2),
    "by_hand": Way({"hook": "noop"}, by_hand=True),
    "bf16": Way({"reduce_dtype": "bfloat16"}, rtol=2e-2, bits_of_plain=False),
    "one_copy_a_host": Way({"share_params": True}, bits_of_plain=True),
}


def forward(params, part=slice(None)):
    hidden = np.tanh(INPUTS[part] @ params["w1"].T + params["b1"])
    return hidden, hidden @ params["w2"] - TARGETS[part]


def backward(params, grads, part, share):
    """Adds the part's gradients of the mean over the share that it belongs to."""
    hidden, error = forward(params, part)
    d = (2 / share) * error
    d_hidden = np.outer(d, params["w2"]) * (1 - hidden**2)
    grads["w2"] += d @ hidden
    grads["b1"] += d_hidden.sum(axis=0)
    grads["w1"] += d_hidden.T @ INPUTS[part]


def train(comm: ts.Comm, way: Way):
    """The loss over all samples after each step, and the parameters' bits at the end."""
    initial = {name: value.copy() for name, value in INITIAL.items()}
    ddp = ts.DDP(comm, initial, bucket_bytes=64, first_bucket_bytes=64, **way.options)
    optimizer = ts.SGD(ddp, lr=0.05, momentum=0.9)
    params = ddp.params
    losses = []
    for _ in range(STEPS):
        ddp.zero_grad()
        for micro in range(way.micro_steps):
            ddp.set_sync(micro == way.micro_steps - 1)
            first, stride = comm.rank + comm.world_size * micro, comm.world_size * way.micro_steps
            backward(params, ddp.grads, slice(first, None, stride), SAMPLES / comm.world_size)
            ddp.ready("w2", "b1", "w1")
            ddp.wait()
        if way.by_hand:
            for grad in ddp.grads.values():
                comm.all_reduce(grad, op="avg")
        if "share_params" not in way.options:  # else it has stepped
            optimizer.step()
        losses.append(float((forward(params)[1] ** 2).mean()))
    return losses, {name: value.tobytes() for name, value in params.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_a_share_of_the_batch_equal_one_rank_with_all_of_it(ranks, alone, way, world_size):
    expected, _ = train(alone, Way())
    assert expected[-1] < 0.8 * expected[0]
    results = ranks(world_size, lambda comm: train(comm, WAYS[way]))
    np.testing.assert_allclose(results[0][0], expected, rtol=WAYS[way].rtol)
    assert results.count(results[0]) == world_size, "ranks ended with different bits"
    assert ranks(world_size, lambda comm: train(comm, WAYS[way])) == results, "a second run gave other bits"
    if WAYS[way].bits_of_plain is not None:
        assert (ranks(world_size, lambda comm: train(comm, Way())) == results) == WAYS[way].bits_of_plain
