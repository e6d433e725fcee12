"""A named n-dimensional arrangement of ranks with a communicator for each dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

from . import _core
from ._base import Closable, checked
from .comm import Comm

__all__ = ["Mesh"]


class Mesh(Closable):
    """Arranges the ranks of `comm` in a mesh, row-major in the given order. Collective.

    Parameters
    ----------
    comm : Comm
        All its ranks must call.
    sizes : mapping of str to int
        Names and sizes of the dimensions, slowest first; the product must be the world size.

    Raises
    ------
    InvalidArgument
        The product of the sizes is not the world size, or a name occurs twice.

    Examples
    --------
    >>> mesh = ts.Mesh(comm, {"dp": 2, "tp": 4})  # doctest: +SKIP
    >>> mesh["tp"].all_reduce(x)  # doctest: +SKIP
    """

    _handle: _core.Mesh
    _warns = True

    def __init__(self, comm: Comm, sizes: Mapping[str, int]) -> None:
        handle = checked(comm, Comm, "comm", sizes)._handle
        self._begin(_core.mesh_create(handle, sizes), tuple(sizes), comm)

    def _begin(self, handle: _core.Mesh, names: tuple[str, ...], ranks: Comm, whole: Mesh | None = None) -> Mesh:
        self._handle = handle
        self._names = names
        self._ranks = ranks
        self._whole = whole  # whose communicators this one's are
        self._comms: dict[str, Comm] = {}
        ranks._own(self)
        return self

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
        """The size of dimension `name`. Raises `NotFound` if it does not exist."""
        return _core.mesh_dim(self._handle, name)[0]

    def coordinate(self, name: str) -> int:
        """This rank's coordinate in dimension `name`."""
        return _core.mesh_dim(self._handle, name)[1]

    @overload
    def __getitem__(self, name: str) -> Comm: ...
    @overload
    def __getitem__(self, name: tuple[str, ...]) -> Mesh: ...
    def __getitem__(self, name: str | tuple[str, ...]) -> Comm | Mesh:
        """The communicator of a dimension, or the mesh of several: ``mesh["dp"]``, ``mesh["dp", "cp"]``.

        The communicator consists of the ranks that differ from this one only in dimension `name`. It belongs to the
        mesh and is closed with it. A slice names dimensions in the mesh's order and shares its communicators.

        Raises
        ------
        NotFound
            The dimension does not exist.
        InvalidArgument
            The dimensions are in another order than the mesh's.
        """
        if isinstance(name, tuple):
            part = _core.mesh_slice(self._handle, list(name))
            return Mesh.__new__(_Slice)._begin(part, name, self._ranks, self._whole or self)
        if self._whole is not None:
            _core.mesh_dim(self._handle, name)
            return self._whole[name]
        comm = self._comms.get(name)
        if comm is None or comm.closed:
            comm = self._comms[name] = _MeshComm._adopt(_core.mesh_comm(self._handle, name))
        return comm

    def flatten(self, name: str | None = None) -> Mesh:
        """A one-dimensional mesh of all dimensions of this one. Collective.

        All ranks of the communicator that the mesh was made from must call, even for a slice. The new dimension has its
        own communicator.

        Parameters
        ----------
        name : str, optional
            Name of the new dimension; by default the names of the flattened ones, joined by ``"_"``.

        Raises
        ------
        Mismatch
            The ranks flatten different dimensions.

        Examples
        --------
        >>> data = mesh["dp", "cp"].flatten()  # doctest: +SKIP
        >>> data["dp_cp"].all_reduce(x)  # doctest: +SKIP
        """
        flat = _core.mesh_flatten(self._handle, self._ranks._handle, name)
        return Mesh.__new__(Mesh)._begin(flat, ("_".join(self._names) if name is None else name,), self._ranks)

    def close(self) -> None:
        """Free the mesh and its communicators. Closing a slice leaves the communicators of its mesh open."""
        for comm in self._comms.values():
            comm.close()
        _core.mesh_destroy(self._handle)


class _Slice(Mesh):
    """A mesh with the communicators of another: not closing it leaks nothing."""

    _warns = False


class _MeshComm(Comm):
    """A communicator that its mesh owns: not closing it leaks nothing."""

    _warns = False
