"""The DDP programs of the source documents: README.md beside this file tells what differs."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from ddp_tutorial import ToyModel  # noqa: E402
from fork_server import server  # noqa: E402
from launched import run_launched  # noqa: E402
from observe_ddp import seed  # noqa: E402
from run_torch import reserved_port, run_python, run_ranks, run_spawner, wait_for  # noqa: E402
from sampling import sample  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}


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


def test_the_tutorial_as_it_is(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_spawner(HERE / "ddp_tutorial.py", 4, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished(done.stdout, "basic DDP") == [0, 1, 2, 3], done.stdout + done.stderr
    assert finished(done.stdout, "DDP checkpoint") == [0, 1, 2, 3], done.stdout + done.stderr
    assert finished(done.stdout, "DDP with model parallel") == [0, 1], done.stdout + done.stderr
    assert not (tmp_path / "tmp" / "model.checkpoint").exists()


TORCHRUN = ["-m", "torch.distributed.run", "--rdzv_id=100", "--rdzv_backend=c10d"]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    sample([(name, ranks) for name in ("torchrun", "tessera run") for ranks in (2, 4)], 1, "elastic"),
)
def test_the_elastic_program_as_it_is(tmp_path: Path, environment: dict[str, str], launcher: str, ranks: int) -> None:
    program = HERE / "elastic_ddp.py"
    if launcher == "torchrun":
        with reserved_port() as port:
            where = ["--nnodes=1", f"--nproc_per_node={ranks}", f"--rdzv_endpoint=localhost:{port}"]
            done = run_python(*TORCHRUN, *where, program, cwd=tmp_path, environment=environment)
    else:
        done = run_launched(ranks, program, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert finished(done.stdout, "basic DDP") == list(range(ranks))


def test_the_elastic_program_on_two_nodes(tmp_path: Path, environment: dict[str, str]) -> None:
    """As in the document, with as many processes on each as there is room for: an agent a node, which this machine
    pretends to be."""
    with reserved_port() as port, ExitStack() as running:
        arguments = ["--nnodes=2", "--nproc_per_node=2", f"--rdzv_endpoint=localhost:{port}", "--local_addr=127.0.0.1"]
        agents = []
        for node in range(2):
            agent = server().start(
                [*TORCHRUN, *arguments, HERE / "elastic_ddp.py"],
                environment={**os.environ, **environment, "TESSERA_HOST_ID": f"node{node}"},
                cwd=tmp_path,
            )
            agents.append(running.enter_context(closing(agent)))
        hung = wait_for(agents, 250)
        outputs = [agent.printed() for agent in agents]
    assert not hung, "\n".join(outputs)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    ranks = [finished(output, "basic DDP") for output in outputs]
    assert sorted(ranks) == [[0, 1], [2, 3]], "\n".join(outputs)
