"""A rank for test_torchrun.py: writes its environment to DIRECTORY/RESTARTS-RANK.json. Rank 1 then fails.

usage: torchrun_worker.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tessera  # noqa: F401 - reports the exception to the launcher

directory, restarts = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]


def file_of(rank: str) -> Path:
    return directory / f"{restarts}-{rank}.json"


draft = directory / f"draft-{os.environ['RANK']}"
draft.write_text(json.dumps(dict(os.environ)), encoding="utf-8")
draft.rename(file_of(os.environ["RANK"]))
if os.environ["RANK"] == "1":
    while not file_of("0").exists():  # the launcher ends rank 0 when this rank fails
        os.sched_yield()
    raise ValueError(f"loss is nan after {restarts} restarts")
