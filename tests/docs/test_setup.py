"""What `./dev setup` cannot install by itself it names, so that somebody can."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from patience import patience

ROOT = Path(__file__).resolve().parents[2]


def setup(script: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a line of bash among the functions of tools/dev/setup.sh."""
    lines = f'ROOT="{ROOT}"; cd "$ROOT"; source tools/dev/common.sh; source tools/dev/setup.sh\n{script}'
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    environment.pop("TESSERA_SYSTEM_DEPS", None)
    bash = shutil.which("bash")
    assert bash
    return subprocess.run([bash, "-euc", lines], env=environment, capture_output=True, text=True, timeout=patience(60))


def packages(group: str) -> list[str]:
    done = setup(f"apt_group {group}")
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("|", " ").split()


def test_without_apt_every_package_is_named(tmp_path: Path) -> None:
    for tool in ("awk", "cat", "dirname", "grep", "sed", "sort", "tr"):  # and neither apt-get nor a compiler
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / tool).symlink_to(found)
    done = setup("install_system build", str(tmp_path))
    assert done.returncode != 0
    assert "no apt" in done.stderr
    assert "g++" in done.stderr
    wanted = packages("build")
    assert len(wanted) > 5
    assert [name for name in wanted if name not in done.stderr] == []


def test_without_root_and_sudo_the_command_is_named() -> None:
    done = setup("can_be_root() { false; }; apt_install libgloo-dev libisal-dev")
    assert done.returncode == 1
    assert "apt-get install libgloo-dev libisal-dev" in done.stderr
    assert "neither root nor has sudo" in done.stderr


def test_what_is_there_is_not_asked_for() -> None:
    done = setup("is_installed() { true; }; can_be_root() { false; }; install_system build test")
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
