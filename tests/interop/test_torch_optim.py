"""100 steps of Adagrad equal those of torch.optim; 100 of Lion and Lamb equal their formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import tessera as ts
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

STEPS = 100
SHAPES = {"weight": (37, 11), "bias": (11,), "scale": ()}
Arrays = dict[str, NDArray[np.floating]]
DTYPES = pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-5), ("float64", 1e-12)])


def drawn(seed: int, dtype: str) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def trained(make: Callable[[Arrays, Arrays], ts.Optimizer], dtype: str) -> Arrays:
    params, grads = drawn(0, dtype), drawn(0, dtype)
    optimizer = make(params, grads)
    for step in range(STEPS):
        for name, grad in drawn(step + 1, dtype).items():
            grads[name][...] = grad
        optimizer.step()
    return params


def torch_parameters(dtype: str) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in drawn(0, dtype).items()}


def step_in_torch(
    optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], step: int, dtype: str
) -> None:
    for name, grad in drawn(step + 1, dtype).items():
        params[name].grad = torch.from_numpy(grad)
    optimizer.step()


@DTYPES
@pytest.mark.parametrize(
    "settings",
    [{}, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6}],
    ids=["defaults", "all"],
)
def test_adagrad_is_pytorchs(settings: dict[str, float], dtype: str, rtol: float) -> None:
    ours = trained(lambda params, grads: ts.Adagrad(params, grads, **settings), dtype)
    params = torch_parameters(dtype)
    theirs = torch.optim.Adagrad(params.values(), **settings, foreach=False)
    for step in range(STEPS):
        step_in_torch(theirs, params, step, dtype)
    for name, value in ours.items():
        np.testing.assert_allclose(value, params[name].detach().numpy(), rtol=rtol, atol=rtol, err_msg=name)


class Holder(torch.nn.Module):
    """A model of these parameters."""

    def __init__(self, params: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)


def test_the_state_of_pytorchs_adagrad_is_loaded(tmp_path: Path) -> None:
    """Saved by `dcp.save` after 5 steps; both go on for 5."""
    params = torch_parameters("float64")
    model = Holder(params)
    theirs = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5)
    for step in range(5):
        step_in_torch(theirs, params, step, "float64")
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, theirs)},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    mine, grads = drawn(1, "float64"), drawn(1, "float64")
    ours = ts.Adagrad(mine, grads)
    with ts.Checkpoint(tmp_path / "saved") as checkpoint:
        checkpoint.load(ts.State(model=mine, optim=ours), allow_missing=True, allow_unexpected=True)
    assert (ours.steps, ours.lr) == (5, 0.1)
    for step in range(5, 10):
        step_in_torch(theirs, params, step, "float64")
        for name, grad in drawn(step + 1, "float64").items():
            grads[name][...] = grad
        ours.step()
    for name, value in mine.items():
        np.testing.assert_allclose(value, params[name].detach().numpy(), rtol=1e-12, err_msg=name)


@DTYPES
def test_lion_is_its_papers(dtype: str, rtol: float) -> None:
    ours = trained(lambda params, grads: ts.Lion(params, grads, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1), dtype)
    expected = {name: value.astype(np.float64) for name, value in drawn(0, dtype).items()}
    mean = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, grad in drawn(step + 1, dtype).items():
            move = np.sign(0.8 * mean[name] + 0.2 * grad)
            expected[name] = expected[name] * (1 - 0.01 * 0.1) - 0.01 * move
            mean[name] = 0.95 * mean[name] + 0.05 * grad
    for name, value in ours.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol, err_msg=name)


@DTYPES
@pytest.mark.parametrize("corrects", [True, False])
def test_lamb_is_deepspeeds(corrects: bool, dtype: str, rtol: float) -> None:
    ours = trained(
        lambda params, grads: ts.Lamb(
            params, grads, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, bias_correction=corrects, max_coeff=2
        ),
        dtype,
    )
    expected = {name: value.astype(np.float64) for name, value in drawn(0, dtype).items()}
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(1, STEPS + 1):
        rate = 0.01 * (np.sqrt(1 - 0.95**step) / (1 - 0.8**step) if corrects else 1)
        for name, grad in drawn(step, dtype).items():
            wide = grad.astype(np.float64)
            first[name] = 0.8 * first[name] + 0.2 * wide
            second[name] = 0.95 * second[name] + 0.05 * wide * wide
            direction = first[name] / (np.sqrt(second[name]) + 1e-8) + 0.1 * expected[name]
            ratio = np.linalg.norm(expected[name]) / np.linalg.norm(direction)
            expected[name] = expected[name] - rate * np.clip(ratio, 0.01, 2) * direction
    for name, value in ours.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol, err_msg=name)
