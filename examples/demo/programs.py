"""Where ``./dev build`` leaves the `tessera` command and the digits trainer of each language."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESSERA = ROOT / "build" / "prefix" / "bin" / "tessera"
LANGUAGES = ["c", "python", "java", "rust"]
FRAMEWORKS = ["djl", "candle"]  # left by ``./dev test --frameworks``


def digits(language: str, arguments: list[str]) -> list[str]:
    """The command line of the digits trainer in ``language``, or with that framework; arguments: examples/README.md."""
    command = {
        "c": [str(ROOT / "build" / "release" / "digits_c")],
        "python": [sys.executable, str(ROOT / "examples" / "python" / "digits.py")],
        "java": ["java", "-jar", str(ROOT / "examples" / "java" / "target" / "digits.jar")],
        "rust": [str(ROOT / "examples" / "rust" / "target" / "release" / "digits_rs")],
        "djl": ["java", "-jar", str(ROOT / "examples" / "java-djl" / "target" / "digits-djl.jar")],
        "candle": [str(ROOT / "examples" / "rust-candle" / "target" / "debug" / "digits_candle")],
    }[language]
    return command + arguments
