"""The key-value store through which the ranks of a job find each other. Most programs only use it through `init`."""

from __future__ import annotations

from . import _core
from ._base import Closable, Timeout, milliseconds

__all__ = ["Store", "StoreServer"]


class StoreServer(Closable):
    """A store's TCP server, which listens only on the given address and serves from its own thread until closed.

    Parameters
    ----------
    host : str
        Numeric address or name to listen on.
    port : int
        0 selects a free port; see `port`.
    timeout : float or timedelta, default 60
        Seconds. Has no effect on a server, which takes the same options as a client.
    insecure : bool, default False
        Use no job token and no handshake. ``TESSERA_INSECURE=1`` in the environment makes True the default.
    token : str, optional
        The job token, 64 hexadecimal digits; by default from ``TESSERA_TOKEN_FD``, ``TESSERA_TOKEN_FILE`` or
        ``TESSERA_TOKEN``, else, on loopback, from a file with mode 0600 in the user's runtime directory.
    job_id : str, default ""
        Part of the handshake: clients of another job are refused. ``TESSERA_JOB_ID`` overrides the default.
    epoch : int, default 0
        Likewise. ``TESSERA_EPOCH`` overrides the default.

    Raises
    ------
    TesseraIOError
        The address is in use.
    PermissionDenied
        There is no token.
    """

    _handle: _core.StoreServer
    _warns = True

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout: Timeout = None,
        insecure: bool | None = None,
        token: str | None = None,
        job_id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        self._handle = _core.store_serve(
            host,
            port,
            timeout_ms=milliseconds(timeout),
            insecure=insecure,
            token=token,
            job_id=job_id,
            epoch=epoch,
        )
        self._host = host

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return _core.store_server_port(self._handle)

    @property
    def uri(self) -> str:
        """The URI with which a `Store` connects to this server."""
        return f"tcp://[{self._host}]:{self.port}" if ":" in self._host else f"tcp://{self._host}:{self.port}"

    def close(self) -> None:
        """Stop the server. Connected clients get errors."""
        _core.store_server_destroy(self._handle)


class Store(Closable):
    """A client of a store. May be used from many threads at once.

    Parameters
    ----------
    uri : str
        ``"tcp://host:port"``, or ``"file:///directory"`` on a shared file system.
    timeout : float or timedelta, default 60
        Seconds for the connection and, by default, for each call.
    insecure, token, job_id, epoch
        As for `StoreServer`.

    Raises
    ------
    TesseraTimeout
        The server does not answer.
    PermissionDenied
        The token was refused.
    """

    _handle: _core.Store
    _warns = True

    def __init__(
        self,
        uri: str,
        *,
        timeout: Timeout = None,
        insecure: bool | None = None,
        token: str | None = None,
        job_id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        self._handle = _core.store_open(
            uri, timeout_ms=milliseconds(timeout), insecure=insecure, token=token, job_id=job_id, epoch=epoch
        )
        self._uri = uri

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key.

        Parameters
        ----------
        key : str
            At most 1 KiB.
        value : bytes or str
            At most 8 MiB; a str is stored as UTF-8.
        """
        _core.store_set(self._handle, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Read the current value of a key.

        Raises
        ------
        NotFound
            The key does not exist.
        """
        return _core.store_get(self._handle, key)

    def wait(self, key: str, timeout: Timeout = None) -> None:
        """Wait until a key exists.

        Raises
        ------
        TesseraTimeout
            The key did not appear within `timeout` seconds (by default the store's).
        """
        _core.store_wait(self._handle, key, milliseconds(timeout))

    def add(self, key: str, delta: int) -> int:
        """Add to the integer at a key (0 if absent) atomically.

        Returns
        -------
        int
            The new value.
        """
        return _core.store_add(self._handle, key, delta)

    def compare_set(self, key: str, expected: bytes | str | None, desired: bytes | str) -> bool:
        """Set a key atomically if it holds `expected`; None means if it is absent.

        Returns
        -------
        bool
            Whether the key was set.
        """
        return _core.store_compare_set(
            self._handle, key, None if expected is None else _bytes(expected), _bytes(desired)
        )

    def delete(self, key: str) -> bool:
        """Delete a key.

        Returns
        -------
        bool
            Whether the key existed.
        """
        return _core.store_delete(self._handle, key)

    def close(self) -> None:
        """Disconnect. Keys stay."""
        _core.store_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<tessera.Store {self._uri}{' (closed)' if self.closed else ''}>"


def _bytes(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"the value is a {type(value).__name__}; it must be bytes or str")
    return bytes(value)
