"""Metrics over the samples of all ranks, equal to scikit-learn's on the gathered samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np
import numpy.typing as npt

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from .comm import Comm
from .errors import InvalidArgument
from .tensor import ArrayLike, DType, tensor

if TYPE_CHECKING:
    from ._options import MetricOptions

__all__ = ["Metric", "MetricKind"]

MetricKind = Literal[
    "mean",
    "sum",
    "mean_absolute_error",
    "mean_squared_error",
    "root_mean_squared_error",
    "r2_score",
    "accuracy",
    "top_k_accuracy",
    "balanced_accuracy",
    "confusion_matrix",
    "precision",
    "recall",
    "f_beta",
    "roc_curve",
    "precision_recall_curve",
    "average_precision",
    "auroc",
    "log_loss",
    "perplexity",
    "binned_roc_curve",
    "binned_precision_recall_curve",
    "binned_average_precision",
    "binned_auroc",
]
_OTHER_NAMES = {
    "auc": "auroc",
    "roc_auc": "auroc",
    "roc_auc_score": "auroc",
    "cross_entropy": "log_loss",
    "f1": "f_beta",
    "f1_score": "f_beta",
    "r2": "r2_score",
}


@takes(_options.METRIC)
class Metric(Closable):
    """A metric of the samples of all ranks: exact, with the same bits on all ranks and for every number of ranks.

    `update` adds this rank's samples and communicates nothing; `compute` is collective. docs/METRICS.md lists the
    kinds, what each takes, and the options and arrays that it has. A `State` saves a metric with its samples as a
    `MetricPart`.

    Parameters
    ----------
    kind : str
        "auroc", "mean", ...
    <options>

    Raises
    ------
    InvalidArgument
        There is no such kind, or it does not have an option, or not this value.

    Examples
    --------
    >>> auroc = ts.Metric("auroc")
    >>> auroc.update(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    >>> auroc.compute()
    0.75
    """

    _handle: _core.Metric

    def __init__(self, kind: MetricKind, **options: Unpack[MetricOptions]) -> None:
        if kind not in _core.METRIC_KINDS:
            close = _OTHER_NAMES.get(str(kind).lower())
            known = there_are(kind, _core.METRIC_KINDS) if close is None else f"the closest: {close}"
            raise InvalidArgument(f"there is no metric {kind!r}; {known}")
        if "average" in options and options["average"] is None:
            raise InvalidArgument(
                "average is None; pass 'none' for the values of each class, as scikit-learn's average=None returns them"
            )
        self._handle = _core.metric_create(_core.METRIC_KINDS[kind], **raw(_options.METRIC, options))
        self._kind = kind

    @property
    def kind(self) -> str:
        """The kind that it was created with."""
        return self._kind

    def update(
        self,
        predictions: ArrayLike | Sequence[Any],
        targets: ArrayLike | Sequence[Any] | None = None,
        *,
        weights: ArrayLike | Sequence[Any] | None = None,
        valid: ArrayLike | Sequence[Any] | None = None,
    ) -> None:
        """Add this rank's samples.

        Parameters
        ----------
        predictions, targets : array or list
            Of the samples, with the last dimension for classes, labels or outputs if there are several; on the CPU.
            Lists, and NumPy arrays that are not contiguous, are copied. Means and sums have no targets.
        weights : array, optional
            Of the samples, 0 or more; otherwise each counts once.
        valid : array of bool or uint8, or list of bool, 0 and 1, optional
            Of the samples: those with 0 are left out. `Sampler.valid` has it for the last batch.

        Raises
        ------
        InvalidArgument
            Shapes or types do not fit, a number is not finite, or a label is out of range; the message has its index.
            The update has added nothing. Unless one succeeds afterwards, `compute` raises this on all ranks, once;
            until then a merge or save of the metric raises `InvalidState`.
        Unsupported
            An array is on a device.
        """
        if predictions is None:
            raise TypeError("predictions is None; it must be an array or a list")
        given = {"predictions": predictions, "targets": targets, "weights": weights, "valid": valid}
        _core.metric_update(self._handle, *[_given(array, what) for what, array in given.items()])

    def compute(self, comm: Comm | None = None) -> float:
        """The metric of all samples of all ranks. Collective; ranks without samples take part. The samples stay.

        Parameters
        ----------
        comm : Comm, optional
            The ranks that have the samples, each sample once: in a mesh, those of the data-parallel dimension. None:
            this rank's samples alone.

        Returns
        -------
        float
            The metric. NaN if it is not defined, and for what has arrays instead: curves, the confusion matrix, and the
            average "none".

        Raises
        ------
        Mismatch
            The ranks compute different metrics.
        """
        return _core.metric_compute(self._handle, None if comm is None else checked(comm, Comm, "comm")._handle)

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array that the last `compute` found.

        Parameters
        ----------
        name : str
            "fpr", "tpr", "precision", "recall", "thresholds", "matrix" or "values". The arrays of curves of several
            classes have the class after their name: "fpr.0".

        Returns
        -------
        ndarray of float64 or int64
            A new array.

        Raises
        ------
        NotFound
            The metric has no such array; the message lists those that it has.
        """
        data, dtype, shape = _core.metric_result(self._handle, name)
        return np.frombuffer(data, DType(dtype).numpy).reshape(shape).copy()

    def merge(self, other: Metric) -> None:
        """Add the samples of another metric of the same kind and options, which keeps them."""
        _core.metric_merge(self._handle, checked(other, Metric, "other")._handle)

    def gather(self, comm: Comm) -> None:
        """Move the samples of all ranks to rank 0, before a save. Collective."""
        _core.metric_gather(self._handle, checked(comm, Comm, "comm")._handle)

    def reset(self) -> None:
        """Forget all samples and results."""
        _core.metric_reset(self._handle)

    def close(self) -> None:
        """Free the metric."""
        _core.metric_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<tessera.{type(self).__name__} {self._kind}{' (closed)' if self.closed else ''}>"


def _given(array: ArrayLike | Sequence[Any] | None, what: str) -> _core.Tensor | None:
    if array is None:
        return None
    if isinstance(array, (list, tuple, memoryview)):
        try:
            array = np.asarray(array)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the {what} are no array: {error}") from None
        if what == "valid" and np.isin(array, (0, 1)).all():
            array = array.astype(np.bool_)
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return tensor(cast(ArrayLike, array), writable=False)
