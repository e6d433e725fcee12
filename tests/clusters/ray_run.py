"""The driver of the tests of tessera.ray: python ray_run.py DIRECTORY. Jobs on the running cluster, one after another.

Leaves DIRECTORY/ran.json: what each returned, or its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ranks
import ray
import tessera as ts
import tessera.ray


def raises_on_rank_2(comm: ts.Comm) -> None:
    if comm.rank == 2:
        raise ValueError("no such thing")
    comm.barrier()


def dies(comm: ts.Comm) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def main() -> None:
    at = Path(sys.argv[1])
    ray.init(address="auto")
    pairs: dict[str, Any] = {"resources_per_worker": {"CPU": 2}, "timeout": 60}  # two ranks fill a node
    found = {
        "total": ranks.outcome(lambda: tessera.ray.run(ranks.total, 4, args=(at,), **pairs)),
        "raises": ranks.outcome(lambda: tessera.ray.run(raises_on_rank_2, 4, **pairs)),
        "dies": ranks.outcome(lambda: tessera.ray.run(dies, 4, **pairs)),
        "no room": ranks.outcome(
            lambda: tessera.ray.run(raises_on_rank_2, 4, resources_per_worker={"CPU": 3}, timeout=2)
        ),
        "after them": ranks.outcome(
            lambda: [fact["rank"] for fact in tessera.ray.run(ranks.total, 4, args=(at,), **pairs)]
        ),
    }
    (at / "ran.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
