"""`Metric` for PyTorch's tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import Comm
from ..errors import Unsupported
from ..metrics import Metric as _Metric
from ..metrics import MetricKind

__all__ = ["Metric", "MetricKind"]


class Metric(_Metric):
    """`tessera.Metric` whose samples and results are tensors.

    Tensors may require gradients, which are not followed, and need not be contiguous. They are on the CPU: one on a
    device raises `Unsupported`; move it with ``.cpu()``. bfloat16 and float16 are not converted.

    Examples
    --------
    >>> auroc = tessera.torch.metrics.Metric("auroc")  # doctest: +SKIP
    >>> auroc.update(scores, labels)  # doctest: +SKIP
    >>> auroc.compute_tensor(comm)  # doctest: +SKIP
    tensor(0.7500, dtype=torch.float64)
    """

    def update(
        self,
        predictions: Any,
        targets: Any = None,
        *,
        weights: Any = None,
        valid: Any = None,
    ) -> None:
        """Add this rank's samples, as `tessera.Metric.update`."""
        super().update(_plain(predictions), _plain(targets), weights=_plain(weights), valid=_plain(valid))

    def compute_tensor(self, comm: Comm | None = None) -> torch.Tensor:
        """What `compute` returns, as a scalar tensor of float64."""
        return torch.tensor(self.compute(comm), dtype=torch.float64)

    def tensor(self, name: str) -> torch.Tensor:
        """An array of the last `compute`, as `array`, in a tensor."""
        return torch.from_numpy(self.array(name))


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type not in ("cpu", "cuda"):  # the library refuses what is on a CUDA device
        raise Unsupported(f"a tensor is on {value.device}; metrics take tensors on the CPU: move it with .cpu()")
    return value.detach().contiguous()
