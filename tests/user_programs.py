"""Programs of users in the four languages, built as the README tells them to; each builder returns the command that
runs its program."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from patience import patience

__all__ = ["JAVAC", "JVM", "PREFIX", "ROOT", "c", "java", "python", "run", "rust"]

ROOT = Path(__file__).resolve().parents[1]
# Half the processor time of a short program: no compiler for hot code, no threads for garbage.
JVM = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
JAVAC = ["javac", *(f"-J{option}" for option in JVM)]
PREFIX = ROOT / "build" / "prefix"
BINDINGS = ROOT / "bindings"


def run(*command: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=patience(240),
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def c(at: Path, source: str) -> list[str]:
    (at / "program.c").write_text(source, encoding="utf-8")
    build = re.findall(r"`(cc .*? -o first)`", (ROOT / "README.md").read_text(encoding="utf-8"))[0].replace(
        "first", "program"
    )
    strict = build.replace("cc ", "cc -std=c99 -Wall -Wextra -Werror ")
    run("sh", "-c", f"{strict} -lm", cwd=at, environment={"PKG_CONFIG_PATH": str(PREFIX / "lib" / "pkgconfig")})
    return [str(at / "program")]


def python(at: Path, source: str) -> list[str]:
    (at / "program.py").write_text(source, encoding="utf-8")
    return [sys.executable, str(at / "program.py")]


def java(at: Path, source: str) -> list[str]:
    name = re.findall(r"^public (?:final )?class (\w+)", source, re.M)[0]
    (at / f"{name}.java").write_text(source, encoding="utf-8")
    target = BINDINGS / "java" / "target"
    options = ["-encoding", "UTF-8", "-Werror", "-d", at, "-cp", target / "classes"]
    run(*JAVAC, *options, at / f"{name}.java", cwd=at)
    jars = [target / "tessera-0.1.0.jar", target / "tessera-0.1.0-natives-linux-x86_64.jar"]
    return ["java", *JVM, "-cp", ":".join(map(str, [at, *jars])), name]


def rust(at: Path, source: str) -> list[str]:
    """As a package of the example's name and dependencies, so that its Cargo.lock holds and nothing is downloaded."""
    of_example = ROOT / "examples" / "rust"
    manifest = (of_example / "Cargo.toml").read_text(encoding="utf-8")
    assert "../../bindings" in manifest
    (at / "Cargo.toml").write_text(manifest.replace("../../bindings", str(BINDINGS)))
    shutil.copy(of_example / "Cargo.lock", at)
    (at / "src").mkdir()
    (at / "src" / "main.rs").write_text(source, encoding="utf-8")
    # What it depends on is compiled once, not once a test.
    target = {"CARGO_TARGET_DIR": str(ROOT / "build" / "readme-rust"), "RUSTFLAGS": "-D warnings"}
    run(
        *shlex.split("cargo build --quiet --offline --locked"),
        cwd=at,
        environment={**target, "TESSERA_PREFIX": str(PREFIX)},
    )
    return [str(shutil.copy(ROOT / "build" / "readme-rust" / "debug" / "digits_rs", at / "program_rs"))]
