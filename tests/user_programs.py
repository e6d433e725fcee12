"""Programs of users in the four languages, built as the README tells them to; each builder returns the command that
runs its program."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from patience import patience

__all__ = [
    "AS_IN_THE_BINDING",
    "JAVAC",
    "JVM",
    "PREFIX",
    "ROOT",
    "c",
    "cargo",
    "java",
    "of_each_language",
    "python",
    "run",
    "rust",
]

ROOT = Path(__file__).resolve().parents[1]
PREFIX = ROOT / "build" / "prefix"
BINDINGS = ROOT / "bindings"

# Halves the CPU time of a short program: no compiler for hot code, no threads of the garbage collector.
JVM = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
JAVAC = ["javac", *(f"-J{option}" for option in JVM)]

# Holds the compiled binding and its dependencies, for packages with the same profile.
RUST_TARGET = BINDINGS / "rust" / "target"
AS_IN_THE_BINDING = '\n[profile.dev]\ndebug = 1\n\n[lints.rust]\nwarnings = "deny"\n'


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
    (at / "Cargo.toml").write_text(manifest.replace("../../bindings", str(BINDINGS)) + AS_IN_THE_BINDING)
    shutil.copy(of_example / "Cargo.lock", at)
    (at / "src").mkdir()
    (at / "src" / "main.rs").write_text(source, encoding="utf-8")
    with (RUST_TARGET / ".programs.lock").open("w") as lock:  # all programs have one name
        fcntl.flock(lock, fcntl.LOCK_EX)
        cargo("build", "--locked", at=at)
        return [str(shutil.copy(RUST_TARGET / "debug" / "digits_rs", at / "program_rs"))]


def of_each_language(
    folder: Path, sources: Mapping[str, str], new_directory: Callable[[str], Path]
) -> dict[str, list[str]]:
    """The command of each language in `sources`, whose program is a file of `folder`."""
    builders = {"c": c, "python": python, "java": java, "rust": rust}
    return {
        language: builders[language](new_directory(language), (folder / name).read_text(encoding="utf-8"))
        for language, name in sources.items()
    }


def cargo(command: str, *options: str, at: Path) -> str:
    environment = {"CARGO_TARGET_DIR": str(RUST_TARGET), "TESSERA_PREFIX": str(PREFIX)}
    environment["LD_LIBRARY_PATH"] = str(PREFIX / "lib")
    return run("cargo", command, "--quiet", "--offline", *options, cwd=at, environment=environment)
