"""docs/CHECKPOINTS.md: its programs run as they stand, each going on from the one before, with other ranks and in
another language; then what the page reads is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tessera as ts
from test_readme import PREFIX, ROOT, run

PAGE = (ROOT / "docs" / "CHECKPOINTS.md").read_text(encoding="utf-8")
BINDINGS = ROOT / "bindings"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def c(at: Path) -> list[str]:
    (at / "rows.c").write_text(examples("c")[0])
    build = re.findall(r"`(cc .*? -o first)`", (ROOT / "README.md").read_text(encoding="utf-8"))[0].replace(
        "first", "rows"
    )
    strict = build.replace("cc ", "cc -std=c99 -Wall -Wextra -Werror ")
    run("sh", "-c", strict, cwd=at, environment={"PKG_CONFIG_PATH": str(PREFIX / "lib" / "pkgconfig")})
    return ["./rows"]


def python(at: Path) -> list[str]:
    (at / "rows.py").write_text(examples("python")[0])
    return [sys.executable, "rows.py"]


def java(at: Path) -> list[str]:
    (at / "Rows.java").write_text(examples("java")[0])
    target = BINDINGS / "java" / "target"
    run("javac", "-Werror", "-d", at, "-cp", target / "classes", at / "Rows.java", cwd=at)
    jars = [target / "tessera-0.1.0.jar", target / "tessera-0.1.0-natives-linux-x86_64.jar"]
    return ["java", "-cp", ":".join(map(str, [at, *jars])), "Rows"]


def rust(at: Path) -> list[str]:
    manifest = (ROOT / "examples" / "rust" / "Cargo.toml").read_text(encoding="utf-8")
    (at / "Cargo.toml").write_text(manifest.replace("../../bindings", str(BINDINGS)))
    (at / "Cargo.lock").write_text((ROOT / "examples" / "rust" / "Cargo.lock").read_text(encoding="utf-8"))
    (at / "src").mkdir()
    (at / "src" / "main.rs").write_text(examples("rust")[0])
    # What it depends on is compiled once, not once a test.
    target = {"CARGO_TARGET_DIR": str(ROOT / "build" / "readme-rust"), "RUSTFLAGS": "-D warnings"}
    run(
        *shlex.split("cargo build --quiet --offline --locked"),
        cwd=at,
        environment={**target, "TESSERA_PREFIX": str(PREFIX)},
    )
    return [str(ROOT / "build" / "readme-rust" / "debug" / "digits_rs")]


def test_each_program_goes_on_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(c, 3), (python, 2), (java, 4), (rust, 3), (c, 1), (rust, 2), (java, 1), (python, 4), (c, 2)]
    programs = {language: language(tmp_path) for language in (c, python, java, rust)}
    for done, (language, ranks) in enumerate(jobs):
        command = [str(PREFIX / "bin" / "tessera"), "run", "-n", str(ranks), *programs[language]]
        job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ})
        assert job.returncode == 0, job.stdout + job.stderr
        for rank in range(ranks):
            said = rf"rank {rank} of {ranks}: step {3 * done}, epoch {3 * done}, w {3 * done}(\.0+)?$"
            assert re.search(said, job.stdout, re.M), job.stdout
    last = 3 * len(jobs)

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(examples("python")[1], names)
    checkpoint = names["checkpoint"]
    assert isinstance(checkpoint, ts.Checkpoint)
    assert (checkpoint.step, checkpoint.saved_values["epoch"]) == (last, last)
    with ts.Checkpoint("whole") as whole:
        assert (whole["w"] == last).all()
    torch = pytest.importorskip("torch")
    exec(examples("python")[2], names)
    state = names["state"]
    assert isinstance(state, dict)
    assert torch.equal(state["w"], torch.full((1000, 64), float(last)))
    assert len(list(Path("checkpoints").glob("step-*"))) == 3
