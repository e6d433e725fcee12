"""What test_torch_pipelining.py runs: under torchrun's environment, one process a rank, on the backend "tessera".

usage: torch_pipelining_jobs.py [CHECK... | dies]

Losses, outputs and gradients are compared with those of one process, which each rank computes too, and with PyTorch's
own schedules over Gloo.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import tessera as ts
import torch
import torch.distributed as dist
import torch.distributed.fsdp as their_fsdp
import torch.nn.functional as F
from tessera.torch import DistributedDataParallel, pipelining
from tessera.torch.fsdp import fully_shard
from tessera.torch.pipelining import (
    PipelineStage,
    PipelineStageInfo,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    TensorChunkSpec,
    get_schedule_class,
    pipe_split,
    pipeline,
)
from tessera.torch.pipelining.schedules import _communicator_of, _PipelineScheduleRuntime
from tessera.torch.tensors import CORE
from torch import nn
from torch.distributed import pipelining as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch_ranks import NOTICED_S, end, patience, refused, run_checks
from torch_ranks import bits as bits_of_values

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-8, "atol": 1e-12}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}
gloo: Any

# Names, stages per rank, and whether these are in a V.
SCHEDULES = [
    ("GPipe", 1, False),
    ("1F1B", 1, False),
    ("LoopedBFS", 2, False),
    ("Interleaved1F1B", 2, False),
    ("InterleavedZeroBubble", 1, False),
    ("InterleavedZeroBubble", 2, False),
    ("ZBVZeroBubble", 2, True),
    ("DualPipeV", 2, True),
]


def layers(count: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(5, 5, dtype=dtype), nn.Tanh()) for _ in range(count)]


def batch(rows: int, dtype: torch.dtype = torch.float64, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 5, dtype=dtype), torch.randn(rows, 5, dtype=dtype)


def alone(model: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, parts: int) -> tuple[torch.Tensor, list[Any]]:
    """The outputs and losses of one process, which adds to the gradients of the model."""
    outputs, losses = [], []
    for inputs, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        output = inputs
        for layer in model:
            output = layer(output)
        loss = F.mse_loss(output, target)
        (loss / parts).backward()
        outputs.append(output.detach())
        losses.append(loss.detach())
    return torch.cat(outputs), losses


def own_stages(per_rank: int, in_v: bool, of: int = ranks, at: int = rank) -> list[int]:
    return [at, 2 * of - 1 - at] if in_v else list(range(at, per_rank * of, of))


def schedule_of(module: Any, name: str, stages: list[Any], parts: int, **options: Any) -> Any:
    kind = get_schedule_class(name) if module is pipelining else theirs.schedules.get_schedule_class(name)
    single = issubclass(kind, theirs.schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, parts, F.mse_loss, **options)


def step(schedule: Any, mine: Sequence[int], count: int, x: Any, y: Any, **more: Any) -> tuple[Any, list[Any] | None]:
    """What a program does: the batch on the first rank, the target on the last."""
    losses = [torch.tensor(-1.0)] if count - 1 in mine else None  # filled before: it must be cleared
    given = {"target": y, "losses": losses} if losses is not None else {}
    output = schedule.step(*([x] if 0 in mine else []), **given, **more)
    return output, losses


def same(got: Any, expected: Any, what: str, **tolerance: float) -> None:
    tolerance = tolerance or EXACT
    torch.testing.assert_close(got, expected, msg=lambda text: f"rank {rank}, {what}: {text}", **tolerance)


def same_gradients(got: nn.Module, expected: nn.Module, what: str, **tolerance: float) -> None:
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        same(grad, other.grad, f"{what}: {name}", **tolerance)


# ---------------------------------------------------------------- schedules


def cases() -> list[tuple[str, int, bool, int, int, torch.dtype]]:
    """Numbers of micro-batches that do and do not divide the rows."""
    return [
        (name, per_rank, in_v, parts, rows, dtype)
        for name, per_rank, in_v in SCHEDULES
        for parts in (2 * ranks, 3 * ranks)
        for rows in (2 * parts, 2 * parts + 1, 3 * parts - 1)
        for dtype in (torch.float64, torch.float32)
    ]


def schedules() -> None:
    """Every schedule: two steps whose gradients add up, then one without scaling."""
    from sampling import sample  # torch_ranks has made it known

    for name, per_rank, in_v, parts, rows, dtype in sample(cases(), 12, f"pipelining schedules, {ranks} ranks"):
        check_schedule(name, per_rank, in_v, parts, rows, dtype)


def each_schedule_once() -> None:
    for name, per_rank, in_v in SCHEDULES:
        check_schedule(name, per_rank, in_v, 2 * ranks, 4 * ranks + 1, torch.float64)


def check_schedule(name: str, per_rank: int, in_v: bool, parts: int, rows: int, dtype: torch.dtype) -> None:
    what = f"{name}, {per_rank} stages per rank, {parts} micro-batches of {rows} rows, {dtype}"
    tolerance = EXACT if dtype is torch.float64 else SINGLE
    count, mine = per_rank * ranks, own_stages(per_rank, in_v)
    model, whole = layers(count, dtype), layers(count, dtype)
    x, y = batch(rows, dtype)
    stages = [PipelineStage(model[i], i, count, CPU) for i in mine]
    schedule = schedule_of(pipelining, name, stages, parts)
    for number in range(2):
        expected, expected_losses = alone(whole, x, y, parts)
        output, losses = step(schedule, mine, count, x, y)
        for i in mine:
            same_gradients(model[i], whole[i], f"{what}, step {number}", **tolerance)
        if losses is None:
            assert output is None
        else:
            same(output, expected, what, **tolerance)
            same(losses, expected_losses, what, **tolerance)
            assert not output.requires_grad
    for i in mine:
        model[i].zero_grad()
        for param in whole[i].parameters():
            assert param.grad is not None
            param.grad.mul_(parts / 2)
    output, _ = step(
        schedule_of(pipelining, name, stages, parts, scale_grads=False), mine, count, x, y, return_outputs=False
    )
    assert output is None
    for i in mine:
        same_gradients(model[i], whole[i], f"{what}, sum", **tolerance)


def pytorchs_schedules() -> None:
    """The same program with our classes, with PyTorch's over Gloo, and with PyTorch's over "tessera", from the same
    seed: the outputs, losses and gradients are the same."""
    from sampling import sample  # torch_ranks has made it known

    chosen = SCHEDULES if ranks == 2 else sample(SCHEDULES, 2, f"PyTorch's schedules, {ranks} ranks")
    for name, per_rank, in_v in chosen:
        count, mine, parts = per_rank * ranks, own_stages(per_rank, in_v), 2 * ranks
        x, y = batch(2 * parts)
        whole = layers(count)
        alone(whole, x, y, parts)
        results = []
        for module, group in ((theirs, gloo), (theirs, None), (pipelining, gloo)):
            model = layers(count)
            stages = [module.PipelineStage(model[i], i, count, CPU, group=group) for i in mine]
            output, losses = step(schedule_of(module, name, stages, parts), mine, count, x, y)
            values = [] if losses is None else [one.detach() for one in (output, *losses)]
            results.append((values, [param.grad for i in mine for param in model[i].parameters()]))
        same(results[0], results[1], f"PyTorch's {name} over tessera and Gloo", rtol=0, atol=0)
        same(results[0], results[2], f"ours and PyTorch's {name}")
        same(results[2][1], [param.grad for i in mine for param in whole[i].parameters()], f"{name} and one process")


def orders_of_the_program() -> None:
    """Loaded orders in both formats, run by us and by PyTorch."""
    tessera = Path(sys.executable).with_name("tessera")
    x, y = batch(4 * ranks)
    for name, per_rank, in_v, peak in (("1f1b", 1, False, ranks - rank), ("zbv", 2, True, 2 * ranks)):
        count, mine = per_rank * ranks, own_stages(per_rank, in_v)
        words = [tessera, "pipeline", "show", "--schedule", name, "--ranks", ranks, "--microbatches", 2 * ranks]
        for kind, format in (("--csv", "compute_only"), ("--csv-comms", "compute_comms")):
            csv = subprocess.run([*map(str, words), kind], capture_output=True, text=True, check=True).stdout
            assert ("SEND_F" in csv) == (ranks > 1 and format == "compute_comms")
            for kind_of_schedule in (_PipelineScheduleRuntime, theirs.schedules._PipelineScheduleRuntime):
                model, whole = layers(count), layers(count)
                alone(whole, x, y, 2 * ranks)
                stages = [PipelineStage(model[i], i, count, CPU) for i in mine]
                schedule = kind_of_schedule(stages, 2 * ranks, F.mse_loss)
                with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                    file.write(csv)
                    file.flush()
                    schedule._load_csv(file.name, format)
                step(schedule, mine, count, x, y)
                for i in mine:
                    same_gradients(model[i], whole[i], f"loaded order of {name}, {format}, {kind_of_schedule}")
                if isinstance(schedule, _PipelineScheduleRuntime):
                    found = schedule.stats().peak_activations
                    assert found <= peak, (name, format, found)  # GPipe's: all micro-batches
                    refused(ts.Unsupported, "custom fun", partial(schedule.register_custom_function, None, None))


# ---------------------------------------------------------------- what stages exchange


class Several(nn.Module):
    """Takes and returns a float tensor, an integer tensor and a float tensor without a gradient."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.first, self.last = first, last
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *more: torch.Tensor, factor: torch.Tensor, power: int = 1) -> Any:
        ids, fixed = (torch.arange(len(x)), torch.ones(len(x), dtype=torch.float64)) if self.first else more
        self.seen += [x, ids]  # held for longer than the library's memory
        x = self.linear(x) * factor[:, None] ** power + 0.1 * (ids[:, None] % 3) + fixed[:, None]
        if self.last:
            return {"made": x, "ids": ids}
        return x, ids + 1, (fixed * 2).detach()


def tensors_of_all_kinds() -> None:
    """Several inputs and outputs, integers, no gradient; keywords on every stage; arguments of the loss."""
    torch.manual_seed(5)
    whole = [Several(i == 0, i == ranks - 1).double() for i in range(ranks)]
    mine = copy.deepcopy(whole[rank])
    x, y = batch(2 * ranks + 3)
    factor = torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
    parts = 2 * ranks
    expected = []
    for inputs, target, some in zip(*(one.tensor_split(parts) for one in (x, y, factor)), strict=True):
        values: Any = (inputs,)
        for module in whole[:-1]:
            values = module(*values, factor=some, power=2)
        made = whole[-1](*values, factor=some, power=2)
        (3 * F.mse_loss(made["made"], target) / parts).backward()
        expected.append(made)

    def loss_fn(output: Any, target: torch.Tensor, weight: float) -> torch.Tensor:
        return weight * F.mse_loss(output["made"], target)

    for kind in (Schedule1F1B, ScheduleInterleavedZeroBubble):
        mine.zero_grad()
        stage = PipelineStage(mine, rank, ranks, CPU)
        given: Any = stage if kind is Schedule1F1B else [stage]
        schedule = kind(given, parts, loss_fn)
        more = {"target": y, "loss_kwargs": {"weight": 3.0}} if stage.is_last else {}
        output = schedule.step(*([x] if rank == 0 else []), factor=factor, power=2, **more)
        same_gradients(mine, whole[rank], kind.__name__)
        if output is not None:
            same(output["made"], torch.cat([one["made"].detach() for one in expected]), "made")
            assert output["ids"].equal(torch.cat([one["ids"] for one in expected]))


def split_by_the_program() -> None:
    """Micro-batches of any sizes; chunk specs; mean and sum of outputs."""
    x, y = batch(9)
    sizes = [1] * (2 * ranks - 1) + [9 - 2 * ranks + 1] if ranks < 5 else []
    model, whole = layers(ranks), layers(ranks)
    total = []
    for inputs, target in zip(x.split(sizes), y.split(sizes), strict=True):
        output = inputs
        for layer in whole:
            output = layer(output)
        loss = F.mse_loss(output, target)
        total.append(loss.detach())
        (loss / len(sizes)).backward()
    schedule = Schedule1F1B(PipelineStage(model[rank], rank, ranks, CPU), len(sizes), F.mse_loss)
    losses: list[Any] = []
    schedule.step(
        arg_mbs=[(one,) for one in x.split(sizes)] if rank == 0 else None,
        target_mbs=list(y.split(sizes)) if rank == ranks - 1 else None,
        losses=losses,
    )
    same(losses, total if rank == ranks - 1 else [], "losses")
    same_gradients(model[rank], whole[rank], "split by the program")

    class Columns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    schedule = ScheduleGPipe(
        PipelineStage(Columns(), rank, ranks, CPU),
        2,
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)),
        output_merge_spec=TensorChunkSpec(1),  # type: ignore[arg-type]
    )
    output = schedule.step(*([x] if rank == 0 else []))
    assert output is None if rank < ranks - 1 else output.equal(x * 2**ranks)
    assert schedule.stats().busy_ns > 0


def narrow_types() -> None:
    """bfloat16 travels as it is."""
    x, y = batch(8, torch.bfloat16)
    model, whole = layers(ranks, torch.bfloat16), layers(ranks, torch.bfloat16)
    expected, expected_losses = alone(whole, x, y, 2 * ranks)
    stage = PipelineStage(model[rank], rank, ranks, CPU)
    output, losses = step(schedule_of(pipelining, "1F1B", [stage], 2 * ranks), [rank], ranks, x, y)
    if losses is not None:
        same([output, *losses], [expected, *expected_losses], "bfloat16")
    same_gradients(model[rank], whole[rank], "bfloat16", rtol=2e-2, atol=2e-2)


class EveryDtype(nn.Module):
    """The first stage makes tensors of every dtype and of odd shapes, the others pass them on and compare them."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        bits = torch.arange(48, dtype=torch.uint8).remainder(2)  # also as bool
        own = [bits.view(dtype) for dtype in CORE]
        own += [torch.empty(0, 3, dtype=torch.int64), torch.empty(2, 0), torch.tensor(7), torch.tensor(0.5)]
        own += [torch.arange(6.0).reshape(2, 3).t(), torch.arange(6).reshape(2, 3)[:, ::2], torch.ones(3).conj()]
        for one, other in zip(more, own, strict=bool(more)):
            assert one.dtype is other.dtype
            assert one.shape == other.shape
            assert bits_of_values(one) == bits_of_values(other), one.dtype
        return x if rank == ranks - 1 else [x, *own]


def every_dtype() -> None:
    x, y = batch(4 * ranks)
    x.requires_grad_()  # PyTorch's splitting keeps the graph
    schedule = schedule_of(pipelining, "1F1B", [PipelineStage(EveryDtype(), rank, ranks, CPU)], 2 * ranks)
    output, _ = step(schedule, [rank], ranks, x, y)
    if ranks > 1 and rank == ranks - 1:
        same(output, x.detach(), "every dtype")
    if rank == 0:
        expected = x.detach().clone().requires_grad_()
        alone([], expected, y, 2 * ranks)
        same(x.grad, expected.grad, "the gradient of the batch")


def frozen_stages() -> None:
    """Frozen weights, in the first stage (whose output has no gradient) and in the last."""
    for frozen in (0, ranks - 1):
        model, whole = layers(ranks), layers(ranks)
        for some in (model, whole):
            some[frozen].requires_grad_(False)
        x, y = batch(4 * ranks)
        alone(whole, x, y, 2 * ranks)
        for name in ("1F1B", "InterleavedZeroBubble"):
            model[rank].zero_grad()
            stage = PipelineStage(model[rank], rank, ranks, CPU)
            step(schedule_of(pipelining, name, [stage], 2 * ranks), [rank], ranks, x, y)
            same_gradients(model[rank], whole[rank], f"frozen {frozen}, {name}")


class Awkward(nn.Module):
    """What a split backward may miss or count twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one = nn.Linear(5, 5, dtype=torch.float64)
        self.two = nn.Linear(5, 5, dtype=torch.float64)
        self.bias = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
        self.other = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
        self.foreign = [torch.randn(5, dtype=torch.float64, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor
        if self.kind == "shared":
            made = self.one(torch.tanh(self.one(x)))
        elif self.kind == "same gradient":  # of both, which must not share it
            made = self.two(torch.tanh(self.one(x) + self.bias + self.other))
        elif self.kind == "deep":
            made = self.two(torch.tanh(self.one(x)) * torch.tanh(self.one.weight @ self.other[0]))
        elif self.kind == "foreign":
            made = self.one(x) * self.foreign[0]
        elif self.kind == "apart":
            made = self.one(self.other * self.bias) + x.detach()
        elif self.kind == "recomputed":
            made = checkpoint(lambda x: self.two(torch.tanh(self.one(x))), x, use_reentrant=False)
        else:
            made = torch.tanh(x)  # no weights
        return made


def split_backwards() -> None:
    """Weights that are shared, far from the inputs, or not reached from them; hooks of weights run."""
    x, y = batch(8)
    for kind in ("shared", "same gradient", "deep", "foreign", "apart", "recomputed", "none"):
        torch.manual_seed(8)
        whole = [Awkward("deep" if kind == "none" and i == 0 else kind) for i in range(ranks)]
        model = copy.deepcopy(whole)
        hooked: list[str] = []
        for name, param in model[rank].named_parameters():
            param.register_post_accumulate_grad_hook(partial(lambda hooked, name, _: hooked.append(name), hooked, name))
        stage = PipelineStage(model[rank], rank, ranks, CPU)
        schedule = schedule_of(pipelining, "InterleavedZeroBubble", [stage], 4)
        for number in range(2):
            alone(whole, x, y, 4)
            step(schedule, [rank], ranks, x, y)
            if kind == "apart":  # nothing arrives from the stage after, which sends zeros
                for param, other in zip(model[rank].parameters(), whole[rank].parameters(), strict=True):
                    if param.grad is not None and other.grad is None:
                        assert rank < ranks - 1
                        assert not param.grad.any()
                        other.grad = param.grad.clone()
            same_gradients(model[rank], whole[rank], f"{kind}, step {number}")
            same(model[rank].foreign[0].grad, whole[rank].foreign[0].grad, f"{kind}, foreign")
        used = [name for name, param in whole[rank].named_parameters() if param.grad is not None]
        assert set(hooked) == set(used)
        assert len(hooked) == 8 * len(used), kind


def contexts_and_builders() -> None:
    """`register_forward_context` and `dw_builder`."""
    x, y = batch(4 * ranks)
    parts = 2 * ranks
    model, whole = layers(ranks), layers(ranks)
    alone(whole, x, y, parts)
    seen: list[PipelineStageInfo] = []
    ran: list[str] = []

    @contextmanager
    def context(info: PipelineStageInfo) -> Any:
        seen.append(info)
        yield

    def builder() -> Callable[..., None]:
        ran.append("built")
        return lambda: ran.append("run")

    stage = PipelineStage(model[rank], rank, ranks, CPU, dw_builder=builder)
    stage.register_forward_context(context)
    step(schedule_of(pipelining, "InterleavedZeroBubble", [stage], parts), [rank], ranks, x, y)
    assert [one.microbatch_index for one in seen] == list(range(parts))
    assert ran.count("built") == ran.count("run") == parts
    same_gradients(model[rank], whole[rank], "dw_builder")


def memory_is_let_go() -> None:
    """Each activation when its backward is done, and the pipeline with its schedule."""
    made, freed, alive = list[None](), list[None](), list[int]()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(x)
            weakref.finalize(hidden, freed.append, None)
            made.append(None)
            alive.append(len(made) - len(freed))
            return torch.tanh(self.linear(hidden))

    x, y = batch(16 * ranks)
    gc.disable()
    try:
        for name in ("1F1B", "InterleavedZeroBubble"):
            stage = PipelineStage(Watched(), rank, ranks, CPU)
            schedule = schedule_of(pipelining, name, [stage], 8 * ranks)
            _, losses = step(schedule, [rank], ranks, x, y)
            assert max(alive) == schedule.stats().peak_activations <= ranks + 1, (name, alive)
            assert losses is None or not any(one.requires_grad for one in losses)
            assert len(made) == len(freed), name
            gone = weakref.ref(schedule._pipe)
            del schedule
            assert gone() is None
            for some in (made, freed, alive):
                some.clear()
            dist.barrier()
    finally:
        gc.enable()


def evaluations() -> None:
    """Before and between steps; with and without gradients and targets."""
    x, y = batch(4 * ranks + 1)
    parts = 2 * ranks
    model, whole = layers(ranks), layers(ranks)
    expected, expected_losses = alone(whole, x, y, parts)
    stage = PipelineStage(model[rank], rank, ranks, CPU)
    schedule = schedule_of(pipelining, "1F1B", [stage], parts)
    given = [x] if rank == 0 else []
    losses: list[Any] = []
    for _ in range(2):
        if stage.is_last:
            same(schedule.eval(*given, target=y, losses=losses), expected, "eval")
            same(losses, expected_losses, "eval")
        else:
            assert schedule.eval(*given, losses=losses) is None
            assert not losses
        with torch.no_grad():
            output = schedule.eval(*given)
        assert output is None if not stage.is_last else output.allclose(expected)
        assert all(param.grad is None for param in model[rank].parameters())
        with torch.no_grad():
            refused(RuntimeError, "Please call eval() instead", lambda: schedule.step(*given))
        step(schedule, [rank], ranks, x, y)
        same_gradients(model[rank], whole[rank], "after eval")
        model[rank].zero_grad()
    without = ScheduleGPipe(PipelineStage(model[rank], rank, ranks, CPU), parts)
    output = without.step(*given)
    assert output is None if not stage.is_last else output.allclose(expected)


# ---------------------------------------------------------------- traced pipes


class Traced(nn.Module):
    """A skip connection, and an output that two stages take."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x
        for i, layer in enumerate(self.layers):
            if i > 0:
                pipe_split()
            x = layer(x)
            early = x if i == 0 else early
            x = x + early if i == len(self.layers) - 1 else x
        return x


class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def traced_pipes() -> None:
    """`pipeline` with SplitPoint, and with pipe_split; a value that skips stages."""
    parts = 2 * ranks
    x, y = batch(4 * ranks)  # torch.export fixes the sizes of a micro-batch
    splits = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, ranks)}
    for kind, spec in ((Chain, splits), (Traced, None)):
        whole = kind(ranks)
        expected, expected_losses = alone([whole], x, y, parts)
        pipe = pipeline(kind(ranks), mb_args=(x[:2],), split_spec=spec)
        assert pipe.num_stages == ranks
        stage = pipe.build_stage(rank, CPU)
        output, losses = step(schedule_of(pipelining, "1F1B", [stage], parts), [rank], ranks, x, y)
        if losses is not None:
            same([output, *losses], [expected, *expected_losses], kind.__name__)
        expected_grads = {name: param.grad for name, param in whole.named_parameters()}
        for name, param in stage.submod.named_parameters():
            same(param.grad, expected_grads[name], f"{kind.__name__}: {name}")


# ---------------------------------------------------------------- data parallelism


def with_data_parallelism() -> None:
    """Two stages, each on two ranks: DDP and FSDP, Tessera's and PyTorch's."""
    if ranks != 4:
        return
    wraps: list[tuple[str, Callable[[nn.Module, Any], nn.Module]]] = [
        ("DDP", lambda module, mesh: DistributedDataParallel(module, process_group=mesh.get_group())),
        (
            "PyTorch's DDP",
            lambda module, mesh: nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group()),
        ),
        ("fully_shard", lambda module, mesh: fully_shard(module, mesh=mesh)),
        ("PyTorch's fully_shard", lambda module, mesh: their_fsdp.fully_shard(module, mesh=mesh)),
    ]
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "pp"))
    copies, at, parts = mesh["dp"].size(), mesh["dp"].get_local_rank(), 4
    for name, per_rank in (("1F1B", 1), ("InterleavedZeroBubble", 1), ("LoopedBFS", 2)):
        for kind, wrap in wraps:
            count, mine = 2 * per_rank, own_stages(per_rank, False, 2, mesh["pp"].get_local_rank())
            what = f"{kind}, {name}"
            model, whole = layers(count), layers(count)
            wrapped = {i: wrap(model[i], mesh["dp"]) for i in mine}
            stages = [PipelineStage(wrapped[i], i, count, CPU, group=mesh["pp"].get_group()) for i in mine]
            schedule = schedule_of(pipelining, name, stages, parts)
            for number in range(2):
                own = [batch(9, seed=10 * number + copy) for copy in range(copies)]
                for layer in (*whole, *wrapped.values()):
                    layer.zero_grad()
                later = number == 1 and "shard" in kind  # reduce two steps together
                for x, y in own * (2 if later else 1):
                    alone(whole, x, y, parts)
                for param in nn.ModuleList(whole).parameters():
                    assert param.grad is not None
                    param.grad /= copies
                if later:
                    step(schedule, mine, count, *own[at], finalize_gradients=False)
                step(schedule, mine, count, *own[at])
                for i in mine:
                    same_gradients(wrapped[i], whole[i], f"{what}, step {number}")


# ---------------------------------------------------------------- errors


class Fails(nn.Module):
    def __init__(self, module: nn.Module, at: int) -> None:
        super().__init__()
        self.module, self.left = module, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise LookupError("the tokens are wrong")
        made: torch.Tensor = self.module(x)
        return made


def told(error: BaseException | None) -> str:
    """All that an error says, with its causes."""
    words = ""
    while error is not None:
        words += " ".join([str(error), *getattr(error, "__notes__", [])]) + " "
        error = error.__cause__ or error.__context__
    return words


def failed(operation: Callable[[], object]) -> BaseException:
    try:
        operation()
    except Exception as error:
        return error
    raise AssertionError(f"rank {rank}: nothing was refused")


def exceptions_in_a_stage() -> None:
    """Every rank's error names the stage and the micro-batch."""
    x, y = batch(4 * ranks)
    for name, per_rank, in_v in SCHEDULES[1::3]:
        count, mine = per_rank * ranks, own_stages(per_rank, in_v)
        model = layers(count)
        model[1] = Fails(model[1], at=2)
        schedule = schedule_of(pipelining, name, [PipelineStage(model[i], i, count, CPU) for i in mine], 2 * ranks)
        error = failed(lambda: step(schedule, mine, count, x, y))  # noqa: B023
        assert isinstance(error, LookupError if 1 in mine else ts.Aborted), repr(error)
        assert "stage 1, micro-batch 2, forward" in told(error), told(error)
        assert "the tokens are wrong" in told(error)
        refused(ts.Aborted, "", lambda: step(schedule, mine, count, x, y))  # noqa: B023


class Acts(nn.Module):
    """Does something before the forward of a micro-batch, counted over all steps."""

    def __init__(self, module: nn.Module, at: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.module, self.left, self.act = module, at, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == -1:
            self.act()
        made: torch.Tensor = self.module(x)
        return made


def a_late_stage() -> None:
    """The last rank ends a forward when the others have given it up: at their deadline they name it, and its stage."""
    parts, last = 2 * ranks, ranks - 1
    x, y = batch(2 * parts)

    def given_up() -> None:
        dist.monitored_barrier(group=gloo, timeout=timedelta(seconds=patience(40)))

    module = layers(ranks)[rank]
    stage = PipelineStage(Acts(module, parts, given_up) if rank == last else module, rank, ranks, CPU)
    schedule = schedule_of(pipelining, "1F1B", [stage], parts)
    step(schedule, [rank], ranks, x, y)
    comm = _communicator_of(None)
    before, comm.timeout = comm.timeout, patience(60) if rank == last else 0.6
    assert before == patience(60), "the group's"
    error = failed(lambda: step(schedule, [rank], ranks, x, y))
    comm.timeout = before
    assert isinstance(error, (ts.TesseraTimeout, ts.Aborted)), repr(error)
    assert f"the gradient of micro-batch 0 from stage {last} on rank {last}, in vain for 0.6 s" in told(error)
    if rank < last:
        given_up()


def dies() -> NoReturn:
    """The last rank is killed in the middle of a step; the others are told where, and whom they lost."""
    parts, last = 2 * ranks, ranks - 1
    x, y = batch(2 * parts)
    module = Acts(layers(ranks)[rank], parts + 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    stage = PipelineStage(module if rank == last else module.module, rank, ranks, CPU)
    schedule = schedule_of(pipelining, "1F1B", [stage], parts)
    step(schedule, [rank], ranks, x, y)
    since = time.monotonic()
    error = failed(lambda: step(schedule, [rank], ranks, x, y))
    assert time.monotonic() - since < NOTICED_S
    assert isinstance(error, ts.PeerLost), repr(error)
    assert re.search(rf"stage \d.* micro-batch [01] .*stage {last} on rank {last}", told(error)), told(error)
    os._exit(0)  # Gloo's store has lost a rank


class Narrows(nn.Module):
    """Leaves out a column of one micro-batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        return x[:, :4] if self.left == -1 else x


def declared_tensors() -> None:
    """`input_args` and `output_args`. Fewer rows are right; everything else that differs fails on every rank, and says
    where."""
    parts, last = 2 * ranks, ranks - 1
    x, y = batch(2 * parts - 1)  # the last micro-batch has one row
    right = torch.empty(2, 5, dtype=torch.float64)
    model, whole = layers(ranks), layers(ranks)
    _, expected = alone(whole, x, y, parts)
    given: Any = {"input_args": right, "output_args": (right,)}
    stage = PipelineStage(model[rank], rank, ranks, CPU, **given)
    _, losses = step(schedule_of(pipelining, "1F1B", [stage], parts), [rank], ranks, x, y)
    same_gradients(model[rank], whole[rank], "as declared")
    if losses is not None:
        same(losses, expected, "as declared")

    def told_of(at: int, given: Any, part: int, text: str, evaluated: bool = False) -> None:
        module = Narrows(2) if part == 2 and rank == at - 1 else model[rank]
        stage = PipelineStage(module, rank, ranks, CPU, **(given if rank == at else {}))
        schedule = schedule_of(pipelining, "1F1B", [stage], parts)
        act = partial(schedule.eval, *([x] if rank == 0 else [])) if evaluated else None
        error = failed(act or partial(step, schedule, [rank], ranks, x, y))
        assert isinstance(error, ts.InvalidArgument if rank == at else ts.Aborted), repr(error)
        assert f"stage {at}, micro-batch {part}, forward" in told(error), told(error)
        assert text in told(error), told(error)

    double, single = "a tensor of torch.float64 with shape ", "a tensor of torch.float32 with shape "
    for at in (0, last):
        told_of(at, {"input_args": right[:, :4]}, 0, f"input 0 of stage {at} is {double}(2, 5), but its input_args")
        told_of(at, {"output_args": right.float()}, 0, f"its output_args declare {single}(2, 5)")
        told_of(at, {"output_args": right[:1]}, 0, f"output_args declare {double}(1, 5)", evaluated=True)
        told_of(at, {"input_args": right[0]}, 0, f"its input_args declare {double}(5,)")
        told_of(at, {"input_args": (right, right)}, 0, f"stage {at} has 1 inputs, but its input_args declare 2")
    told_of(1, {"input_args": right}, 2, f"is {double}(2, 4), but its input_args declare {double}(2, 5)")


def wrong_batches() -> None:
    """An error on one rank fails the step on every rank."""
    x, y = batch(4 * ranks)
    parts = 2 * ranks
    is_last = rank == ranks - 1

    def schedule(loss_fn: Any = F.mse_loss) -> Any:
        return Schedule1F1B(PipelineStage(layers(ranks)[rank], rank, ranks, CPU), parts, loss_fn)

    def fails(text: str, kind: type[BaseException], here: bool, act: Callable[[], object]) -> None:
        error = failed(act)
        assert isinstance(error, kind if here else ts.Aborted), repr(error)
        assert text in told(error), told(error)

    fails("but got 1", ValueError, rank == 0, lambda: step(schedule(), [rank], ranks, x[:1], y))
    fails("smaller than num_chunks", AssertionError, is_last, lambda: step(schedule(), [rank], ranks, x, y[:1]))
    fails("has no loss_fn", ValueError, is_last, lambda: step(schedule(None), [rank], ranks, x, y))
    fails("has no target", ValueError, is_last, lambda: schedule().step(*([x] if rank == 0 else [])))
    both = {"arg_mbs": [(x,)] * parts} if rank == 0 else {}
    fails("pre-split", ValueError, rank == 0, lambda: step(schedule(), [rank], ranks, x, y, **both))
    short = {"arg_mbs": [(x,)]} if rank == 0 else {}
    if is_last:
        short = {"target": y}
    fails("Expecting", ValueError, rank == 0, lambda: schedule().step(**short))
    fails(
        "must return a tensor with one element",
        ValueError,
        is_last,
        lambda: step(schedule(lambda a, _: a), [rank], ranks, x, y),
    )


def wrong_stages() -> None:
    refused(ValueError, f"Stage index {ranks} is out of range", lambda: PipelineStage(nn.Identity(), ranks, ranks, CPU))
    refused(RuntimeError, "cannot be larger", lambda: PipelineStage(nn.Identity(), 0, ranks - 1, CPU))
    x, y = batch(4 * ranks)
    model = layers(ranks)

    def run(index: int, count: int = ranks) -> Any:
        module = model[min(index, ranks - 1)]
        return ScheduleGPipe(PipelineStage(module, index, count, CPU), 2, F.mse_loss).step(x, target=y)

    refused(ts.InvalidArgument, "stage", lambda: run(0))  # on every rank
    refused(ts.InvalidArgument, "stage", lambda: run(ranks - 1 - rank))
    refused(ts.InvalidArgument, "num_stages=", lambda: run(rank, ranks + 1))
    refused(ValueError, "(1)", lambda: Schedule1F1B(PipelineStage(model[rank], rank, ranks, CPU), 1, F.mse_loss))
    refused(ValueError, "Unknown schedule name", lambda: get_schedule_class("absent"))

    class Returns(nn.Module):
        def __init__(self, what: Any) -> None:
            super().__init__()
            self.what = what

        def forward(self, x: torch.Tensor) -> Any:
            return self.what(x) if rank == 0 else x

    for what, kind, text in (
        (lambda x: [x, None], TypeError, "is a NoneType"),
        (lambda x: x.to_sparse(), ts.Unsupported, "is a torch.sparse_coo"),
        (
            lambda x: (x * torch.ones(5, requires_grad=True)).to(torch.complex64),
            ts.Unsupported,
            "complex64 with a gradient",
        ),
    ):
        schedule = ScheduleGPipe(PipelineStage(Returns(what), rank, ranks, CPU), 2, lambda made, _: made.real.sum())
        error = failed(lambda: schedule.step(x, target=y))  # noqa: B023
        assert isinstance(error, kind if rank == 0 else ts.Aborted), repr(error)
        assert text in told(error), told(error)


CHECKS = [
    schedules,
    each_schedule_once,
    pytorchs_schedules,
    orders_of_the_program,
    tensors_of_all_kinds,
    split_by_the_program,
    narrow_types,
    every_dtype,
    frozen_stages,
    split_backwards,
    contexts_and_builders,
    memory_is_let_go,
    evaluations,
    traced_pipes,
    with_data_parallelism,
    exceptions_in_a_stage,
    a_late_stage,
    declared_tensors,
    wrong_batches,
    wrong_stages,
]


def main() -> None:
    global gloo
    torch.set_num_threads(1)
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(60)))
    gloo = dist.new_group(backend="gloo")
    if sys.argv[1:] == ["dies"]:
        dies()
    run_checks(CHECKS, sys.argv[1:], rank)
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main()
