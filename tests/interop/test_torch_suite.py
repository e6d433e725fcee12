"""PyTorch's own suite of `torch.distributed`, over the backend "tessera" and Tessera's DistributedDataParallel.

What Gloo passes has to pass; where a test fails here, Gloo is asked, on ranks of the same kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fork_server import server
from patience import patience
from run_torch import reserved_port, run_python, wait_for
from sampling import LONG, sample

JOBS = Path(__file__).with_name("torch_suite_jobs.py")
RANKS = 3
SECONDS = patience(30)  # a test
PASS = 86  # of the tests that Gloo passes, at the least

ANY_SOURCE = "a receive has to name its source"
# The tests that ours is meant to fail: docs/TORCH.md, "Where it differs", has each.
DIFFER = {
    "test_send_recv_any_source": ANY_SOURCE,
    "test_send_recv_any_source_autograd_profiler": ANY_SOURCE,
    "test_send_recv_any_source_torch_profiler": ANY_SOURCE,
    "test_ddp_logging_data_cpu": "this model has no DDP logging data",
    "test_static_graph_api_cpu": "this model has no DDP logging data",
}


def test_what_gloo_passes_passes(tmp_path: Path) -> None:
    told = run_python(JOBS, "names", environment={"RANK": "0", "WORLD_SIZE": str(RANKS)})
    assert told.returncode == 0, told.stderr
    names = sample(told.stdout.split(), 75, "torch suite")
    if not LONG:  # each costs ranks
        names = [name for name in names if name not in DIFFER]
    became = run_tests("tessera", names, tmp_path)
    failed = {name: why for name, why in became.items() if why.startswith("failed")}
    expected = {name for name, why in failed.items() if name in DIFFER and DIFFER[name] in why}
    assert expected == DIFFER.keys() & became.keys(), "the list of those that differ is out of date"
    gloo = run_tests("gloo", names if LONG else [name for name in failed if name not in DIFFER], tmp_path)
    defects = [name for name in failed if name not in DIFFER and gloo[name] == "passed"]
    assert not defects, "\n".join(f"{name}: {failed[name]}" for name in defects)
    passed = [name for name, why in became.items() if why == "passed"]
    assert passed
    if LONG:
        of_gloo = [name for name, why in gloo.items() if why == "passed"]
        print(f"{len(of_gloo)} pass over gloo, {len({*of_gloo} & {*passed})} of them over tessera")
        assert len({*of_gloo} & {*passed}) >= PASS
        assert gloo.keys() >= DIFFER.keys()


def run_tests(backend: str, names: Sequence[str], directory: Path) -> dict[str, str]:
    """What became of each: "passed", "skipped ...", or "failed ..." and each rank's reason. A failure costs the ranks
    their lives, and the next tests get others."""
    became: dict[str, str] = {}
    while left := [name for name in names if name not in became]:
        place = directory / f"{backend} {len(became)}"
        place.mkdir()
        lines = run_once(backend, left, place)
        before = len(became)
        for name in left:
            told = [line for line in lines if line[0] == name]
            kinds = {kind for _, _, kind, _ in told}
            if len(told) < RANKS or "failed" in kinds:
                if told:
                    why = "\n".join(f"rank {rank}: {text}" for _, rank, kind, text in told if kind == "failed")
                    became[name] = f"failed\n{why}"
                break
            became[name] = "passed" if kinds == {"passed"} else f"skipped: {told[0][3]}"
        assert len(became) > before, f"{backend}: nothing came of {left[0]}: {lines}"
    return became


def run_once(backend: str, names: Sequence[str], directory: Path) -> list[tuple[str, int, str, str]]:
    """Until the first failure."""
    with reserved_port() as port, ExitStack() as running:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        programs = [
            running.enter_context(
                closing(
                    server().start(
                        [JOBS, backend, SECONDS, *names],
                        environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=directory,
                    )
                )
            )
            for rank in range(RANKS)
        ]
        hung = wait_for(programs, patience(280))
        output = "".join(program.printed() for program in programs)
    assert not hung, f"ranks {hung} did not end\n{output}"
    assert all(program.returncode == 0 for program in programs), output
    return [tuple(json.loads(line)) for line in output.splitlines() if line.startswith('["test_')]
