"""Hooks of every pytest session, imported by each conftest.py: it prints its seed and leaves no process behind."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import resource_tracker

import fork_server
import pytest
import sampling

__all__ = ["no_process_is_left", "pytest_report_header"]


def pytest_report_header() -> str:
    return sampling.told()


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Not even when pytest is killed: the server survives it."""
    server = fork_server.server()
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # else it ends with this process
    server.close()
