"""Exceptions: classes, attributes, causes, pickling."""

import json
import pickle
import re
from enum import IntEnum
from pathlib import Path

import pytest
import tessera as ts
from tessera import _core
from tessera.errors import Code, NativeCode

BUILTINS = {
    ts.InvalidArgument: ValueError,
    ts.InvalidState: RuntimeError,
    ts.TesseraTimeout: TimeoutError,
    ts.Aborted: RuntimeError,
    ts.PeerLost: ConnectionError,
    ts.Mismatch: ValueError,
    ts.TesseraIOError: OSError,
    ts.Corrupt: ValueError,
    ts.NotFound: LookupError,
    ts.NotReady: TimeoutError,
    ts.Interrupted: InterruptedError,
    ts.CommitUnknown: RuntimeError,
    ts.NoMemory: MemoryError,
    ts.Unsupported: NotImplementedError,
    ts.VersionMismatch: RuntimeError,
    ts.PermissionDenied: PermissionError,
    ts.CudaError: RuntimeError,
    ts.NcclError: RuntimeError,
    ts.UserError: RuntimeError,
    ts.InternalError: RuntimeError,
}


def test_every_code_has_one_class_which_is_a_builtin_too():
    assert {cls.code for cls in BUILTINS} == set(Code)
    for cls, builtin in BUILTINS.items():
        assert issubclass(cls, builtin)
        assert issubclass(cls, ts.TesseraError)
        assert issubclass(cls, RuntimeError)  # which programs for PyTorch catch around collectives


def test_codes_are_named_as_the_library_names_them():
    for code in Code:
        assert _core.status_name(code) == code.name
    assert _core.status_name(999) == "UNKNOWN"


@pytest.mark.parametrize("cls", BUILTINS, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling_with_facts_and_causes(cls):
    error = cls("it failed")
    error.rank, error.peer, error.operation, error.sequence = 2, 3, "all_reduce", 412
    error.native, error.retriable = NativeCode("errno", 5), True
    error.__cause__ = ts.PeerLost("the first cause")
    error.__cause__.peer = 1
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "it failed"
    for name in ("code", "rank", "peer", "operation", "sequence", "native", "retriable"):
        assert getattr(copy, name) == getattr(error, name)
    assert isinstance(copy.__cause__, ts.PeerLost)
    assert copy.__cause__.peer == 1


def test_an_error_of_the_library_carries_its_facts(tmp_path: Path):
    with pytest.raises(ts.NotFound) as caught:
        ts.Checkpoint(tmp_path / "nowhere")
    error = caught.value
    assert error.code is Code.NOT_FOUND
    assert "nowhere" in str(error)
    assert error.rank is None
    assert error.sequence is None


def test_an_io_error_carries_errno():
    with ts.StoreServer(insecure=True) as server, pytest.raises(ts.TesseraIOError) as caught:
        ts.StoreServer(port=server.port, insecure=True)
    import errno

    assert caught.value.native == NativeCode("errno", errno.EADDRINUSE)
    assert caught.value.errno == errno.EADDRINUSE
    assert str(server_port := caught.value) and re.search(r"\d+", str(server_port))


def test_the_last_error_of_a_thread_is_not_the_next_ones():
    with pytest.raises(ts.InvalidArgument, match="log level"):
        ts.log.set_level(9)  # type: ignore[arg-type]
    ts.log.set_level("warning")


@pytest.mark.parametrize("kind", [ts.DType, Code, ts.Phase, ts.log.Level])
def test_enumerations_print_as_a_program_writes_them(kind: type[IntEnum]):
    for one in kind:
        written = f"{kind.__name__}.{one.name}"
        assert (str(one), f"{one}", f"{one:>30}", repr(one)) == (written, written, written.rjust(30), written)
        assert one == int(one) and kind(int(one)) is one and json.dumps(one) == str(int(one))
