"""`./dev env` can be evaluated again and again."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_environment_evaluated_twice_repeats_no_entry() -> None:
    evaluate = 'eval "$(./dev env)"; '
    script = evaluate * 2 + 'for name in PATH LD_LIBRARY_PATH PKG_CONFIG_PATH; do echo "${!name}"; done'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    for paths in done.stdout.split("\n")[:3]:
        ours = [entry for entry in paths.split(":") if entry.startswith(str(ROOT))]
        assert ours
        assert len(ours) == len(set(ours)), paths
