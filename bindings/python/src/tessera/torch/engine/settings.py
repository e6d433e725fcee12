"""What a ds_config says to an engine of PyTorch. The core reads the configuration; this names what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Settings"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Part = tuple[str, dict[str, Any]]
"""The type and the parameters of an optimizer or a scheduler, as they are written."""


@dataclass(frozen=True)
class Settings:
    """A resolved configuration. The batch sizes are those at the beginning."""

    train_batch: int
    micro_batch: int
    accumulation: int
    every_step_is_boundary: bool
    optimizer: Part | None
    scheduler: Part | None
    scheduler_is_deepspeeds: bool
    stage: int
    secondary_ranks: int  # that keep parameters from forward to backward among themselves; 1: none do
    fills_missing: bool  # gradients that the loss does not reach are zero
    computes_norm: bool
    clipping: float  # 0: off
    dtype: torch.dtype | None  # in which the module computes; None: that of its parameters
    casts_inputs: bool
    skips_overflow: bool
    loss_scale: Mapping[str, Any]  # options of `tessera.engine.LossScale`
    grad_dtype: torch.dtype | None
    op: str
    prescales: bool
    predivide: float
    steps_per_print: int
    breaks_down_time: bool
    dumps_state: bool
    drops_last: bool
    tag_validation: str
    resolved: Mapping[str, Any]

    @classmethod
    def of(cls, resolved: Mapping[str, Any]) -> Settings:
        """The settings in what `tessera.engine.resolve_config` returned."""
        zero, fp16 = resolved["zero_optimization"], resolved["fp16"]
        is_fp16 = resolved["precision"] == "fp16"
        scheduler = resolved["scheduler"]
        return cls(
            train_batch=resolved["train_batch_size"],
            micro_batch=resolved["train_micro_batch_size_per_gpu"],
            accumulation=resolved["gradient_accumulation_steps"],
            every_step_is_boundary=not resolved["managed_gradient_accumulation"],
            optimizer=_part(resolved["optimizer"]),
            scheduler=_part(scheduler),
            scheduler_is_deepspeeds=scheduler is not None and scheduler["core"],
            stage=zero["stage"],
            secondary_ranks=zero["zero_hpz_partition_size"],
            fills_missing=zero["ignore_unused_parameters"],
            computes_norm=zero["compute_grad_norm"],
            clipping=resolved["gradient_clipping"],
            dtype=_DTYPES.get(resolved["precision"]),
            casts_inputs=is_fp16 and fp16["auto_cast"],
            skips_overflow=resolved["skips_overflow"],
            loss_scale={
                "fixed": fp16["loss_scale"],
                "initial": fp16["initial_scale"],
                "window": fp16["loss_scale_window"],
                "hysteresis": fp16["hysteresis"],
                "restores_every_step": fp16["consecutive_hysteresis"],
                "minimum": fp16["min_loss_scale"],
            }
            if is_fp16
            else {"fixed": 1.0},
            grad_dtype=_DTYPES.get(resolved["communication_data_type"]),
            op="sum" if resolved["gradient_allreduce_op"] == "sum" else "avg",
            prescales=resolved["prescale_gradients"],
            predivide=resolved["gradient_predivide_factor"],
            steps_per_print=resolved["steps_per_print"],
            breaks_down_time=resolved["wall_clock_breakdown"],
            dumps_state=resolved["dump_state"],
            drops_last=resolved["dataloader_drop_last"],
            tag_validation=resolved["checkpoint"]["tag_validation"],
            resolved=resolved,
        )

    def pre_divide(self, ranks: int) -> float:
        """What each rank divides its gradients by before they are summed."""
        return float(ranks) if self.prescales else self.predivide


def _part(part: Mapping[str, Any] | None) -> Part | None:
    return None if part is None else (part["type"], dict(part["params"]))
