"""The DDP programs of the source documents: README.md beside this file tells what differs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from conftest import TESSERA  # noqa: E402
from ddp_tutorial import ToyModel  # noqa: E402
from observe_ddp import seed  # noqa: E402
from patience import patience  # noqa: E402
from torch_ranks import free_port, run_ranks  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def environment(directory: Path) -> dict[str, str]:
    temporary = directory / "tmp"
    temporary.mkdir()
    return {**os.environ, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def expected(ranks: int) -> tuple[list[float], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What one process makes of the ranks' random states: each one's loss, the parameters at first, the mean gradients,
    the parameters at the end."""
    losses, gradients, first = [], [], None
    for rank in range(ranks):
        torch.manual_seed(seed(rank))
        model = ToyModel()  # takes from the random state of each rank, but rank 0's parameters count
        first = first or model
        model.load_state_dict(first.state_dict())
        inputs, labels = torch.randn(20, 10), torch.randn(20, 5)
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert first is not None
    mean = {name: sum(of) / ranks for (name, _), *of in zip(first.named_parameters(), *gradients, strict=True)}
    begin = {name: value.detach() for name, value in first.named_parameters()}
    return losses, begin, mean, {name: value - 0.001 * mean[name] for name, value in begin.items()}


@pytest.mark.parametrize(
    ("program", "function", "ranks"),
    [
        ("ddp_tutorial", "demo_basic", 2),
        ("ddp_tutorial", "demo_basic", 4),
        ("ddp_tutorial", "demo_checkpoint", 2),
        ("ddp_tutorial", "demo_checkpoint", 4),
        ("ddp_tutorial", "demo_model_parallel", 2),
        ("ddp_tutorial", "demo_model_parallel", 4),
        ("elastic_ddp", "demo_basic", 2),
        ("elastic_ddp", "demo_basic", 4),
    ],
)
def test_a_step_is_that_of_all_samples_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, function: str, ranks: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_ranks(HERE / "observe_ddp.py", ranks, program, function, tmp_path / "seen", cwd=tmp_path)
    losses, begin, gradients, parameters = expected(ranks)
    seen = [torch.load(tmp_path / f"seen.{rank}") for rank in range(ranks)]
    assert [of_rank["loss"] for of_rank in seen] == pytest.approx(losses, rel=1e-5)
    for of_rank in seen:
        assert of_rank["parameters"].keys() == {f"module.{name}" for name in parameters}
        for name, value in of_rank["parameters"].items():
            torch.testing.assert_close(value, parameters[name.removeprefix("module.")])
            assert torch.equal(value, seen[0]["parameters"][name])
        for name, value in of_rank["gradients"].items():
            torch.testing.assert_close(value, gradients[name.removeprefix("module.")])
            assert torch.equal(value, seen[0]["gradients"][name])
        assert len(of_rank["saved"]) == (len(begin) if function == "demo_checkpoint" else 0)
        for name, value in of_rank["saved"].items():
            assert torch.equal(value, begin[name.removeprefix("module.")])
    assert not (tmp_path / "model.checkpoint").exists()


def finished(printed: str, what: str) -> list[int]:
    """The ranks that say so, perhaps several on one line."""
    return sorted(map(int, re.findall(rf"Finished running {what} example on rank (\d+)\.", printed)))


def test_the_tutorial_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "ddp_tutorial.py"), "4"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(280),
        cwd=tmp_path,
        env=environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished(done.stdout, "basic DDP") == [0, 1, 2, 3], done.stdout + done.stderr
    assert finished(done.stdout, "DDP checkpoint") == [0, 1, 2, 3], done.stdout + done.stderr
    assert finished(done.stdout, "DDP with model parallel") == [0, 1], done.stdout + done.stderr
    assert not (tmp_path / "tmp" / "model.checkpoint").exists()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv_id=100", "--rdzv_backend=c10d"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", ["torchrun", "tessera run"])
def test_the_elastic_program_as_it_is(tmp_path: Path, launcher: str, ranks: int) -> None:
    command = [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(HERE / "elastic_ddp.py")]
    if launcher == "torchrun":
        where = ["--nnodes=1", f"--nproc_per_node={ranks}", f"--rdzv_endpoint=localhost:{free_port()}"]
        command = [*TORCHRUN, *where, str(HERE / "elastic_ddp.py")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(280),
        cwd=tmp_path,
        env=environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished(done.stdout, "basic DDP") == list(range(ranks))


def test_the_elastic_program_on_two_nodes(tmp_path: Path) -> None:
    """As in the document, with as many processes on each as there is room for: an agent a node, which this machine
    pretends to be."""
    port = free_port()
    arguments = ["--nnodes=2", "--nproc_per_node=2", f"--rdzv_endpoint=localhost:{port}", "--local_addr=127.0.0.1"]
    common = environment(tmp_path)
    agents = [
        subprocess.Popen(
            [*TORCHRUN, *arguments, str(HERE / "elastic_ddp.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**common, "TESSERA_HOST_ID": f"node{node}"},
            start_new_session=True,
        )
        for node in range(2)
    ]
    try:
        limit = time.monotonic() + patience(250)
        outputs = [agent.communicate(timeout=limit - time.monotonic())[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:  # with its ranks
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    ranks = [finished(output, "basic DDP") for output in outputs]
    assert sorted(ranks) == [[0, 1], [2, 3]], "\n".join(outputs)
