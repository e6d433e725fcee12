"""An n-dimensional named arrangement of ranks, each dimension a communicator."""

from __future__ import annotations

from collections.abc import Mapping

from . import _core
from ._base import Closable, checked
from .comm import Comm

__all__ = ["Mesh"]


class Mesh(Closable):
    """The ranks of `comm`, row-major in the given order. Collective.

    Parameters
    ----------
    comm : Comm
        All its ranks take part.
    sizes : mapping of str to int
        Names and sizes of the dimensions, slowest first; the product is the world size.

    Raises
    ------
    InvalidArgument
        The sizes do not multiply to the world size, or a name occurs twice.

    Examples
    --------
    >>> mesh = ts.Mesh(comm, {"dp": 2, "tp": 4})  # doctest: +SKIP
    >>> mesh["tp"].all_reduce(x)  # doctest: +SKIP
    """

    _handle: _core.Mesh
    _warns = True

    def __init__(self, comm: Comm, sizes: Mapping[str, int]) -> None:
        handle = checked(comm, Comm, "comm", sizes)._handle
        if not isinstance(sizes, Mapping):
            raise TypeError(f"sizes is a {type(sizes).__name__}; a dict such as {{'dp': 2, 'tp': 4}} is wanted")
        self._names = tuple(sizes)
        self._comms: dict[str, Comm] = {}
        self._handle = _core.mesh_create(handle, list(sizes), list(sizes.values()))
        comm._own(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions, slowest first."""
        return self._names

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return _core.mesh_ndim(self._handle)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each dimension."""
        return {name: self.size(name) for name in self._names}

    def size(self, name: str) -> int:
        """The size of dimension `name`; `NotFound` if there is none."""
        return _core.mesh_dim(self._handle, name)[0]

    def coordinate(self, name: str) -> int:
        """This rank's coordinate in dimension `name`."""
        return _core.mesh_dim(self._handle, name)[1]

    def __getitem__(self, name: str) -> Comm:
        """The communicator of the ranks that differ from this one in dimension `name` alone.

        It belongs to the mesh and is closed with it.
        """
        comm = self._comms.get(name)
        if comm is None or comm.closed:
            comm = self._comms[name] = _MeshComm._adopt(_core.mesh_comm(self._handle, name))
        return comm

    def close(self) -> None:
        """Free the mesh and its communicators."""
        for comm in self._comms.values():
            comm.close()
        _core.mesh_destroy(self._handle)


class _MeshComm(Comm):
    """A communicator that its mesh owns: forgetting it leaks nothing."""

    _warns = False
