"""The FSDP2 parts of a source document: README.md beside this file tells what differs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tessera")

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from fsdp2 import Transformer  # noqa: E402
from launched import run_launched  # noqa: E402
from observe_fsdp2 import STEPS, loss_of  # noqa: E402
from run_torch import reserved_port, run_python, run_ranks  # noqa: E402
from sampling import sample  # noqa: E402

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", sample([2, 4], 1, "fsdp2"))
def test_it_trains_as_one_process_does(tmp_path: Path, ranks: int) -> None:
    run_ranks(HERE / "observe_fsdp2.py", ranks, tmp_path / "seen.pt", cwd=tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    assert all(own == -(-rows // ranks) for own, rows in seen["rows"].values()), "of N rows the first has N / ranks"
    torch.manual_seed(1000)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(ranks)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert seen["losses"] == pytest.approx(losses, rel=1e-4)
    for name, param in model.named_parameters():
        got, expected = seen["parameters"][name], param.detach()
        if name.endswith("in_proj_bias"):
            # A key's bias has a gradient of zero but for rounding, of which Adam makes whole steps.
            got, expected = (torch.cat([one.chunk(3)[i] for i in (0, 2)]) for one in (got, expected))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("launcher", sample(["torchrun", "tessera run"], 1, "fsdp2 as it is"))
def test_it_runs_as_it_is(tmp_path: Path, launcher: str) -> None:
    program = HERE / "fsdp2.py"
    if launcher == "torchrun":
        with reserved_port() as port:
            torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={port}"]
            done = run_python(*torchrun, program, cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"})
    else:
        done = run_launched(2, program, cwd=tmp_path, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("FSDPTransformer(") == 2
    assert done.stdout.count("2 x FSDPTransformerEncoderLayer(") == 2
