"""docs/CHECKPOINTS.md: its programs run as they stand, each going on from the one before, with other ranks and in
another language; then what the page reads is there. Each language has two, numbered here: rows, and an object of the
program's own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tessera as ts
from test_readme import PREFIX, ROOT, run

PAGE = (ROOT / "docs" / "CHECKPOINTS.md").read_text(encoding="utf-8")
BINDINGS = ROOT / "bindings"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def c(at: Path, number: int) -> list[str]:
    (at / "program.c").write_text(examples("c")[number])
    build = re.findall(r"`(cc .*? -o first)`", (ROOT / "README.md").read_text(encoding="utf-8"))[0].replace(
        "first", "program"
    )
    strict = build.replace("cc ", "cc -std=c99 -Wall -Wextra -Werror ")
    run("sh", "-c", f"{strict} -lm", cwd=at, environment={"PKG_CONFIG_PATH": str(PREFIX / "lib" / "pkgconfig")})
    return ["./program"]


def python(at: Path, number: int) -> list[str]:
    (at / "program.py").write_text(examples("python")[number])
    return [sys.executable, "program.py"]


def java(at: Path, number: int) -> list[str]:
    text = examples("java")[number]
    name = re.findall(r"^public class (\w+)", text, re.M)[0]
    (at / f"{name}.java").write_text(text)
    target = BINDINGS / "java" / "target"
    run("javac", "-Werror", "-d", at, "-cp", target / "classes", at / f"{name}.java", cwd=at)
    jars = [target / "tessera-0.1.0.jar", target / "tessera-0.1.0-natives-linux-x86_64.jar"]
    return ["java", "-cp", ":".join(map(str, [at, *jars])), name]


def rust(at: Path, number: int) -> list[str]:
    manifest = (ROOT / "examples" / "rust" / "Cargo.toml").read_text(encoding="utf-8")
    (at / "Cargo.toml").write_text(manifest.replace("../../bindings", str(BINDINGS)))
    (at / "Cargo.lock").write_text((ROOT / "examples" / "rust" / "Cargo.lock").read_text(encoding="utf-8"))
    (at / "src").mkdir()
    (at / "src" / "main.rs").write_text(examples("rust")[number])
    # What it depends on is compiled once, not once a test.
    target = {"CARGO_TARGET_DIR": str(ROOT / "build" / "readme-rust"), "RUSTFLAGS": "-D warnings"}
    run(
        *shlex.split("cargo build --quiet --offline --locked"),
        cwd=at,
        environment={**target, "TESSERA_PREFIX": str(PREFIX)},
    )
    return [str(shutil.copy(ROOT / "build" / "readme-rust" / "debug" / "digits_rs", at / "program_rs"))]


def said_by(command: list[str], ranks: int, cwd: Path) -> str:
    job = subprocess.run(
        [str(PREFIX / "bin" / "tessera"), "run", "-n", str(ranks), *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def test_each_program_goes_on_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(c, 3), (python, 2), (java, 4), (rust, 3), (c, 1), (rust, 2), (java, 1), (python, 4), (c, 2)]
    programs = {language: language(tmp_path, 0) for language in (c, python, java, rust)}
    for done, (language, ranks) in enumerate(jobs):
        output = said_by(programs[language], ranks, tmp_path)
        for rank in range(ranks):
            said = rf"rank {rank} of {ranks}: step {3 * done}, epoch {3 * done}, w {3 * done}(\.0+)?$"
            assert re.search(said, output, re.M), output
    last = 3 * len(jobs)

    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(examples("python")[2], names)
    checkpoint = names["checkpoint"]
    assert isinstance(checkpoint, ts.Checkpoint)
    assert (checkpoint.step, checkpoint.saved_values["epoch"]) == (last, last)
    with ts.Checkpoint("whole") as whole:
        assert (whole["w"] == last).all()
    exec(examples("python")[4], names)
    chosen = names["state"]
    assert isinstance(chosen, ts.State)
    assert chosen["seen"] == last
    assert (chosen["encoder"]["embedding"] == last).all()
    assert not chosen["head"].any()
    assert names["report"] == ts.LoadReport((), (), (), ("head",), verified=True)
    torch = pytest.importorskip("torch")
    exec(examples("python")[3], names)
    state = names["state"]
    assert isinstance(state, dict)
    assert torch.equal(state["w"], torch.full((1000, 64), float(last)))
    assert len(list(Path("checkpoints").glob("step-*"))) == 3


def test_an_object_of_each_language_goes_on_from_that_of_each_other(tmp_path: Path) -> None:
    # Each ordered pair of languages stands side by side once.
    jobs = [c, rust, java, rust, python, rust, c, java, python, java, c, python, c]
    assert len(set(pairwise(jobs))) == 12
    programs = {language: language(tmp_path, 1) for language in (c, python, java, rust)}
    for done, language in enumerate(jobs):
        output = said_by(programs[language], done % 2 + 1, tmp_path)
        steps = range(1, 3 * done + 1)
        best = min(steps, key=lambda step: abs(step - 10.5), default=0)
        loss = f"{abs(best - 10.5):.1f}" if best else "[Ii]nf(inity)?"
        said = re.findall(rf"step {3 * done}: lowest loss {loss} at step {best}$", output, re.M)
        assert len(said) == done % 2 + 1, output
    with ts.Checkpoint(tmp_path / "runs" / "best") as checkpoint:
        assert checkpoint.saved_values == {"best.loss": 0.5, "best.step": 10}
