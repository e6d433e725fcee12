"""Trains the same models by DeepSpeed's engine or Tessera's, and writes what happened in each step.

usage: deepspeed_steps.py deepspeed|tessera DIRECTORY

One process a rank, in torchrun's environment. Rank r writes DIRECTORY/r.json: for each case a list of steps, each with
this rank's loss, the norm, the loss scale and the learning rate. deepspeed_steps.json beside this file has what
DeepSpeed 0.19.8 wrote on 2 ranks, by tests/clusters/test_deepspeed.py; test_torch_engine.py compares Tessera's engine
with it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, MICRO, ACCUMULATION = 6, 4, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OVERFLOWS = (1, 2, 4)  # steps of fp16 in which the loss of rank 0 is infinite
CASES = [f"{dtype} stage {stage}" for dtype in DTYPES for stage in range(4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layers(x))


def configuration(dtype: str, stage: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 10},
        },
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if dtype == "fp16":
        # At stage 0 DeepSpeed's scale has no hysteresis.
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2 if stage else 1}
        config["fp16"] |= {"loss_scale_window": 2}
    elif dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(MICRO, 6, generator=draw), torch.randn(MICRO, 3, generator=draw)


def scale_of(engine: Any, dtype: str) -> float:
    if dtype != "fp16":
        return 1.0
    own = getattr(engine, "loss_scale", None)
    optimizer = engine.optimizer
    return float(getattr(optimizer, "cur_scale", None) or getattr(optimizer, "loss_scale", None) or own())


def steps_of(library: Any, case: str, rank: int) -> list[dict[str, Any]]:
    dtype, stage = case.split(" stage ")
    torch.manual_seed(11)
    model = Net()
    engine, *_ = library.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(dtype, int(stage))
    )
    found = []
    for step in range(STEPS):
        losses = []
        for micro in range(ACCUMULATION):
            inputs, wanted = batch(step, micro, rank)
            loss = nn.functional.mse_loss(engine(inputs.to(DTYPES[dtype])).float(), wanted)
            losses.append(loss.item())
            if dtype == "fp16" and step in OVERFLOWS and rank == 0:
                loss = loss * math.inf
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        lr = engine.get_lr()[0]
        told = {"loss": sum(losses) / ACCUMULATION, "scale": scale_of(engine, dtype), "lr": lr}
        told |= {"skipped": engine.skipped_steps, "steps": engine.global_steps}
        told["norm"] = None if norm is None else float(norm)  # DeepSpeed tells none in float32 at stage 0
        if engine.skipped_steps > (found[-1]["skipped"] if found else 0):
            told["norm"] = -1.0  # of a step that was skipped: DeepSpeed's optimizers say different things
        found.append(told)
    return found


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    library: Any
    if name == "deepspeed":
        import deepspeed as library
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: list(DTYPES.values())
        library.init_distributed(dist_backend="gloo", verbose=False)
    else:
        import tessera.torch.engine as library

        library.init_distributed()
    found = {case: steps_of(library, case, rank) for case in CASES}
    (directory / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails if one rank's records differ by more than the dtype's rounding."""
    assert found.keys() == expected.keys()
    for case, steps in expected.items():
        rtol = {"fp32": 2e-5, "bf16": 0.03, "fp16": 0.01}[case.split()[0]]
        for number, (own, theirs) in enumerate(zip(found[case], steps, strict=True)):
            where = f"{case}, step {number}: {own}, DeepSpeed {theirs}"
            for key in ("scale", "skipped", "steps"):
                assert own[key] == theirs[key], where
            assert math.isclose(own["lr"], theirs["lr"], rel_tol=1e-12), where
            for key in ("loss",) if theirs["norm"] is None else ("loss", "norm"):
                assert math.isclose(own[key], theirs[key], rel_tol=rtol, abs_tol=rtol / 10), where


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
