"""The log: levels, callbacks, Python's logging."""

import logging

import pytest
import tessera as ts


@pytest.fixture(autouse=True)
def restored():
    yield
    ts.log.set_callback(None)
    ts.log.set_level("warning")


def refused_client() -> None:
    """Makes the server log a line: a client without the right token."""
    with ts.StoreServer(token="11" * 32) as server, pytest.raises(ts.PermissionDenied):
        ts.Store(server.uri, token="22" * 32, timeout=5)


def test_lines_reach_the_callback_from_a_thread_of_the_library():
    lines = []
    ts.log.set_level("debug")
    ts.log.set_callback(lambda level, line: lines.append((level, line)))
    refused_client()
    assert lines
    assert all(isinstance(level, ts.log.Level) and line for level, line in lines)


def test_lines_reach_the_logging_module(caplog: pytest.LogCaptureFixture):
    ts.log.set_level("debug")
    ts.log.to_logging("tessera.test")
    with caplog.at_level(logging.DEBUG, "tessera.test"):
        refused_client()
    assert caplog.records


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ts.InvalidArgument, match="verbose"):
        ts.log.set_level("verbose")
