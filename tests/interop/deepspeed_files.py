"""Makes tests/interop/deepspeed/files.tar.gz: checkpoints that real DeepSpeed wrote, and what a reader finds in them.

usage: deepspeed_files.py [-h] [--into DIRECTORY] [CASE ...]

For each case a directory CASE with DeepSpeed's files and two of ours:

  expected/tensors.safetensors  full parameters, buffers and moments, from DeepSpeed's own accessors (safe_get_full_*)
                                of the running engine; the parameters of ZeRO were compared with the model's own, and
                                with those of zero_to_fp32.py where that script reads the files
  expected/facts.json           {"step", "world_size", "values": {NAME: typed JSON}}

Names are the ones under which Tessera reads them. Needs deepspeed 0.19.8, a PyTorch for CPUs and safetensors:

  python3 -m venv /tmp/deepspeed && /tmp/deepspeed/bin/pip install torch safetensors setuptools wheel packaging
  DS_BUILD_OPS=0 /tmp/deepspeed/bin/pip install --no-build-isolation deepspeed==0.19.8
  /tmp/deepspeed/bin/python tests/interop/deepspeed_files.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tarfile
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import deepspeed
import torch
import torch.multiprocessing
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_models import Model, Tiny, configuration, groups
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
STEPS = 2
CLIENT = {"epoch": 3, "best": 0.625, "note": "größer", "history": [1, 2.5, None], "pair": (1, "b")}
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "dynamic")
CLIENT["nested"] = {"flag": True, "deep": {"n": -7}}

# name: ranks, stage, dtype, more configuration
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "stage0-fp32-2": (2, 0, "fp32", {}),
    "stage0-bf16-1": (1, 0, "bf16", {}),
    "stage1-fp32-3": (3, 1, "fp32", {}),
    # BF16_Optimizer: files with the prefix bf16_, masters with their padding.
    "stage1-bf16-2": (2, 1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage2-fp32-2": (2, 2, "fp32", {"zero_optimization": {"round_robin_gradients": True}}),
    "stage2-bf16-3": (3, 2, "bf16", {"zero_optimization": {"parameter_alignment": True}}),
    "stage2-fp16-2": (2, 2, "fp16", {}),
    # Partitions that are only padding.
    "stage2-tiny-3": (3, 2, "fp32", {"tiny": True}),
    "stage3-fp32-2": (2, 3, "fp32", {"zero_optimization": {"sub_group_size": 60}}),
    "stage3-bf16-3": (3, 3, "bf16", {}),
    "stage3-fp32-1": (1, 3, "fp32", {}),
}


def names_of(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def stage0_state(engine: Any, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The master and the moments of a parameter that no ZeRO has cut."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups"):
        for low, full in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for one, master in zip(low, full, strict=True):
                if one is parameter:
                    return master.detach(), optimizer.optimizer.state[master]
    return parameter.detach(), optimizer.state[parameter]


def link_again(optimizer: Any) -> None:
    """Lets the accessors find everything. DeepSpeed links the moments of all groups after the step of the first one,
    when the others have none yet; and it links parameters in their own order, where round_robin_gradients had
    another one."""
    if hasattr(optimizer, "round_robin_bit16_groups"):
        optimizer.bit16_groups = optimizer.round_robin_bit16_groups
        optimizer._link_all_hp_params()
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def full_parts(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """Called by all ranks. DeepSpeed's accessors gather what is cut."""
    model = engine.module
    found: dict[str, torch.Tensor] = {}
    if stage in (1, 2):
        link_again(engine.optimizer)
    for parameter, name in names_of(model).items():
        state: dict[str, torch.Tensor] = {}
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                master = parameter.detach().clone()
        elif stage == 0:
            master, state = stage0_state(engine, parameter)
        else:
            master = safe_get_full_fp32_param(parameter)
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                assert torch.equal(master.to(parameter.dtype), parameter.detach()), name
            state = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.tensor(float(STEPS))
        found[f"model.{name}"] = master
        found |= {f"optim.state.{name}.{key}": value for key, value in state.items()}
    for name, buffer in model.named_buffers():
        if name != "scratch":
            found[f"model.{name}"] = buffer
    if hasattr(model, "head"):
        found["model.head.weight"] = found["model.embed.weight"]
    return {name: part.detach().cpu().clone().contiguous() for name, part in found.items()}


def check_with_their_script(engine: Any, directory: Path, found: dict[str, torch.Tensor], stage: int) -> None:
    # The script refuses the files of BF16_Optimizer.
    if stage == 0 or isinstance(engine.optimizer, BF16_Optimizer):
        return
    for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(directory)).items():
        assert torch.equal(tensor.float(), found[f"model.{name}"].float()), name


def loss_scale_values(engine: Any) -> dict[str, Any]:
    optimizer = engine.optimizer
    state = vars(optimizer.loss_scaler) if hasattr(optimizer, "loss_scaler") else optimizer.state_dict()
    return {f"engine.loss_scaler.{key}": state[key] for key in LOSS_SCALE if state.get(key) is not None}


def run(rank: int, ranks: int, port: int, name: str, directory: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _, stage, dtype, more = CASES[name]
    if dtype == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    torch.manual_seed(5)
    model = Tiny() if more.get("tiny") else Model()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups(model), config=configuration(stage, dtype, more)
    )
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        words, wanted = torch.randint(11, (4,), generator=draw), torch.randint(11, (4,), generator=draw)
        loss = torch.nn.functional.cross_entropy(engine(words).float(), wanted)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(directory), tag=f"after-{STEPS}", client_state=CLIENT)
    found = full_parts(engine, stage)
    if rank == 0:
        check_with_their_script(engine, directory, found, stage)
        (directory / "expected").mkdir()
        save_file(found, directory / "expected" / "tensors.safetensors")
        (directory / "expected" / "facts.json").write_text(
            json.dumps(expected(engine, scheduler, ranks), indent=1, ensure_ascii=False), "utf-8"
        )
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (directory / script).unlink(missing_ok=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def expected(engine: Any, scheduler: Any, ranks: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in ("global_steps", "global_samples", "skipped_steps"):
        values[f"engine.{key}"] = getattr(engine, key)
    values["engine.ds_version"] = deepspeed.__version__
    values |= {f"lr_scheduler.{key}": value for key, value in scheduler.state_dict().items()}
    for i, group in enumerate(engine.optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key in ("lr", "betas", "eps", "weight_decay")}
        values |= {f"optim.param_groups.{i}.{key}": value for key, value in settings.items()}
    client = {key: value for key, value in CLIENT.items() if key != "nested"}
    values |= {f"client_state.{key}": value for key, value in client.items()}
    values |= {"client_state.nested.flag": True, "client_state.nested.deep.n": -7}
    values |= loss_scale_values(engine)
    return {"step": engine.global_steps, "world_size": ranks, "values": {k: typed(v) for k, v in values.items()}}


def typed(value: Any) -> Any:
    """Typed JSON (docs/FORMAT.md)."""
    if isinstance(value, tuple):
        return {"~": "tuple", "v": [typed(one) for one in value]}
    return value


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def nameless(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs between machines and runs."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=HERE / "deepspeed")
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.cases:
            directory = Path(scratch) / name
            directory.mkdir()
            ranks = CASES[name][0]
            torch.multiprocessing.spawn(run, (ranks, free_port(), name, directory), nprocs=ranks)
        with tarfile.open(arguments.into / "files.tar.gz", "w:gz", compresslevel=9) as archive:
            for name in arguments.cases:
                archive.add(Path(scratch) / name, name, filter=nameless)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
