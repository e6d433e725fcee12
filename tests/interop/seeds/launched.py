"""Runs a program of this folder by `tessera run`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from conftest import TESSERA
from patience import patience


def run_launched(
    ranks: int, program: Path, *arguments: object, cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What became of it and what the ranks printed."""
    return subprocess.run(
        [str(TESSERA), "run", "-n", str(ranks), sys.executable, str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=patience(280),
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
    )
