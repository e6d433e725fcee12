"""Ranks of four languages in one job on simulated CUDA devices, through a mock of NCCL."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import user_programs
from conftest import LANGUAGES, ROOT, TESSERA
from patience import patience

SOURCES = {"c": "device.c", "python": "device.py", "java": "OnDevice.java", "rust": "device.rs"}
TESTS = ROOT / "build" / "release" / "tests"
DRIVER, NCCL = TESTS / "simulated_cuda" / "libcuda.so.1", TESTS / "mock_nccl" / "libnccl.so.2"
KERNELS = DRIVER.parent / "libtessera_cuda.so"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    built = user_programs.of_each_language(Path(__file__).parent / "devices", SOURCES, tmp_path_factory.mktemp)
    built["java"].append(str(DRIVER))
    return built


def run_job(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    places = [str(DRIVER.parent), str(NCCL.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(filter(None, places)),
        "TESSERA_SIMULATED_CUDA_DEVICES": "4",
        "TESSERA_CUDA_KERNELS": str(KERNELS),
        **variables,
    }
    whole = [str(TESSERA), "run", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=patience(120), env=environment, check=False)


def test_one_job_of_four_languages_on_four_devices(programs: dict[str, list[str]], tmp_path: Path) -> None:
    command = []
    for i, language in enumerate(LANGUAGES):
        command += ([":"] if i else []) + ["-n", "1", *programs[language]]
    done = run_job(command, CHECKPOINTS=str(tmp_path / "checkpoints"))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank, language in enumerate(LANGUAGES):
        assert f"rank {rank}: {language} is well" in done.stdout


def test_a_hook_of_ddp_reduces_on_the_stream_of_its_bucket(programs: dict[str, list[str]], tmp_path: Path) -> None:
    done = run_job(["-n", "3", *programs["python"], "hook"], CHECKPOINTS=str(tmp_path / "checkpoints"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TESSERA_SIMULATED_CUDA_VERSION": "11080"}, "supports CUDA 11.8, but 12.0 is the oldest"),
        ({"TESSERA_SIMULATED_CUDA_DEVICES": "0"}, "the NVIDIA driver finds no device"),
        ({"TESSERA_MOCK_NCCL_VERSION": "21406"}, "is version 2.14.6, but 2.18.0 is the oldest"),
        ({"TESSERA_NCCL": "/nowhere/libnccl.so.2"}, "set TESSERA_NCCL to the path of a libnccl.so.2"),
        ({"TESSERA_NCCL": str(DRIVER)}, "has no nccl"),
        ({"TESSERA_CUDA_KERNELS": "/nowhere/x.so"}, "build them with ./dev build --cuda, or set TESSERA_CUDA_KERNELS"),
        ({"TESSERA_CUDA_KERNELS": str(DRIVER)}, "has no tessera_cuda_plugin"),
    ],
    ids=["old driver", "no device", "old NCCL", "no NCCL", "not NCCL", "no kernels", "not kernels"],
)
def test_what_is_missing_is_said(
    programs: dict[str, list[str]], variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = run_job(["-n", "2", *programs["c"]], **variables, CHECKPOINTS=str(tmp_path / "checkpoints"))
    assert done.returncode != 0
    assert words in done.stderr, done.stderr
