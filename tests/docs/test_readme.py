"""The examples of README.md compile, and the Python one runs: each is taken from the page as it stands and given only
what the page says it leaves out. The first programs of the bindings' pages compile and run by the pages' commands."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from user_programs import JAVAC, PREFIX, ROOT, RUST_TARGET, run, rust


def example(language: str) -> str:
    """The code block of README.md in ``language``; of Python's two that of NumPy or, as "torch", the other one."""
    tag = "python" if language == "torch" else language
    blocks = re.findall(rf"^```{tag}\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == (2 if tag == "python" else 1), f"README.md has {len(blocks)} examples in {tag}"
    return str(blocks[1 if language == "torch" else 0])


def indented(code: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in code.splitlines(keepends=True))


def test_c_compiles_against_the_installed_headers(tmp_path: Path) -> None:
    source = tmp_path / "readme.c"
    source.write_text(
        "#include <stdlib.h>\n#include <tessera/tessera.h>\n"
        "#define CHECK(call) ((call) == TSR_OK ? (void)0 : exit(1))\n"
        "void forward_backward(tsr_ddp *ddp);\n"
        "void train(float *w1, float *b1);\n"
        "void train(float *w1, float *b1) {\n" + indented(example("c")) + "}\n"
    )
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run("cc", *flags, "-I", PREFIX / "include", source, cwd=tmp_path)


def test_python_runs(tmp_path: Path) -> None:
    source = tmp_path / "readme.py"
    source.write_text(
        "import numpy as np\n"
        "w1, b1 = np.ones((128, 64), np.float32), np.ones(128, np.float32)\n"
        "def forward_backward(grads):\n"
        "    for grad in grads.values(): grad[:] = 1\n" + example("python") + "print(step)\n"
    )
    assert run(sys.executable, source, cwd=tmp_path).split()[-1] == "499"
    saved = (tmp_path / "runs" / "first" / "latest").read_text(encoding="utf-8")
    assert saved.startswith("step-00000500-")


def test_java_compiles(tmp_path: Path) -> None:
    source = tmp_path / "Readme.java"
    source.write_text(
        "import dev.tessera.*;\nimport java.nio.*;\nimport java.nio.file.*;\n"
        "abstract class Readme {\n"
        "  abstract void forwardBackward(Ddp ddp);\n"
        "  void train(FloatBuffer w1, FloatBuffer b1) throws Exception {\n" + indented(example("java")) + "  }\n}\n"
    )
    classes = ROOT / "bindings" / "java" / "target" / "classes"
    run(*JAVAC, "-Werror", "-d", tmp_path, "-cp", classes, source, cwd=tmp_path)


def test_rust_compiles(tmp_path: Path) -> None:
    rust(
        tmp_path,
        "use tessera::{params, AdamW, Comm, Ddp, Result, Saver, State};\n"
        "fn forward_backward(_ddp: &mut Ddp) -> Result<()> {\n    Ok(())\n}\n"
        "fn train(w1: Vec<f32>, b1: Vec<f32>) -> Result<()> {\n" + indented(example("rust")) + "    Ok(())\n}\n"
        "fn main() -> Result<()> {\n    train(vec![0.0; 128 * 64], vec![0.0; 128])\n}\n",
    )


@pytest.mark.parametrize("language", ["c", "python", "torch", "java", "rust"])
def test_each_is_about_ten_lines(language: str) -> None:
    assert len(example(language).splitlines()) <= 14


@pytest.mark.parametrize("program", ["c/digits.c", "python/digits.py", "java/Digits.java", "rust/src/main.rs"])
def test_a_whole_program_is_read_in_one_sitting(program: str) -> None:
    assert 100 <= len((ROOT / "examples" / program).read_text(encoding="utf-8").splitlines()) <= 335


def first_program(language: str) -> tuple[str, list[str]]:
    """The first program of a binding's page, and the commands that the page shows for it."""
    page = (ROOT / "bindings" / language / "README.md").read_text(encoding="utf-8")
    begin, program, rest = re.split(rf"^```{language}\n(.*?)^```$", page, maxsplit=1, flags=re.M | re.S)
    if language == "python":
        return program, re.findall(r"`(tessera run [^`]*)`", rest)[:1]
    return program, re.findall(r"^((?:cargo|javac|tessera) .*)$", begin.split("## A first program")[1], re.M)


def in_a_clone(at: Path, *commands: str, stated: str = "") -> str:
    """Runs commands in a folder that has the clone's bindings, in a shell with `./dev env` and `stated`."""
    if not (at / "bindings").exists():
        (at / "bindings").symlink_to(ROOT / "bindings")
    return run("bash", "-ec", "\n".join([f'eval "$({ROOT}/dev env)"', stated, *commands]), cwd=at)


def test_the_first_python_program_runs_as_its_page_says(tmp_path: Path) -> None:
    program, commands = first_program("python")
    assert commands == ["tessera run -n 4 python first.py"]
    (tmp_path / "first.py").write_text(program, encoding="utf-8")
    output = in_a_clone(tmp_path, *commands)
    for rank in range(4):
        assert f"{rank} 6.0" in output


def test_the_first_java_program_runs_as_its_page_says(tmp_path: Path) -> None:
    program, commands = first_program("java")
    (tmp_path / "Sum.java").write_text(program, encoding="utf-8")
    output = in_a_clone(tmp_path, *commands)
    assert output.count(": 10.0") == 4, output
    # The README has the same commands for the class First; a plain jar of the program goes on the class path too.
    (row,) = re.findall(r"^\| Java \| (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [f"`{command}`".replace("Sum", "First") in row for command in commands] == [True, True], row
    page = (ROOT / "bindings" / "java" / "README.md").read_text(encoding="utf-8")
    (with_jar,) = re.findall(r"`(java -cp 'app\.jar:[^`]*)`", page)
    output = in_a_clone(tmp_path, "jar cf app.jar Sum.class", "rm Sum.class", with_jar)
    assert output.count(": 1.0") == 1, output


def test_the_first_rust_program_runs_as_its_page_says(tmp_path: Path) -> None:
    program, (new, *commands) = first_program("rust")
    offline = "export CARGO_NET_OFFLINE=true"
    in_a_clone(tmp_path, new, stated=offline)
    (tmp_path / "sum" / "src" / "main.rs").write_text(program, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "rust" / "Cargo.lock", tmp_path / "sum")  # versions that are here
    (tmp_path / "sum" / "target").symlink_to(RUST_TARGET)
    output = in_a_clone(tmp_path, *commands, stated=offline)
    for rank in range(4):
        assert f"rank {rank} of 4: 10" in output
