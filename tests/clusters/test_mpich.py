"""MPICH: mpirun of the package of PyPI, which hides no other one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import threading
from pathlib import Path

import pytest
from cluster_hosts import facts, rank_command
from patience import patience


@pytest.fixture(scope="module")
def mpirun() -> str:
    package = importlib.metadata.distribution("mpich")
    (found,) = [file for file in package.files or [] if file.parts[-2:] == ("bin", "mpirun")]
    return str(Path(str(package.locate_file(found))).resolve())


def run(mpirun: str, size: int, at: Path) -> str:
    done = subprocess.run(
        [mpirun, "-n", str(size), *rank_command("total", at)],
        env={**os.environ, "TESSERA_TIMEOUT_MS": "60000"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_two_jobs_at_a_time_sum_each_its_own(mpirun: str, tmp_path: Path) -> None:
    """Their variables are the same."""
    places = [tmp_path / name for name in "ab"]
    jobs = []
    for place in places:
        place.mkdir()
        jobs.append(threading.Thread(target=run, args=(mpirun, 3, place)))
        jobs[-1].start()
    for job in jobs:
        job.join()
    for place in places:
        assert [(fact["world"], fact["transport"], fact["sums"]) for fact in facts(place, "total")] == [
            (3, "shm", [6.0])
        ] * 3
    assert {fact["pid"] for fact in facts(places[0], "total")}.isdisjoint(
        fact["pid"] for fact in facts(places[1], "total")
    )
