"""What we declare of the CUDA driver and of NCCL is what their headers declare, which come with PyTorch's wheels."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def wheels() -> Path:
    """Where NVIDIA's libraries lie, without importing anything of PyTorch."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[1] / "nvidia"


def stand_ins(place: Path) -> Path:
    """The runtime's headers that nccl.h includes need the compiler's own; it uses one name of them."""
    place.mkdir()
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (place / name).touch()
    (place / "cuda_runtime.h").write_text("typedef struct CUstream_st *cudaStream_t;\n", encoding="utf-8")
    return place


def compiler_errors(source: Path, places: list[Path]) -> str:
    includes = [f"-I{place}" for place in (ROOT / "src", *places)]
    command = ["g++", "-std=c++20", "-fsyntax-only", *includes, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    if not (wheels() / "cu13").exists():
        pytest.skip("this PyTorch has no CUDA")
    places = [stand_ins(tmp_path / "stand_ins"), wheels() / "cu13" / "include", wheels() / "nccl" / "include"]
    source = HERE / "cuda_headers.cc"
    assert compiler_errors(source, places) == ""
    # One that differs is noticed.
    text = source.read_text(encoding="utf-8").replace("TSR_IS(Op::prod, ncclProd)", "TSR_IS(Op::prod, ncclMax)")
    (wrong := tmp_path / "wrong.cc").write_text(text, encoding="utf-8")
    assert "ncclMax" in compiler_errors(wrong, places)
