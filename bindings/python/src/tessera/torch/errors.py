"""Failures of communication as programs for PyTorch catch them, too: as `torch.distributed.DistBackendError`.

Each is a class of `tessera`, in whose place the library raises it once this is imported.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from .. import errors
from ..errors import Code

__all__ = ["Aborted", "Mismatch", "NcclError", "PeerLost", "TesseraTimeout"]


class TesseraTimeout(errors.TesseraTimeout, DistBackendError):
    """A deadline passed; the message names who was awaited."""

    code = Code.TIMEOUT


class Aborted(errors.Aborted, DistBackendError):
    """The communicator failed before; ``__cause__`` says how."""

    code = Code.ABORTED


class PeerLost(errors.PeerLost, DistBackendError):
    """A rank died; ``peer`` names it."""

    code = Code.PEER_LOST


class Mismatch(errors.Mismatch, DistBackendError):
    """The ranks, or a checkpoint and a state, disagree; the message names every difference."""

    code = Code.MISMATCH


class NcclError(errors.NcclError, DistBackendError):
    """NCCL failed; ``native`` holds its result."""

    code = Code.NCCL
