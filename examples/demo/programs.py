"""Where ``./dev build`` leaves the `tessera` command and the digits trainer of each language."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESSERA = ROOT / "build" / "prefix" / "bin" / "tessera"
LANGUAGES = ["c", "python", "java", "rust"]


def digits(language: str, arguments: list[str]) -> list[str]:
    """The command line of the digits trainer in ``language``; see examples/README.md for its arguments."""
    command = {
        "c": [str(ROOT / "build" / "release" / "digits_c")],
        "python": [sys.executable, str(ROOT / "examples" / "python" / "digits.py")],
        "java": ["java", "-jar", str(ROOT / "examples" / "java" / "target" / "digits.jar")],
        "rust": [str(ROOT / "examples" / "rust" / "target" / "release" / "digits_rs")],
    }[language]
    return command + arguments
