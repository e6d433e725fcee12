"""Every session prints its seed and has a server that starts programs and leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import fork_server
import pytest
import sampling


def pytest_report_header() -> str:
    return sampling.told()


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Not even when pytest is killed: the server survives it."""
    server = fork_server.server()
    yield
    server.close()
