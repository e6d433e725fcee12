"""`tessera.torch.metrics` takes and returns PyTorch's tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import tessera as ts
import torch
from tessera.torch.metrics import Metric


def test_tensors_are_taken_as_they_are() -> None:
    scores = torch.tensor([[0.1, 9], [0.4, 9], [0.35, 9], [0.8, 9]], requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1])
    metric = Metric("roc_curve")
    metric.update(scores[:, 0], labels, weights=torch.ones(4), valid=labels >= 0)
    assert torch.isnan(metric.compute_tensor())
    assert torch.equal(metric.tensor("tpr"), torch.tensor([0, 0.5, 0.5, 1, 1], dtype=torch.float64))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for label in (torch.bool, torch.uint8, torch.int32):
            auroc = Metric("auroc")
            auroc.update(scores[:, 0].to(dtype), labels.to(label))
            assert auroc.compute_tensor() == 0.75
            assert auroc.compute_tensor().dtype == torch.float64


def test_bad_input_is_refused() -> None:
    metric = Metric("auroc")
    with pytest.raises(ts.InvalidArgument, match=r"predictions\[1\] is nan"):
        metric.update(torch.tensor([0, torch.nan]), torch.tensor([0, 1]))
    with pytest.raises(ts.InvalidArgument, match="targets are f32"):
        metric.update(torch.ones(2), torch.ones(2))
    with pytest.raises(ts.Unsupported, match="a tensor is on meta"):
        metric.update(torch.ones(2, device="meta"), torch.ones(2, dtype=torch.int64))
