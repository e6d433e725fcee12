"""The library's version is compared at import: one of another ABI is refused, with both versions and its path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tessera
from patience import patience
from tessera import _core

REPOSITORY = Path(__file__).parents[3]
SONAME = "libtessera.so.0.1"


def stub(folder: Path, names: list[str]) -> Path:
    """Builds a library of ABI 999 that exports just `names`."""
    source = folder / "stub.c"
    lines = ["#include <dlfcn.h>"]
    for name in names:
        if name == "tsr_abi_version":
            lines.append("unsigned tsr_abi_version(void) { return 999; }")
        elif name == "tsr_version":
            lines.append('const char *tsr_version(void) { return "9.9.9"; }')
        elif name == "tsr_library_path":
            lines.append(
                "const char *tsr_library_path(void) { static Dl_info i; return dladdr((void *)tsr_library_path, &i) ? "
                'i.dli_fname : ""; }'
            )
        else:
            lines.append(f"int {name}(void) {{ return 20; }}")
    source.write_text("#define _GNU_SOURCE\n" + "\n".join(lines))
    library = folder / SONAME
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", library, source], check=True
    )
    return library


def import_with(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", "import tessera"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(60), check=False)


def test_the_package_runs_with_its_own_library():
    assert _core.abi_version() == _core.ABI_VERSION
    assert tessera.__version__ == _core.version()
    assert Path(_core.library_path()).name.startswith("libtessera.so")


def test_a_library_of_another_abi_is_refused(tmp_path: Path):
    symbols = (REPOSITORY / "capi/abi/symbols.txt").read_text().split()
    library = stub(tmp_path, symbols)
    result = import_with(tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert "ABI 999" in last
    assert f"ABI {_core.ABI_VERSION}," in last
    assert str(library) in last


def test_a_library_without_some_functions_is_refused_in_the_same_words(tmp_path: Path):
    library = stub(tmp_path, ["tsr_abi_version", "tsr_version", "tsr_library_path"])
    result = import_with(tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert "ABI 999" in last
    assert str(library) in last


@pytest.mark.parametrize("name", ["Comm", "DDP", "State"])
def test_handles_cannot_be_made_up(name: str):
    with pytest.raises(TypeError):
        getattr(_core, name)()


def test_a_handle_of_another_type_or_none_is_a_type_error():
    with tessera.init() as comm:
        sampler = tessera.Sampler(comm, 5)
        for wrong in (None, sampler._handle, 7, object()):
            with pytest.raises(TypeError):
                _core.comm_barrier(wrong, False)  # type: ignore[arg-type]
        for wrong in (None, sampler, "root"):
            with pytest.raises(TypeError, match=r"tessera\.Comm"):
                tessera.DDP(wrong, {})  # type: ignore[arg-type]
