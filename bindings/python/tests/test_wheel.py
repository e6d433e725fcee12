"""The wheel holds all of Tessera: an environment of its own needs no prefix and no LD_LIBRARY_PATH."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
from patience import patience

PROJECT = Path(__file__).parents[1]
REPOSITORY = PROJECT.parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-input", "--quiet"]
    built = REPOSITORY / "build/python"  # that of ./dev build, where there is one: nothing is compiled again
    settings = [f"--config-settings=build-dir={built}"] if built.is_dir() else []
    result = subprocess.run(
        [*command, *settings, f"--wheel-dir={folder}", str(PROJECT)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and NumPy."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-input", "--quiet", wheel],
        check=True,
        capture_output=True,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    numpy = Path(np.__file__).parent
    for part in (numpy, numpy.with_name("numpy.libs")):
        if part.exists():
            (packages / part.name).symlink_to(part)
    return folder


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    dropped = ("LD_LIBRARY_PATH", "PYTHONPATH", "TESSERA_PREFIX", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
        cwd=cwd,
        env=clean,
    )


def test_the_wheel_holds_library_command_and_types_and_no_sources(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("tessera/libtessera.so.0.1", "tessera/py.typed", "tessera/_core.pyi", "tessera/_core.abi3.so"):
        assert wanted in names
    assert "tessera/torch/checkpoint/__init__.py" in names
    assert any(name.endswith(".data/scripts/tessera") for name in names), names
    assert [name for name in names if name.endswith((".pyx", ".pxd", ".pxi", ".h"))] == []


def test_a_job_runs_from_the_environment_alone(environment: Path, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, tessera as ts\n"
        "with ts.init(timeout=60) as comm:\n"
        "    x = np.ones(3)\n"
        "    comm.all_reduce(x)\n"
        "    print(ts.__file__, x[0])\n"
    )
    result = run(environment / "bin/tessera", "run", "-n", "2", environment / "bin/python", program, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f"{environment}/") == 2
    assert result.stdout.count(" 2.0") == 2


def test_what_needs_pytorch_says_so_where_there_is_none(environment: Path, tmp_path: Path):
    result = run(environment / "bin/python", "-c", "import tessera.torch", cwd=tmp_path)
    assert result.returncode == 1
    assert "tessera.torch requires PyTorch, which is not installed" in result.stderr


def test_the_module_is_the_command(environment: Path, tmp_path: Path):
    python = environment / "bin/python"
    by_name = run(environment / "bin/tessera", "--version", cwd=tmp_path)
    by_module = run(python, "-m", "tessera", "--version", cwd=tmp_path)
    assert (by_module.returncode, by_module.stdout) == (by_name.returncode, by_name.stdout)
    assert "0.1" in by_module.stdout
    failed = run(python, "-m", "tessera", "run", "-n", "1", python, "-c", "import sys; sys.exit(7)", cwd=tmp_path)
    assert "exit code 7" in failed.stderr + failed.stdout


def test_without_the_command_the_module_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch):
    from tessera import __main__

    monkeypatch.setattr(__main__, "files", lambda _name: [])
    with pytest.raises(SystemExit, match=r"TESSERA_PREFIX"):
        __main__.main()


def test_the_command_was_installed_beside_this_interpreter():
    from tessera.__main__ import installed_command

    assert installed_command() == Path(sysconfig.get_path("scripts")).resolve() / "tessera"
