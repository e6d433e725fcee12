"""The models of deepspeed_files.py, and how they were trained. Needs no DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch


class Model(torch.nn.Module):
    """Odd sizes, a frozen layer, a tied weight, buffers (one that is not saved), a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.hidden = torch.nn.Linear(7, 5)
        self.out = torch.nn.Linear(5, 7, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.arange(11) / 8)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.out(torch.tanh(self.hidden(self.frozen(self.embed(words)))))
        return self.head(hidden * self.scale) + self.offset


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -0.25, 2.0]))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(words, 11).to(self.weight.dtype) * self.weight.sum()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """With and without weight decay, as programs split them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, rest = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    found = [{"params": decayed, "weight_decay": 0.125}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


def configuration(stage: int, dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.75, 0.875], "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 8},
        },
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    return config | {key: value for key, value in more.items() if key not in ("tiny", "zero_optimization")}
