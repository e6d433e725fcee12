"""A step of AdamW beside PyTorch's fused one and the memory it moves, rounds interleaved: one thread, fp32.

The model has the shapes of a transformer. A step reads parameter, gradient and two moments and
writes all but the gradient, 28 bytes a parameter; "memory" copies as many bytes, half read and half written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import results
import tessera as ts
import torch
from transformer import shapes

PARAMETERS = sum(math.prod(shape) for shape in shapes().values())
STEPS = 5


def milliseconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(STEPS):
        act()
    return (time.perf_counter() - begin) / STEPS * 1e3


def arrays(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {name: chance.standard_normal(shape, np.float32) for name, shape in shapes().items()}


def bench(rounds: int) -> list[results.Case]:
    torch.set_num_threads(1)
    params, grads = arrays(0), arrays(1)
    ours = ts.AdamW(params, grads, lr=1e-3, weight_decay=0.01)
    theirs = [torch.nn.Parameter(torch.from_numpy(array.copy())) for array in arrays(0).values()]
    for param, grad in zip(theirs, arrays(1).values(), strict=True):
        param.grad = torch.from_numpy(grad)
    fused = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.01, fused=True)
    half = np.zeros(28 * PARAMETERS // 2, np.uint8)
    other = np.ones_like(half)
    ways = {"ours": ours.step, "PyTorch fused": fused.step, "memory": lambda: np.copyto(half, other)}
    for act in ways.values():
        act()
    times = [{name: milliseconds(act) for name, act in ways.items()} for _ in range(rounds)]
    for param, array in zip(theirs, params.values(), strict=True):
        np.testing.assert_allclose(array, param.detach().numpy(), rtol=2e-5, atol=1e-6)
    name = f"AdamW step of {PARAMETERS / 1e6:.1f} M parameters"
    return [
        results.case(
            name, "ms", peer, [(each["ours"], each[peer]) for each in times], target, smaller_is_better=True
        )
        for peer, target in (("PyTorch fused", 1.0), ("memory", None))
    ]  # fmt: skip
