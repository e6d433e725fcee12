"""The log: levels, callbacks, Python's logging."""

import gc
import logging
import threading
import weakref

import pytest
import tessera as ts


@pytest.fixture(autouse=True)
def restored():
    yield
    ts.log.set_callback(None)
    ts.log.set_level("warning")


def refuse() -> None:
    """Makes a server's own thread log a line: a rank of another epoch comes by."""
    token = "11" * 32
    with ts.StoreServer(token=token, epoch=1) as server, pytest.raises(ts.TesseraError):
        ts.Store(server.uri, token=token, epoch=2, timeout=5)


def test_lines_reach_the_callback_from_a_thread_of_the_library():
    lines, threads = [], set()

    def receive(level: ts.log.Level, line: str) -> None:
        threads.add(threading.get_ident())
        lines.append((level, line))

    ts.log.set_level("debug")
    ts.log.set_callback(receive)
    refuse()
    assert all(isinstance(level, ts.log.Level) and line for level, line in lines)
    assert lines
    assert threading.get_ident() not in threads


def test_lines_reach_the_logging_module(caplog: pytest.LogCaptureFixture):
    ts.log.set_level("debug")
    ts.log.to_logging("tessera.test")
    with caplog.at_level(logging.DEBUG, "tessera.test"):
        refuse()
    assert caplog.records


def test_lines_below_the_level_are_dropped():
    lines = []
    ts.log.set_level("off")
    ts.log.set_callback(lambda _level, line: lines.append(line))
    refuse()
    assert lines == []


def test_a_replaced_callback_is_released():
    def receive(level: ts.log.Level, line: str) -> None: ...

    gone = weakref.ref(receive)
    ts.log.set_callback(receive)
    del receive
    gc.collect()
    assert gone() is not None
    ts.log.set_callback(None)
    gc.collect()
    assert gone() is None


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ts.InvalidArgument, match="verbose"):
        ts.log.set_level("verbose")
