"""docs/RUNNING.md: its program is compiled and run as the page says, and its tables hold what the library knows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from patience import patience

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "RUNNING.md").read_text(encoding="utf-8")
PREFIX = ROOT / "build" / "prefix"

# Between the launcher and its ranks, or for tests: no user sets them.
PRIVATE = {
    "TESSERA_RANK",
    "TESSERA_WORLD_SIZE",
    "TESSERA_LOCAL_RANK",
    "TESSERA_LOCAL_WORLD_SIZE",
    "TESSERA_TOKEN_FD",
    "TESSERA_PREEMPT_FD",
    "TESSERA_PREEMPT_FILE",
    "TESSERA_PREEMPT_ASKED_FD",
    "TESSERA_PREEMPT_ASKED_FILE",
    "TESSERA_METER_FD",
    "TESSERA_METER_FILE",
    "TESSERA_METER_PAGES",
}


def commands() -> list[str]:
    """The indented lines under the program: how it is compiled and started."""
    part = PAGE.split("```\n", 2)[1].split("\n## ")[0]
    return re.findall(r"^    (\S.*)$", part, re.M)


def test_the_first_program_runs_as_the_page_says(tmp_path: Path) -> None:
    """In a shell without LD_LIBRARY_PATH: the link line must be enough."""
    (tmp_path / "first.c").write_text(PAGE.split("```c\n")[1].split("```")[0], encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PKG_CONFIG_PATH"] = str(PREFIX / "lib" / "pkgconfig")
    environment["PATH"] = f"{PREFIX / 'bin'}:{environment['PATH']}"
    build, start = commands()
    assert f"`{build}`" in (ROOT / "README.md").read_text(encoding="utf-8"), "the README compiles in another way"
    flags = "-std=c99 -Wall -Wextra -Werror"
    for command in (build.replace("cc ", f"cc {flags} "), start):
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patience(120)
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: 10 40" in done.stdout


def test_every_status_code_has_its_advice() -> None:
    header = (ROOT / "capi" / "include" / "tessera" / "error.h").read_text(encoding="utf-8")
    codes = set(re.findall(r"TSR_E_(\w+) = \d+", header)) - {"CUDA", "NCCL"}  # no GPU backend exists yet
    table = PAGE.split("\n## Errors")[1].split("\n## ")[0]
    told = [code for row in re.findall(r"^\| ([A-Z_, ]+) \|", table, re.M) for code in row.split(", ")]
    assert sorted(told) == sorted(codes)


def test_every_variable_that_ranks_read_is_in_the_table() -> None:
    sources = [*(ROOT / "src").rglob("*.cc"), *(ROOT / "capi").glob("*.cc")]
    sources += [*(ROOT / "bindings" / "rust" / "tessera" / "src").glob("*.rs")]
    reads = re.compile(r'\b(?:env_text|env_number|env_flag|getenv|var_os)\(\s*"(TESSERA_\w+)"')
    read = {name for path in sources for name in reads.findall(path.read_text(encoding="utf-8"))}
    table = PAGE.split("\n## Environment")[1]
    told = set(re.findall(r"`(TESSERA_\w+)`", table))
    assert "TESSERA_TIMEOUT_MS" in read
    assert told == read - PRIVATE
