"""The check of the pages finds what it is there for, and nothing in the pages as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from check_docs import known_commands, unknown_commands  # noqa: E402


def test_the_pages_are_sound() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_docs.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_are_read_from_the_sources() -> None:
    known = known_commands()
    assert {"setup", "test", "docs", "help"} <= known["./dev"]
    assert {"run", "env", "ckpt"} <= known["tessera"]
    assert {"ls", "info", "tree", "verify"} <= known["tessera ckpt"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Call `./dev frobnicate` first.", "./dev frobnicate"),
        ("```\n./dev lint && ./dev tset\n```", "./dev tset"),
        ('    eval "$(./dev evn)"', "./dev evn"),
        ("```\n$ tessera rnu -n 4 a\n```", "tessera rnu"),
        ("`tessera ckpt ls|trea PATH`", "tessera ckpt trea"),
    ],
)
def test_a_command_that_is_not_there_is_found(text: str, missing: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text + "\n")
    (fault,) = unknown_commands(page)
    assert fault.endswith(f"there is no {missing}")


def test_what_only_looks_like_a_command_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`tessera = { path }`, `tessera COMMAND`, `tessera-sys`, `./dev COMMAND`, ./dev nothing in prose\n")
    assert unknown_commands(page) == []
