"""Tessera: the distributed-training runtime as one C library, for Python.

    import tessera as ts

    with ts.init() as comm:
        ddp = ts.DDP(comm, {"weight": weight, "bias": bias})
        opt = ts.AdamW(ddp, lr=1e-3)
        data = ts.Sampler(comm, length=1500, seed=7)
        saver = ts.Saver(comm, "runs/model", keep_latest=3)
        state = ts.State(model=ddp, optim=opt, data=data)
        for step in range(saver.resume(state), 500):
            loss = forward_backward(data.batch(32), ddp.grads)
            ddp.ready_all(); ddp.wait(); opt.step()
            if step % 50 == 49:
                saver.save_async(step + 1, state)

The ranks of a job may be written in C, Python, Java or Rust, and all read and write the same checkpoints. Every failure
is a `TesseraError`. Blocking calls release the GIL, have a deadline, and return on Ctrl-C.
"""

from . import (
    _abi,  # checks the library before anything uses it
    engine,
    errors,
    launch,
    log,
    random,
    storage,
)
from .checkpoint import Cast, Checkpoint, LoadReport, Phase, Saver, TensorInfo
from .collectives import ReduceOp
from .comm import Comm, init
from .data import Sampler
from .ddp import DDP
from .engine import Engine
from .errors import *  # noqa: F403
from .fsdp import FSDP, Deferred
from .grad_scaler import GradScaler
from .launch import preempt_requested, record
from .layout import Box, Layout, Replicate, Shard
from .lr_schedule import LRSchedule
from .mesh import Mesh
from .metrics import Metric
from .optim import SGD, Adam, AdamW, Optimizer
from .pipeline import Pipeline, PipelineStats, StageCall
from .plan import Plan
from .state import MetricPart, PerRank, Sharded, State, Stateful
from .storage import Storage
from .store import Store, StoreServer
from .tensor import DType
from .tp import TensorParallel
from .turn import Turn
from .work import Save, Work

__version__ = _abi.VERSION

launch.watch_uncaught(joining=False)  # a program may fail before it joins

__all__ = [
    "DDP",
    "FSDP",
    "SGD",
    "Adam",
    "AdamW",
    "Box",
    "Cast",
    "Checkpoint",
    "Comm",
    "DType",
    "Deferred",
    "Engine",
    "GradScaler",
    "LRSchedule",
    "Layout",
    "LoadReport",
    "Mesh",
    "Metric",
    "MetricPart",
    "Optimizer",
    "PerRank",
    "Phase",
    "Pipeline",
    "PipelineStats",
    "Plan",
    "ReduceOp",
    "Replicate",
    "Sampler",
    "Save",
    "Saver",
    "Shard",
    "Sharded",
    "StageCall",
    "State",
    "Stateful",
    "Storage",
    "Store",
    "StoreServer",
    "TensorInfo",
    "TensorParallel",
    "Turn",
    "Work",
    "engine",
    "init",
    "log",
    "preempt_requested",
    "random",
    "record",
    "storage",
    *errors.__all__,
]
