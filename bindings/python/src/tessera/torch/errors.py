"""Communication errors that are also `torch.distributed.DistBackendError`, as PyTorch programs expect.

Once this module is imported, the library raises them instead of the `tessera` classes that they derive from.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from .. import errors
from ..errors import Code

__all__ = ["Aborted", "Mismatch", "NcclError", "PeerLost", "TesseraTimeout"]


class TesseraTimeout(errors.TesseraTimeout, DistBackendError):
    """A deadline passed; the message names the ranks that were waited for."""

    code = Code.TIMEOUT


class Aborted(errors.Aborted, DistBackendError):
    """The communicator failed earlier; ``__cause__`` is the reason."""

    code = Code.ABORTED


class PeerLost(errors.PeerLost, DistBackendError):
    """A rank died; ``peer`` names it."""

    code = Code.PEER_LOST


class Mismatch(errors.Mismatch, DistBackendError):
    """The ranks, or a checkpoint and a state, differ; the message names every difference."""

    code = Code.MISMATCH


class NcclError(errors.NcclError, DistBackendError):
    """NCCL failed; ``native`` holds its result."""

    code = Code.NCCL
