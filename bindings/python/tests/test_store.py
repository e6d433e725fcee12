"""The key-value store."""

import threading
import time

import pytest
import tessera as ts
from patience import patience

TOKEN = "5a" * 32


@pytest.fixture(params=["tcp", "file"])
def store(request, tmp_path):
    if request.param == "file":
        with ts.Store(f"file://{tmp_path}", token=TOKEN, timeout=patience(10)) as made:
            yield made
    else:
        with ts.StoreServer(token=TOKEN) as server, ts.Store(server.uri, token=TOKEN, timeout=patience(10)) as made:
            yield made


def test_a_value_comes_back(store: ts.Store):
    store.set("a", b"\0binary\xff")
    store.set("b", "text")
    assert store.get("a") == b"\0binary\xff"
    assert store.get("b") == b"text"
    store.set("empty", b"")
    assert store.get("empty") == b""


def test_a_value_longer_than_the_first_buffer_comes_back_whole(store: ts.Store):
    value = bytes(range(256)) * 1000
    store.set("long", value)
    assert store.get("long") == value


def test_a_missing_key_is_not_found(store: ts.Store):
    with pytest.raises(ts.NotFound, match="nothing"):
        store.get("nothing")
    assert store.delete("nothing") is False


def test_add_counts(store: ts.Store):
    assert store.add("n", 5) == 5
    assert store.add("n", -2) == 3
    assert store.get("n") == b"3"


def test_compare_set_is_atomic(store: ts.Store):
    assert store.compare_set("k", None, b"one") is True
    assert store.compare_set("k", None, b"two") is False
    assert store.compare_set("k", b"one", "two") is True
    assert store.get("k") == b"two"
    assert store.delete("k") is True


def test_wait_returns_when_the_key_appears(store: ts.Store):
    setter = threading.Timer(0.05, store.set, ("late", b"x"))
    setter.start()
    store.wait("late")
    setter.join()
    assert store.get("late") == b"x"


def test_wait_names_the_key_when_it_times_out(store: ts.Store):
    begin = time.monotonic()
    with pytest.raises(ts.TesseraTimeout, match="never"):
        store.wait("never", timeout=0.2)
    assert time.monotonic() - begin < patience(5)


def test_a_wrong_token_is_refused_and_so_is_none():
    with ts.StoreServer(token=TOKEN) as server:
        with pytest.raises(ts.PermissionDenied):
            ts.Store(server.uri, token="00" * 32, timeout=5)
        with pytest.raises(ts.TesseraError):
            ts.Store(server.uri, insecure=True, timeout=1)
    with pytest.raises(ts.PermissionDenied, match=r"no job token .* TESSERA_TOKEN_FILE"):
        ts.Store("tcp://192.0.2.1:1", timeout=5)


def test_a_bad_address_is_refused():
    with pytest.raises(ts.InvalidArgument):
        ts.Store("ftp://somewhere", token=TOKEN)
    with pytest.raises(ts.InvalidArgument, match="zero character"):
        ts.Store("tcp://a\0b:1", token=TOKEN)


def test_nobody_answers():
    with ts.StoreServer(token=TOKEN) as server:
        uri = server.uri
    with pytest.raises(ts.TesseraError):
        ts.Store(uri, token=TOKEN, timeout=0.5)


def test_a_closed_store_refuses():
    with ts.StoreServer(token=TOKEN) as server:
        store = ts.Store(server.uri, token=TOKEN)
        store.close()
        store.close()
        with pytest.raises(ts.InvalidState, match="closed"):
            store.get("a")
    with pytest.raises(ts.InvalidState, match="closed"):
        _ = server.port
