"""Ranks for tests: threads of this process over a store of its own, or processes under `tessera run`.

Threads serve most tests, since every wait of the library releases the GIL. Nothing is left behind: stores listen on a
free port of the loopback, files lie in pytest's temporary directories, and processes are ended with their test.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tessera as ts
from patience import patience
from session import no_process_is_left, pytest_report_header
from tessera import _core

__all__ = ["no_process_is_left", "pytest_report_header"]

TOKEN = "5a" * 32
SECONDS = patience(20.0)


class Seen:
    """What this run has seen. Several pytests that share the tests (tools/pytest_progress.py) add to one file."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get("TESSERA_TEST_SHARED")
        self._file = Path(folder, f"seen-{name}") if folder else None
        self._here: set[str] = set()

    def add(self, text: str) -> None:
        if text in self._here:
            return
        self._here.add(text)
        if self._file:
            with self._file.open("ab", buffering=0) as file:  # one write a line: lines of others are not torn
                file.write(json.dumps(text).encode() + b"\n")

    def everything(self) -> set[str]:
        if not self._file or not self._file.exists():
            return self._here
        return {json.loads(line) for line in self._file.read_bytes().splitlines()}


called = Seen("called")  # the functions of tessera._core


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        return function(*args, **kwargs)

    return functools.wraps(function)(counting)


for _name, _member in list(vars(_core).items()):
    if not _name.startswith("_") and type(_member).__name__ == "cython_function_or_method":
        setattr(_core, _name, _counted(_name, _member))


messages = Seen("messages")  # of every error of the library
_init = ts.TesseraError.__init__


def _kept(self: ts.TesseraError, message: str = "") -> None:
    messages.add(message)
    _init(self, message)


setattr(ts.TesseraError, "__init__", _kept)  # noqa: B010  # mypy knows no assignment to a method


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What judges the whole run comes last."""
    items.sort(key=lambda item: item.get_closest_marker("whole_run") is not None)


class Ranks:
    """Runs a body once a rank, each in a thread, and hands back what each returned or raised."""

    def __init__(self) -> None:
        self.server = ts.StoreServer(token=TOKEN)
        self.jobs = 0

    def store(self, **options: Any) -> ts.Store:
        return ts.Store(self.server.uri, token=TOKEN, timeout=SECONDS, **options)

    def outcomes(self, size: int, body: Callable[[ts.Comm], Any], **options: Any) -> list[Any]:
        """One entry a rank: the body's result, or the exception that ended it."""
        self.jobs += 1
        options.setdefault("timeout", SECONDS)
        results: list[Any] = [None] * size
        # A job of its own each time: keys of one must not meet those of another.
        with ts.StoreServer(token=TOKEN) as server:

            def run(rank: int) -> None:
                try:
                    with (
                        ts.Store(server.uri, token=TOKEN, timeout=SECONDS) as store,
                        ts.Comm.create(store, rank, size, **options) as comm,
                    ):
                        results[rank] = body(comm)
                except BaseException as error:
                    results[rank] = error

            threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def __call__(self, size: int, body: Callable[[ts.Comm], Any], **options: Any) -> list[Any]:
        """As `outcomes`, for tests in which every rank succeeds."""
        results = self.outcomes(size, body, **options)
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank} failed") from result
        return results


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.server.close()


@pytest.fixture
def alone() -> Iterator[ts.Comm]:
    """A communicator of one rank."""
    with ts.init() as comm:
        yield comm


@pytest.fixture(autouse=True)
def no_job_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name == "TESSERA_PREFIX" or name.startswith("TESSERA_TEST_"):
            continue
        if name.startswith(("TESSERA_", "OMPI_", "PMI_", "SLURM_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)


class Program:
    """A Python program of a test's own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.path), *arguments]

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=patience(60), check=False, **options
        )

    def launch(self, size: int, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run the program as a job of `size` processes."""
        command = [launcher(), "run", "-n", str(size), *flags, *self.command(*arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)


def launcher() -> str:
    prefix = os.environ.get("TESSERA_PREFIX")
    found = shutil.which("tessera", path=f"{prefix}/bin:{os.environ['PATH']}" if prefix else None)
    assert found, "the tessera command is not on the PATH: build it with ./dev build"
    return found


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Program]:
    def write(text: str) -> Program:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        return Program(path)

    return write
