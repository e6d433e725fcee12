"""What test_torch_engine.py runs: the engine goes on from a checkpoint that DeepSpeed wrote. One process a rank.

usage: torch_engine_reads_job.py CASE_DIRECTORY DIRECTORY STAGE DTYPE

It loads the checkpoint, saves it as its own at DIRECTORY/again and compares that with CASE_DIRECTORY/expected, then
makes a step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tessera as ts
import tessera.torch.engine as deepspeed
import torch
import torch.distributed as dist
from deepspeed_models import Model, Tiny, configuration, groups
from torch_ranks import end

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


def numbers(checkpoint: ts.Checkpoint, name: str) -> torch.Tensor:
    dtype = DTYPES[checkpoint.tensors[name].dtype.name]
    return torch.frombuffer(bytearray(checkpoint[name].tobytes()), dtype=dtype).double()


def main(written: Path, directory: Path, stage: int, dtype: str) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(1)  # not that of the saved model
    model = Tiny() if "tiny" in written.name else Model()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups(model), config=configuration(stage, dtype, {})
    )
    path, client = engine.load_checkpoint(written)
    assert path == str(written / "after-2")
    nested = {"flag": True, "deep": {"n": -7}}
    history = [1, 2.5, None]
    assert client == {
        "epoch": 3, "best": 0.625, "note": "größer", "history": history, "pair": (1, "b"), "nested": nested,
    }  # fmt: skip
    facts = json.loads((written / "expected" / "facts.json").read_text("utf-8"))
    values = facts["values"]
    for key in ("global_steps", "global_samples", "skipped_steps"):
        assert getattr(engine, key) == values[f"engine.{key}"], key
    assert scheduler.last_batch_iteration == values["lr_scheduler.last_batch_iteration"]
    assert engine.get_lr() == [values[f"optim.param_groups.{i}.lr"] for i in range(len(engine.get_lr()))]
    if dtype == "fp16" and "engine.loss_scaler.cur_scale" in values:
        assert engine.loss_scale() == values["engine.loss_scaler.cur_scale"]

    engine.save_checkpoint(directory, "again")
    with (
        ts.Checkpoint(directory / "again") as own,
        ts.Checkpoint(written / "expected" / "tensors.safetensors") as theirs,
    ):
        for name in theirs:  # frozen parameters and buffers may be of another dtype, which has their values too
            assert torch.equal(numbers(own, name), numbers(theirs, name)), name
        moments = [name for name in own if name.startswith("optim.state.")]
        assert sorted(moments) == sorted(name for name in theirs if name.startswith("optim.state."))

    draw = torch.Generator().manual_seed(dist.get_rank())
    words, wanted = torch.randint(11, (4,), generator=draw), torch.randint(11, (4,), generator=draw)
    engine.backward(torch.nn.functional.cross_entropy(engine(words).float(), wanted))
    engine.step()
    assert engine.was_step_applied() and engine.global_steps == 3
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    end()
