"""What is generated from the headers is up to date, and the generator that says so notices a gap."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, root / "tools/gen", "--check"], capture_output=True, text=True, check=False)


def test_every_generated_file_is_up_to_date_and_every_binding_has_every_function():
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_gaps_and_stale_files_are_noticed(tmp_path: Path):
    for part in ("tools/gen", "capi/include", "capi/abi", "bindings", "docs/PARITY.md"):
        source, target = ROOT / part, tmp_path / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copy(source, target)
        else:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("target", "__pycache__", ".*"), symlinks=True)
    assert check(tmp_path).returncode == 0

    def without(file: str, word: str) -> str:
        path = tmp_path / file
        text = path.read_text()
        assert word in text
        path.write_text(text.replace(word, "gone"))
        result = check(tmp_path)
        path.write_text(text)
        assert result.returncode == 1
        return result.stderr

    core = "bindings/python/native/comm.pxi"
    assert "Python: tsr_comm_send is not called" in without(core, "tsr_comm_send(")
    assert "Java: tsr_buffer_data is not called" in without(
        "bindings/java/src/main/native/memory.cc", "tsr_buffer_data"
    )
    assert "Rust: tsr_comm_abort is not called" in without("bindings/rust/tessera/src/comm/mod.rs", "tsr_comm_abort")
    assert "docs/PARITY.md is not up to date" in without("docs/PARITY.md", "tsr_comm_send")
    # An option that the header has no more.
    stale = without("capi/include/tessera/ddp.h", "static_graph")
    for file in (
        "libtessera.pxd",
        "options.pxi",
        "_options.py",
        "DdpOptionsFields.java",
        "generated.rs",
        "settings.rs",
    ):
        assert f"{file} is not up to date: run ./dev gen" in stale
