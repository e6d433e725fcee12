"""DeepSpeed's engine over Tessera, under DeepSpeed's names.

    import tessera.torch.engine as deepspeed  # was: import deepspeed

    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=params, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints", client_state={"epoch": epoch})

Ranks train on the CPU. The configuration is read by the core, as for every language. docs/TORCH.md lists what differs
from DeepSpeed.
"""

from . import comm, pipe, utils, zero
from . import schedules as lr_schedules
from .comm import init_distributed
from .initialize import add_config_arguments, initialize
from .loader import DeepSpeedDataLoader, RepeatingLoader
from .optimizers import Lamb, Lion
from .pipe import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec
from .runtime import DeepSpeedEngine
from .schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

deepspeed_initialize = initialize
"""A name that a document gives `initialize` by mistake."""

__all__ = [
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "LRRangeTest",
    "Lamb",
    "LayerSpec",
    "Lion",
    "OneCycle",
    "PipelineEngine",
    "PipelineModule",
    "RepeatingLoader",
    "TiedLayerSpec",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "comm",
    "deepspeed_initialize",
    "init_distributed",
    "initialize",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
]
