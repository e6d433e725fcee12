"""What PyTorch's own tests ask of a CPU backend, asked of the backend "tessera"; docs/TORCH.md has the list."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from fork_server import Start
from run_torch import run_python, run_ranks
from sampling import sample

JOBS = Path(__file__).with_name("torch_c10d_jobs.py")


@pytest.mark.parametrize("ranks", sample([2, 3, 4], 1, "c10d"))
def test_the_backend_does_what_gloos_tests_ask(ranks: int) -> None:
    run_ranks(JOBS, ranks)


ALONE = """
import sys
import torch, torch.distributed as dist
from datetime import timedelta
given = {"timeout": timedelta(seconds=int(sys.argv[1]))} if sys.argv[1] else {}
dist.init_process_group("tessera", store=dist.HashStore(), rank=0, world_size=1, **given)
print(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("given", "environment", "seconds"), [("", "5000", 5), ("7", "5000", 7), ("", "", 1800)])
def test_the_environments_timeout_counts_where_none_is_given(given: str, environment: str, seconds: int) -> None:
    start = Start.FORK if environment else Start.EXECUTE
    done = run_python("-c", ALONE, given, environment={"TESSERA_TIMEOUT_MS": environment}, start=start)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == seconds
