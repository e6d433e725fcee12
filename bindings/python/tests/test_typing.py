"""The types that the package promises: mypy --strict over its sources, and the stub against the real extension."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory):
    cache = tmp_path_factory.mktemp("mypy")

    def run(path: str) -> str:
        """What mypy finds wrong."""
        command = ["mypy", "--strict", f"--cache-dir={cache}", path]
        if importlib.util.find_spec("torch") is None:  # then nothing of PyTorch's types needs to be ignored
            command.append("--no-warn-unused-ignores")
        result = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, cwd=PROJECT, check=False
        )
        assert result.returncode in (0, 1), result.stderr
        return result.stdout if result.returncode else ""

    return run


def test_the_sources_are_typed(mypy):
    assert mypy("src/tessera") == ""


def test_the_stub_is_true(tmp_path: Path):
    # What Cython adds to every class and module; and the buffer protocol's methods, visible from Python 3.12 on.
    allowed = tmp_path / "allowed"
    allowed.write_text(
        r"tessera\._core\.(.*\.)?(__pyx_.*__|__reduce_cython__|__setstate_cython__|__test__)"
        "\n"
        r"tessera\._core\.Memory\.__(release_)?buffer__"
        "\n"
    )
    command = ["mypy.stubtest", "tessera._core", "--allowlist", str(allowed), "--ignore-unused-allowlist"]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_users_program_is_checked(mypy, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import numpy as np
import tessera as ts

with ts.init(timeout=5) as comm:
    work = comm.all_reduce(np.zeros(3), "avg", async_op=True)
    work.wait()
    nothing: None = comm.barrier()
    ddp = ts.DDP(comm, {"w": np.zeros(3)})
    total: float = float(ddp.grads["w"].sum())
    opt: ts.Optimizer = ts.AdamW(ddp, lr=1e-3)
    state = ts.State(model=ddp, optim=opt, epoch=3)
    engine = ts.Engine(comm, {"u": {"w": np.zeros(3)}}, {"train_batch_size": 1}, ts.LRSchedule.exponential(0.5))
    with engine.backward("u") as (params, grads):
        grads["w"][...] = engine.loss_factor * params["w"]
    made: bool = engine.step()
    norm: float | None = engine.grad_norm
    batch: int = ts.engine.resolve_config("ds_config.json", 2)["train_batch_size"]
    step: int = ts.Saver(comm, "x").resume(state)
    shape: tuple[int, ...] = ts.Checkpoint("x").tensors["w"].shape

    def forward(call: ts.StageCall) -> object:
        return call.inputs[0] * 2 if call.stage == 0 else float(call.inputs[0].sum())

    with ts.Pipeline(comm, [0], forward, lambda call: call.output_grads, microbatches=2, schedule="gpipe") as pipe:
        mean: float = float(pipe.step(np.ones(4), weights=[0.5, 0.5]).mean())
"""
    )
    assert mypy(str(program)) == ""
    program.write_text("import tessera as ts\nts.init(timeout='soon')\n")
    assert "incompatible type" in mypy(str(program))
