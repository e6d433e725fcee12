"""What test_torch_engine.py runs: under torchrun's environment, one process a rank.

usage: torch_engine_jobs.py checks DIRECTORY [CHECK...] | saves DIRECTORY STAGE | loads DIRECTORY STAGE DTYPE |
       late DIRECTORY

The engine trains beside one process that has the samples of all ranks, on every rank. Each check is a function of this
file.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tessera as ts
import tessera.torch.engine as deepspeed
import torch
import torch.distributed as dist
from tessera.torch.engine.loader import RepeatingLoader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ranks import end, patience, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
directory = ""
MICRO = 3
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Layers in a list, sizes that ranks do not divide, a frozen parameter, one without use, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.last = nn.Linear(7, 2)
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.full((1,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.frozen + self.offset
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.as_tensor(self.last(x))


def net(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, of_rank: int) -> Batch:
    draw = torch.Generator().manual_seed(1000 * step + of_rank)
    return torch.randn(MICRO, 6, generator=draw), torch.randn(MICRO, 2, generator=draw)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: Any, given: Batch, dtype: str = "fp32") -> torch.Tensor:
    return nn.functional.mse_loss(model(given[0].to(DTYPES[dtype])).float(), given[1])


def configuration(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def engine_of(config: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no effect.*")
        return deepspeed.initialize(model=net(5 + rank) if model is None else model, config=config, **more)[0]


def complete(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters, copied."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in module.named_parameters()
    }


class Alone:
    """One process with the samples of all ranks."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], accumulation: int, clip: float) -> None:
        self.model = net()
        self.optimizer = optimizer([one for one in self.model.parameters() if one.requires_grad])
        self.accumulation, self.clip = accumulation, clip
        self.norm = math.nan

    def step(self, number: int) -> list[float]:
        """This rank's losses."""
        losses = []
        self.optimizer.zero_grad()
        for micro in range(self.accumulation):
            for of_rank in range(ranks):
                loss = loss_of(self.model, batch(number * self.accumulation + micro, of_rank))
                (loss / ranks / self.accumulation).backward()
                losses += [loss.item()] * (of_rank == rank)
        self.model.unused.grad = torch.zeros(3)  # as the engine's
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.norm = float(nn.utils.clip_grad_norm_(trained, self.clip or math.inf))
        self.optimizer.step()
        return losses


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def run(engine: Any, number: int, accumulation: int, dtype: str = "fp32") -> list[float]:
    """A step of the engine."""
    losses = []
    for micro in range(accumulation):
        loss = loss_of(engine, batch(number * accumulation + micro, rank), dtype)
        returned = engine.backward(loss)
        torch.testing.assert_close(returned, loss / accumulation)
        assert engine.is_gradient_accumulation_boundary() == (micro == accumulation - 1)
        engine.step()
        assert engine.was_step_applied() == (micro == accumulation - 1)
        losses.append(loss.item())
    return losses


@contextmanager
def job() -> Iterator[None]:
    deepspeed.init_distributed(timeout=timedelta(seconds=patience(60)))
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------ training


def trains_as_one_process() -> None:
    for stage in range(4):
        for accumulation, clip in ((1, 0.0), (3, 0.05), (2, 1.0)):
            engine = engine_of(configuration(stage, accumulation, gradient_clipping=clip))
            alone = Alone(adamw, accumulation, clip)
            assert engine.get_global_grad_norm() is None
            for number in range(3):
                torch.testing.assert_close(run(engine, number, accumulation), alone.step(number), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(engine.get_global_grad_norm(), alone.norm, rtol=1e-5, atol=1e-6)
            expected = dict(alone.model.named_parameters())
            for name, value in complete(engine.module).items():
                torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5, msg=f"{stage} {name}")
            counts = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
            assert counts == (3, 3 * ranks * accumulation * MICRO, 0, 3 * accumulation), counts


def reductions_are_the_same_mean() -> None:
    """Whatever a configuration says of how it is found."""
    for stage in (0, 1, 3):
        alone = Alone(adamw, 2, 1.0)
        alone.step(0)
        for more in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
            engine = engine_of(configuration(stage, 2, **more))
            run(engine, 0, 2)
            torch.testing.assert_close(engine.get_global_grad_norm(), alone.norm, rtol=1e-5, atol=1e-6)
        engine = engine_of(configuration(stage, 2, communication_data_type="bf16"))
        run(engine, 0, 2)
        norm = engine.get_global_grad_norm()
        assert norm != alone.norm and abs(norm / alone.norm - 1) < 0.02, (norm, alone.norm)
    engine = engine_of(configuration(0, 2, gradient_allreduce_op="sum"))
    run(engine, 0, 2)
    torch.testing.assert_close(engine.get_global_grad_norm(), alone.norm * ranks, rtol=1e-5, atol=1e-6)


def optimizers_by_name() -> None:
    kinds: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
        "Adam": ({"lr": 0.02, "weight_decay": 0.1}, adamw),
        "adam": (
            {"lr": 0.02, "weight_decay": 0.1, "adam_w_mode": False},
            lambda params: torch.optim.Adam(params, lr=0.02, weight_decay=0.1),
        ),
        "SGD": ({"lr": 0.1, "momentum": 0.9}, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        "Adagrad": ({"lr": 0.1}, lambda params: torch.optim.Adagrad(params, lr=0.1)),
        "RMSprop": ({"lr": 0.01, "alpha": 0.9}, lambda params: torch.optim.RMSprop(params, lr=0.01, alpha=0.9)),
        "Lion": (
            {"lr": 0.01, "weight_decay": 0.1},
            lambda params: deepspeed.Lion(params, lr=0.01, weight_decay=0.1),
        ),
        "Lamb": (
            {"lr": 0.05, "weight_decay": 0.1},
            lambda params: deepspeed.Lamb(params, lr=0.05, weight_decay=0.1),
        ),
    }
    for name, (params, make) in kinds.items():
        for stage in (0, 2):
            engine = engine_of(configuration(stage, optimizer={"type": name, "params": params}))
            alone = Alone(make, 1, 1.0)
            for number in range(3):
                torch.testing.assert_close(run(engine, number, 1), alone.step(number), rtol=1e-4, atol=1e-5)
            expected = dict(alone.model.named_parameters())
            for key, value in complete(engine.module).items():
                torch.testing.assert_close(value, expected[key].detach(), rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


def formulas_of_lion_and_lamb() -> None:
    draw = torch.Generator().manual_seed(3)
    weights, grads = torch.randn(5, 4, generator=draw), torch.randn(3, 5, 4, generator=draw)
    grads[:, 0] = torch.tensor([0.0, -0.0, 0.0, -0.0])  # Lion leaves them where they are, but for the decay
    for made in (deepspeed.Lion, deepspeed.Lamb):
        param = nn.Parameter(weights.clone())
        optimizer = made([param], lr=0.1, weight_decay=0.2)
        w, m, v = weights.double(), torch.zeros(5, 4).double(), torch.zeros(5, 4).double()
        for step, grad in enumerate(grads.double(), 1):
            param.grad = grad.float()
            optimizer.step()
            if made is deepspeed.Lion:
                w = w - 0.1 * ((0.9 * m + 0.1 * grad).sign() + 0.2 * w)
                m = 0.99 * m + 0.01 * grad
                continue
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            update = m / (v.sqrt() + 1e-8) + 0.2 * w
            ratio = min(max(float(w.norm() / update.norm()), 0.01), 10.0)
            w = w - 0.1 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step) * ratio * update
        torch.testing.assert_close(param.detach(), w.float(), rtol=1e-4, atol=1e-5)


def half_precision() -> None:
    """Computes in 16 bits, updates float32 parameters, and learns like float32."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for stage in range(4):
            section = {"enabled": True, **({"initial_scale_power": 8} if name == "fp16" else {})}
            engine = engine_of(configuration(stage, 2, **{name: section}))
            alone = Alone(adamw, 2, 1.0)
            for number in range(3):
                losses = []
                for micro in range(2):
                    inputs, wanted = batch(2 * number + micro, rank)
                    output = engine(inputs.to(dtype))
                    assert output.dtype is dtype
                    loss = nn.functional.mse_loss(output.float(), wanted)
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                torch.testing.assert_close(losses, alone.step(number), rtol=0.05, atol=0.02)
                assert abs(engine.get_global_grad_norm() / alone.norm - 1) < 0.05
            assert all(one.dtype is torch.float32 for one in engine.module.parameters())
            expected = dict(alone.model.named_parameters())
            for key, value in complete(engine.module).items():
                torch.testing.assert_close(value, expected[key].detach(), rtol=0.1, atol=0.03, msg=f"{name} {key}")
            assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (name == "fp16", name == "bf16")


class Poisoned(nn.Module):
    """Its gradient is infinite where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def overflow_skips_the_step_on_all_ranks() -> None:
    """The scale halves after as many overflows as the hysteresis says, and doubles after a window without any."""
    for stage in range(4):
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 4}
        config = configuration(
            stage,
            fp16=fp16,
            optimizer={"type": "SGD", "params": {"lr": 0.5}},
            scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
        )
        engine = engine_of(config, Poisoned())
        # Whether a rank's gradient overflows, and what the scale and the rate are afterwards.
        script = [(0, 16, 0.25), (1, 16, 0.25), (0, 16, 0.125), (1, 8, 0.125), (0, 8, 0.0625), (0, 8, 0.03125)]
        script += [(0, 16, 0.015625), (1, 16, 0.015625), (1, 8, 0.015625), (1, 4, 0.015625)]
        skipped = 0
        for number, (overflows, scale, lr) in enumerate(script):
            before = complete(engine.module)
            value = math.inf if overflows and rank == number % ranks else 0.5
            engine.backward(engine(torch.full((4,), value, dtype=torch.float16)).float())
            engine.step()
            skipped += overflows
            assert engine.was_step_applied() is not bool(overflows)
            assert (engine.loss_scale(), engine.get_lr(), engine.skipped_steps) == (scale, [lr], skipped), number
            assert engine.global_steps == number + 1
            assert math.isinf(engine.get_global_grad_norm()) == bool(overflows)
            same = all(torch.equal(one, before[name]) for name, one in complete(engine.module).items())
            assert same == bool(overflows)
        engine.backward(engine(torch.full((4,), math.inf, dtype=torch.float16)).float())
        refused(ts.InvalidState, "at its minimum 4", engine.step)
        engine.optimizer.zero_grad()  # the overflow is gone, and yet no step follows
        refused(ts.InvalidState, "at its minimum 4", engine.step)
        loss = engine(torch.full((4,), 0.5, dtype=torch.float16)).float()
        refused(ts.InvalidState, "load an earlier checkpoint", partial(engine.backward, loss))
        assert engine.skipped_steps == skipped


def a_checkpoint_leads_out_of_a_divergence() -> None:
    for stage in (0, 2):
        fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 4}
        engine = engine_of(configuration(stage, fp16=fp16), Poisoned())
        good, bad = (torch.full((4,), value, dtype=torch.float16) for value in (0.5, math.inf))
        engine.save_checkpoint(directory, tag=f"well{stage}")
        engine.backward(engine(bad).float())
        refused(ts.InvalidState, "at its minimum 4", engine.step)
        engine.load_checkpoint(directory, tag=f"well{stage}")
        engine.backward(engine(good).float())
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == 1
        assert all(bool(one.isfinite().all()) for one in complete(engine.module).values())


def the_optimizers_steps_are_the_engines() -> None:
    for stage in (0, 1, 3):
        engine = engine_of(configuration(stage, scheduler={"type": "StepLR", "params": {"step_size": 1}}))
        twin = engine_of(configuration(stage, scheduler={"type": "StepLR", "params": {"step_size": 1}}))
        for one in (engine, twin):
            one.backward(loss_of(one, batch(0, rank)))
        before = complete(engine.module)
        refused(ts.InvalidState, "call engine.step()", engine.optimizer.step)
        assert all(torch.equal(one, before[name]) for name, one in complete(engine.module).items())
        for number in (0, 1):
            for one in (engine, twin):
                one.step()
                if number == 0:
                    one.backward(loss_of(one, batch(1, rank)))
        expected = complete(twin.module)
        assert all(torch.equal(one, expected[name]) for name, one in complete(engine.module).items())


def no_sync_and_boundaries() -> None:
    for stage in (0, 1):
        engine, alone = engine_of(configuration(stage, 3)), Alone(adamw, 3, 1.0)
        with engine.no_sync():
            for micro in range(2):
                engine.backward(loss_of(engine, batch(micro, rank)))
            refused(ts.InvalidState, "inside no_sync()", engine.step)
            refused(ts.InvalidState, "cannot be nested", engine.no_sync().__enter__)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, batch(2, rank)))
        engine.step()
        alone.step(0)
        torch.testing.assert_close(engine.get_global_grad_norm(), alone.norm, rtol=1e-5, atol=1e-6)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss_of(engine, batch(3, rank)))
        other_boundary = partial(engine.set_gradient_accumulation_boundary, True)
        refused(ts.InvalidState, "between a backward pass", other_boundary)
        engine.step()
        assert not engine.was_step_applied()
        larger_batch = partial(engine.set_train_batch_size, 3 * ranks * MICRO)
        refused(ts.InvalidState, "wait for the optimizer's step", larger_batch)
    refused(ts.InvalidState, "not possible at stage 2", engine_of(configuration(2)).no_sync().__enter__)
    engine = engine_of(configuration(0, 4, managed_gradient_accumulation=False))
    engine.backward(loss_of(engine, batch(0, rank)))
    engine.step()
    assert engine.was_step_applied()


def batches_change() -> None:
    engine = engine_of(configuration(0, 2))
    assert engine.get_batch_info() == (2 * MICRO * ranks, MICRO, 2)
    engine.set_train_batch_size(4 * MICRO * ranks)
    assert engine.get_batch_info() == (4 * MICRO * ranks, MICRO, 4)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (20 * ranks, 5, 4)
    refused(ts.InvalidArgument, f"5 * {ranks} data-parallel ranks", lambda: engine.set_train_batch_size(5 * ranks + 1))
    refused(ts.InvalidArgument, "at least 1", lambda: engine.set_train_micro_batch_size(0))


def schedules_by_name() -> None:
    """DeepSpeed's by `tessera.LRSchedule`, whose values are DeepSpeed's; PyTorch's by name."""
    expected = ts.LRSchedule.warmup(warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear", total_num_steps=9)
    params = {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 9}
    engine = engine_of(configuration(1, scheduler={"type": "WarmupDecayLR", "params": params}))
    for number in range(4):
        assert engine.get_lr() == [expected.lr_at(number, 0.02)]
        run(engine, number, 1)
    assert engine.lr_scheduler.state_dict() == {"last_batch_iteration": 3}
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    engine = engine_of(configuration(scheduler={"type": "OneCycle", "params": cycle}))
    run(engine, 0, 1)
    assert (engine.get_lr(), engine.get_mom()) == ([0.15000000000000002], [(0.8500000000000001, 0.99)])
    ends = {
        "WarmupLR": {"warmup_num_steps": 2},
        "WarmupCosineLR": {"total_num_steps": 5, "warmup_num_steps": 2},
        "LRRangeTest": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
    }
    for name, given in ends.items():
        run(engine_of(configuration(scheduler={"type": name, "params": given})), 0, 1)
    engine = engine_of(configuration(scheduler={"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}))
    run(engine, 0, 1)
    assert engine.get_lr() == [0.01]
    refused(
        ts.InvalidArgument,
        "'NoSuchLR'",
        lambda: engine_of(configuration(scheduler={"type": "NoSuchLR", "params": {}})),
    )


def optimizers_and_schedulers_of_the_program() -> None:
    for stage in (0, 2):
        model = net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine, same, loader, its = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=configuration(stage)
        )
        assert same is optimizer and its is scheduler and loader is None and engine.optimizer is optimizer
        alone = Alone(lambda params: torch.optim.SGD(params, lr=0.1), 1, 1.0)
        torch.testing.assert_close(run(engine, 0, 1), alone.step(0), rtol=1e-5, atol=1e-6)
        assert engine.get_lr() == [0.05]
        expected = dict(alone.model.named_parameters())
        for name, value in complete(engine.module).items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)
        engine = engine_of(
            configuration(stage),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
            lr_scheduler=lambda made: torch.optim.lr_scheduler.ConstantLR(made, 0.5, 1),
        )
        assert engine.get_lr() == [0.1]
        run(engine, 0, 1)
        assert engine.get_lr() == [0.2]
        engine = engine_of(configuration(stage), lr_scheduler=ts.LRSchedule.linear(0.0, 1.0, 2))
        run(engine, 0, 1)
        assert engine.get_lr() == [0.01]
        # Groups of parameters keep their settings.
        model = net()
        groups = [{"params": [model.first.weight], "weight_decay": 0.5}, {"params": list(model.last.parameters())}]
        engine = deepspeed.initialize(model=model, model_parameters=groups, config=configuration(stage))[0]
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.5, 0.1]
        before = complete(engine.module)
        run(engine, 0, 1)
        changed = {name for name, value in complete(engine.module).items() if not torch.equal(value, before[name])}
        assert changed == {"first.weight", "last.weight", "last.bias"}
    forward_only = deepspeed.initialize(model=net(), config={"train_batch_size": ranks})[0]
    assert forward_only.optimizer is None and forward_only(batch(0, rank)[0]).shape == (MICRO, 2)
    refused(ts.InvalidState, "needs an optimizer", lambda: forward_only.backward(loss_of(forward_only, batch(0, rank))))


def the_loader_gives_each_sample_once() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(5 * MICRO * ranks - 1), torch.zeros(5 * MICRO * ranks - 1))
    _, _, loader, _ = deepspeed.initialize(model=net(), training_data=data, config=configuration())
    epochs = []
    for _ in range(2):
        own = torch.cat([numbers for numbers, _ in loader])
        all_of = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(all_of, own)
        epochs.append(torch.cat(all_of).tolist())
    assert all(set(epoch) == set(range(5 * MICRO * ranks - 1)) and len(epoch) == 5 * MICRO * ranks for epoch in epochs)
    assert epochs[0] != epochs[1] and len(loader) == 5
    endless = RepeatingLoader(loader)
    assert [len(next(endless)[0]) for _ in range(7)] == [MICRO] * 7


def what_the_engine_is() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    path = Path(directory, f"config{rank}.json")
    path.write_text(
        f'// a comment\n{{"train_batch_size": {2 * ranks}, "optimizer": {{"type": "Adam", "params": {{"lr": 0.1,}}}},}}'
    )
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    args.local_rank = rank
    engine, *_ = deepspeed.deepspeed_initialize(args=args, model=net(), model_parameters=None)
    assert args.deepspeed and engine.train_batch_size() == 2 * ranks and engine.train_micro_batch_size_per_gpu() == 2
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (rank, rank, ranks)
    assert engine.device == torch.device("cpu") and isinstance(engine.module, Net)
    assert engine.offset is engine.module.offset
    assert (engine.zero_optimization_stage(), engine.gradient_accumulation_steps()) == (0, 1)
    assert (engine.gradient_clipping(), engine.dynamic_loss_scale(), engine.loss_scale()) == (1.0, False, 1.0)
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert deepspeed.comm.get_rank() == rank and deepspeed.comm.get_world_size() == ranks
    deepspeed.comm.barrier()
    with deepspeed.zero.Init(), deepspeed.zero.GatheredParameters(engine.module.last.weight, modifier_rank=0):
        if rank == 0:
            nn.init.ones_(engine.module.last.weight)
    assert bool((engine.module.last.weight == 1).all())
    sharded = engine_of(configuration(3))
    refused(ts.Unsupported, "full_tensor()", deepspeed.zero.GatheredParameters(sharded.module.last.weight).__enter__)


def what_is_printed() -> None:
    engine = engine_of(configuration(0, steps_per_print=2, wall_clock_breakdown=True, dump_state=True))
    for number in range(4):
        run(engine, number, 1)


# ------------------------------------------------------------ bad input


def bad_arguments() -> None:
    def given(**arguments: Any) -> Callable[[], Any]:
        return lambda: deepspeed.initialize(**{"model": net(), "config": configuration(), **arguments})

    args = SimpleNamespace(deepspeed_config="ds_config.json")
    refused(ts.InvalidArgument, "requires a model", given(model=None))
    refused(ts.InvalidArgument, "given twice", given(args=args))
    refused(ts.InvalidArgument, "--deepspeed_config", given(config=None))
    refused(ts.InvalidArgument, "Mismatch in local rank", given(args=SimpleNamespace(local_rank=rank + 1)))
    refused(ts.Unsupported, "mesh_param", given(mesh_param=(1, 1)))
    refused(ts.InvalidArgument, "must be a torch.nn.Module", given(model=nn.Module))
    refused(ts.InvalidArgument, "must have get_data_parallel_group()", given(mpu=3))
    refused(ts.InvalidArgument, "pass an object of torch.optim", given(optimizer=3))
    refused(ts.InvalidArgument, "which has no step()", given(lr_scheduler=3))
    stepped = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    refused(
        ts.InvalidArgument,
        "belongs to an optimizer",
        given(lr_scheduler=torch.optim.lr_scheduler.StepLR(stepped, 1)),
    )
    refused(ts.InvalidArgument, "not a parameter of the model", given(optimizer=stepped))
    refused(ts.InvalidArgument, "made a int", given(optimizer=lambda params: 3))
    model = net()
    used = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, batch(0, 0)).backward()
    used.step()
    refused(
        ts.InvalidArgument,
        "has a state already",
        given(model=model, optimizer=used, config=configuration(1)),
    )
    halves = dist.new_group([rank], use_local_synchronization=True)
    refused(
        ts.Unsupported,
        "mpu has 1 data-parallel ranks",
        given(mpu=SimpleNamespace(get_data_parallel_group=lambda: halves)),
    )
    engine = engine_of(configuration())
    refused(ts.InvalidArgument, "one element", lambda: engine.backward(torch.ones(2, requires_grad=True)))
    refused(ts.InvalidArgument, "without a gradient", lambda: engine.backward(torch.ones(())))
    refused(ts.InvalidState, "without a backward pass", engine.step)
    engine.backward(loss_of(engine, batch(0, rank)))
    loss = loss_of(engine, batch(0, rank))
    refused(ts.InvalidState, "without a step()", lambda: engine.backward(loss))
    engine.step()


def bad_configurations() -> None:
    def of(**more: Any) -> Callable[[], Any]:
        return lambda: engine_of(configuration(**more))

    refused(ts.InvalidArgument, "'NoSuchOptimizer'", of(optimizer={"type": "NoSuchOptimizer", "params": {}}))
    refused(ts.InvalidArgument, "do not fit SGD", of(optimizer={"type": "SGD", "params": {"nonsense": 1}}))
    refused(ts.InvalidArgument, "stages are 0 to 3", of(stage=4))
    refused(ts.InvalidArgument, "train_batch_size", of(train_batch_size=ranks * MICRO + 1))
    refused(ts.InvalidArgument, "fp16", of(fp16={"enabled": True}, bf16={"enabled": True}))
    refused(ts.Unsupported, "nvme", of(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}))
    # Offload to the CPU is where everything is.
    run(engine_of(configuration(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})), 0, 1)


def ranks_that_differ() -> None:
    refused(
        ts.Mismatch,
        "the ranks differ",
        lambda: engine_of(configuration(gradient_clipping=1.0 + rank)),
    )
    refused(ts.Mismatch, "parameter", lambda: engine_of(configuration(), nn.Linear(3 + rank, 2)))

    def one_bad() -> Any:
        return engine_of(configuration(stage=0 if rank else 4))

    refused(ts.InvalidArgument, "stages are 0 to 3" if rank == 0 else "rank 0", one_bad)
    bad: list[dict[str, Any]] = [
        {"model": None},
        {"mesh_param": (1, 1)},
        {"config": None},
        {"config": {"bf16": {"enabled": {1}}}},
        {"mpu": 3},
        {"model_parameters": 3},
        {"training_data": 3},
    ]
    for one in bad:
        arguments = {"model": net(), "config": configuration(), **(one if rank == ranks - 1 else {})}
        said = "" if rank == ranks - 1 else f"rank {ranks - 1}: "
        refused((ts.TesseraError, TypeError), said, partial(deepspeed.initialize, **arguments))
    run(engine_of(configuration()), 0, 1)  # the group still works


# ------------------------------------------------------------ checkpoints


WARMUP: dict[str, Any] = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 5}


def trained(stage: int, steps: int, dtype: str = "fp32", **more: Any) -> Any:
    more |= {} if dtype == "fp32" else {dtype: {"enabled": True}}
    scheduler = {"type": "WarmupLR", "params": WARMUP}
    engine = engine_of(configuration(stage, 2, scheduler=scheduler, **more), net())
    for number in range(steps):
        run(engine, number, 2, dtype)
    return engine


CLIENT: dict[str, Any] = {
    "step": 7,
    "name": "größer",
    "of": {1: [2.5, None], "deep": {"flag": True}},
    "random": torch.arange(5),
}


def saves(where: str, stage: str) -> None:
    """At one number of ranks."""
    with job():
        engine = trained(int(stage), 2)
        assert engine.save_checkpoint(Path(where, "checkpoints"), client_state=CLIENT if rank == 0 else {"step": -1})
        assert Path(where, "checkpoints", "latest").read_text() == "global_step2"
        whole = complete(engine.module)
        if rank == 0:
            torch.save(whole, Path(where, "parameters.pt"))
        dist.barrier()


def loads(where: str, stage: str, dtype: str) -> None:
    """At another number of ranks, stage and precision; then both go on alike."""
    with job():
        engine = trained(int(stage), 1, dtype)
        path, client = engine.load_checkpoint(Path(where, "checkpoints"))
        assert path == str(Path(where, "checkpoints", "global_step2"))
        assert torch.equal(client.pop("random"), CLIENT["random"])
        assert client == {key: value for key, value in CLIENT.items() if key != "random"}
        expected = torch.load(Path(where, "parameters.pt"))
        torch.testing.assert_close(complete(engine.module), expected, rtol=0, atol=0)
        assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (2, 0, 4)
        assert engine.lr_scheduler.last_batch_iteration == 1
        assert engine.get_lr() == [ts.LRSchedule.warmup(**WARMUP).lr_at(2, 0.02)]
        steps = {float(state["step"]) for state in engine.optimizer.state.values()}
        assert steps == {2.0}, steps
        moments = {
            name: engine.optimizer.state[param]["exp_avg"]
            for name, param in engine.module.named_parameters()
            if param.requires_grad
        }
        for name, moment in moments.items():
            whole = moment.full_tensor() if isinstance(moment, DTensor) else moment
            assert bool(whole.any()) == (name != "unused"), name
        run(engine, 2, 2, dtype)
        fresh = trained(int(stage), 0, dtype)
        before = complete(fresh.module)
        assert fresh.load_checkpoint(Path(where, "checkpoints"), load_module_only=True)[0] == path
        assert fresh.global_steps == 0 and not fresh.optimizer.state
        torch.testing.assert_close(complete(fresh.module), expected, rtol=0, atol=0)
        assert any(not torch.equal(before[name], expected[name]) for name in expected)
        found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(Path(where, "checkpoints"))
        torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=0)
        assert found.keys() == {*expected, "offset"}
        assert engine.save_16bit_model(Path(where, f"model{stage}{dtype}"))
        written = torch.load(Path(where, f"model{stage}{dtype}", "pytorch_model.bin"))
        assert {value.dtype for value in written.values()} == {DTYPES[dtype]}


def a_save_goes_on_as_if_nothing_had_been() -> None:
    for stage in range(4):
        engine = trained(stage, 2)
        where = Path(directory, f"goes on {stage}")
        assert engine.save_checkpoint(where, "a", client_sd={"step": 1}) and engine.save_checkpoint(where, 0.125)
        run(engine, 2, 2)
        again = trained((stage + 2) % 4, 1)
        path, client = again.load_checkpoint(where, "a")
        assert client == {"step": 1} and path.endswith("/a")
        run(again, 2, 2)
        torch.testing.assert_close(complete(again.module), complete(engine.module), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(again.get_global_grad_norm(), engine.get_global_grad_norm(), rtol=1e-5, atol=1e-6)
        assert again.get_lr() == engine.get_lr() and again.global_samples == engine.global_samples
        assert again.load_checkpoint(where) == (str(where / "0.125"), {})


def a_loss_scale_is_loaded() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 5, "hysteresis": 1}
    engine = engine_of(configuration(2, fp16=fp16), Poisoned())
    engine.backward(engine(torch.full((4,), math.inf, dtype=torch.float16)).float())
    engine.step()
    where = Path(directory, "scale")
    engine.save_checkpoint(where)
    again = engine_of(configuration(0, fp16={"enabled": True}), Poisoned())
    again.load_checkpoint(where)
    assert (again.loss_scale(), again.skipped_steps) == (16.0, 1)


def what_a_save_and_a_load_leave_out() -> None:
    for stage in (0, 2):
        where = Path(directory, f"left out {stage}")
        engine = trained(stage, 3)
        engine.save_checkpoint(where, "whole", save_latest=False)
        assert not (where / "latest").exists()
        engine.save_checkpoint(where, "trained", exclude_frozen_parameters=True)
        assert (where / "latest").read_text() == "trained"
        found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(where)
        assert {*found, "frozen"} == {*engine.module.state_dict()} and "frozen" not in found
        again = trained(stage, 1)
        refused(ts.Mismatch, "'model.frozen' is missing", partial(again.load_checkpoint, where))
        rates = again.get_lr()
        again.load_checkpoint(
            where, load_module_strict=False, load_optimizer_states=False, load_lr_scheduler_states=False
        )
        assert (again.get_lr(), again.global_steps) == (rates, 3)
        assert {float(state["step"]) for state in again.optimizer.state.values()} == {1.0}
        torch.testing.assert_close(complete(again.module), complete(engine.module), rtol=0, atol=0)
        again.load_checkpoint(where, "whole")
        assert again.get_lr() == engine.get_lr() != rates
        engine.save_16bit_model(where, "model.bin", exclude_frozen_parameters=True)
        assert torch.load(where / "model.bin").keys() == found.keys()
    both = partial(engine.save_checkpoint, where, client_state={"a": 1}, client_sd={"a": 1})
    refused(ts.InvalidArgument, "are both given", both)


def bad_checkpoints() -> None:
    where = Path(directory, "bad")
    engine = trained(1, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(where) == (None, None)
    assert any(f"no checkpoint found in {where}" in str(one.message) for one in told)
    engine.save_checkpoint(where, "one")
    refused(ts.NotFound, "tag 'two'; it has 'one'", lambda: engine.load_checkpoint(where, "two"))
    refused(ts.InvalidArgument, "must be the name of a directory", lambda: engine.save_checkpoint(where, "../two"))
    refused(ts.InvalidArgument, "custom_load_fn", lambda: engine.load_checkpoint(where, custom_load_fn=print))
    before = complete(engine.module)
    other = engine_of(configuration(2), nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2)))
    kept = complete(other.module)
    refused(ts.Mismatch, "'model.0.weight' is missing", lambda: other.load_checkpoint(where))
    refused(ts.Mismatch, "'model.first.weight' of the checkpoint is not", lambda: other.load_checkpoint(where))
    torch.testing.assert_close(complete(other.module), kept, rtol=0, atol=0)
    narrow = engine_of(configuration(), nn.ModuleDict({"first": nn.Linear(6, 7), "unused": nn.Linear(1, 1)}))
    narrow.load_checkpoint(where, load_module_strict=False, load_optimizer_states=False)
    torch.testing.assert_close(complete(narrow.module)["first.weight"], before["first.weight"], rtol=0, atol=0)
    model = net()
    groups = [{"params": [one]} for one in model.parameters() if one.requires_grad]
    split = deepspeed.initialize(model=model, model_parameters=groups, config=configuration())[0]
    refused(ts.Mismatch, "1 groups of parameters", lambda: split.load_checkpoint(where))
    split.load_checkpoint(where, load_optimizer_states=False)
    Path(where, "latest").write_text("gone")
    dist.barrier()
    refused(ts.NotFound, "names 'gone'", lambda: engine.load_checkpoint(where))

    for bad in (5, {"f": lambda: 0}):
        client = bad if rank == 0 else None
        refused(Exception, "" if rank == 0 else "rank 0: ", partial(engine.save_checkpoint, where, client_state=client))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save_checkpoint(where, "odd", client_state={"odd": argparse.Namespace(a=1)})
    refused(ts.Unsupported, "more than data", lambda: engine.load_checkpoint(where, "odd"))
    torch.testing.assert_close(complete(engine.module), before, rtol=0, atol=0)


def tags_that_differ() -> None:
    where = Path(directory, "tags")
    for validation, tells in (("Warn", True), ("Ignore", False)):
        engine = engine_of(configuration(checkpoint={"tag_validation": validation}))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.save_checkpoint(where, f"{validation}{rank}")
        assert any("the tags differ" in str(one.message) for one in told) == (tells and rank == 0)
        assert Path(where, "latest").read_text() == f"{validation}0"
        assert not Path(where, f"{validation}1").exists()
    engine = engine_of(configuration(checkpoint={"tag_validation": "FAIL"}))
    refused(ts.Mismatch, "rank 0 saves as 'x0', rank 1 as 'x1'", lambda: engine.save_checkpoint(where, f"x{rank}"))
    assert not Path(where, "x0").exists()


def late(where: str) -> None:
    """The last rank does not save: the others name it at the deadline."""
    os.environ["TESSERA_TIMEOUT_MS"] = "1500"
    deepspeed.init_distributed()
    engine = engine_of(configuration(1))
    run(engine, 0, 1)
    if rank < ranks - 1:
        refused(ts.TesseraTimeout, f"rank {ranks - 1}", lambda: engine.save_checkpoint(where))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"left {rank}", "")
    store.wait([f"left {one}" for one in range(ranks)], timedelta(seconds=patience(40)))
    assert not Path(where, "latest").exists()
    os._exit(0)


# ------------------------------------------------------------ pipelines


def layers(seed: int = 5) -> list[Any]:
    torch.manual_seed(seed)
    tied = deepspeed.TiedLayerSpec
    return [
        tied("square", nn.Linear, 6, 6, bias=False),
        nn.Tanh(),
        deepspeed.LayerSpec(nn.Linear, 6, 6),
        torch.tanh,
        deepspeed.LayerSpec(nn.Linear, 6, 6),
        tied("square", nn.Linear, 6, 6, bias=False, forward_fn=lambda m, x: nn.functional.linear(x, m.weight.t())),
        deepspeed.LayerSpec(nn.Linear, 6, 2),
    ]


class Whole(nn.Module):
    """The same layers in one process."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.tied = nn.Parameter(state["tied_modules.square.weight"].clone())
        self.linears = nn.ModuleDict({number: nn.Linear(6, size) for number, size in (("2", 6), ("4", 6), ("6", 2))})
        for number, linear in self.linears.items():
            linear.load_state_dict({part: state[f"{number}.{part}"] for part in ("weight", "bias")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(nn.functional.linear(x, self.tied))
        x = torch.tanh(self.linears["2"](x))
        x = nn.functional.linear(self.linears["4"](x), self.tied.t())
        return torch.as_tensor(self.linears["6"](x))


def of_all_stages(module: nn.Module) -> dict[str, torch.Tensor]:
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, complete(module))
    return {name: value for one in reversed(everywhere) for name, value in one.items()}


def pipelines() -> None:
    for stages in sorted({1, 2, ranks} & {n for n in range(1, ranks + 1) if ranks % n == 0}):
        for stage, accumulation, method in ((0, 4, "parameters"), (1, 3, "uniform"), (0, 1, "type:linear")):
            module = deepspeed.PipelineModule(
                layers(5 + rank), stages, loss_fn=nn.functional.mse_loss, partition_method=method
            )
            engine = engine_of(configuration(stage, accumulation, gradient_clipping=0.1), module)
            whole = Whole(of_all_stages(engine.module))
            optimizer = adamw(whole.parameters())
            replicas = ranks // stages
            replica = rank % replicas
            for number in range(3):
                given = [batch(number * accumulation + micro, replica) for micro in range(accumulation)]
                loss = engine.train_batch(iter(given))
                every = [
                    nn.functional.mse_loss(whole(x), y)
                    for of in range(replicas)
                    for x, y in (batch(number * accumulation + micro, of) for micro in range(accumulation))
                ]
                expected = torch.stack(every).mean()
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
                optimizer.zero_grad()
                expected.backward()
                norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
                torch.testing.assert_close(engine.get_global_grad_norm(), float(norm), rtol=1e-4, atol=1e-6)
                optimizer.step()
            found = of_all_stages(engine.module)
            torch.testing.assert_close(found["tied_modules.square.weight"], whole.tied.detach(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found["6.weight"], whole.linears["6"].weight.detach(), rtol=1e-4, atol=1e-5)
            evaluated = engine.eval_batch(iter(given))
            with torch.no_grad():
                every = [
                    nn.functional.mse_loss(whole(x), y)
                    for of in range(replicas)
                    for x, y in (batch(number * accumulation + micro, of) for micro in range(accumulation))
                ]
            torch.testing.assert_close(evaluated, torch.stack(every).mean(), rtol=1e-4, atol=1e-5)
            where = Path(directory, f"pipeline {stages} {stage}")
            engine.save_checkpoint(where, client_state={"n": 1})
            again = deepspeed.PipelineModule(layers(50), ranks if stages == 1 else 1, loss_fn=nn.functional.mse_loss)
            other = engine_of(configuration(0, accumulation), again)
            assert other.load_checkpoint(where)[1] == {"n": 1}
            torch.testing.assert_close(of_all_stages(other.module), found, rtol=0, atol=0)


def bad_pipelines() -> None:
    refused(ts.InvalidArgument, "must be a divisor", lambda: deepspeed.PipelineModule(layers(), ranks + 1))
    refused(ts.InvalidArgument, "each needs one", lambda: deepspeed.PipelineModule(layers()[: ranks - 1], ranks))
    for method, text in (("type:x", "no layer's class"), ("x", "partition_method is")):
        refused(ts.InvalidArgument, text, partial(deepspeed.PipelineModule, layers(), ranks, partition_method=method))

    def module() -> Any:
        return deepspeed.PipelineModule(layers(), ranks, loss_fn=nn.functional.mse_loss)

    refused(ts.Unsupported, "use stage 0 or 1", lambda: engine_of(configuration(2), module()))
    engine = engine_of(configuration(0, 2), module())
    for what in (engine.forward, engine.backward, engine.step):
        refused(ts.InvalidState, "train_batch()", what)
    ends = rank in (0, ranks - 1)
    kind = ts.InvalidState if ends else ts.TesseraError
    refused(kind, "the data ended after 1 of 2", lambda: engine.train_batch(iter([batch(0, 0)])))
    refused(ts.TesseraError, "there is no data", engine.train_batch)
    engine.train_batch(iter([batch(0, 0), batch(1, 0)]))


# ------------------------------------------------------------ other parallelism


def mlp() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def tensor_parallelism() -> None:
    """With mpu=mesh["dp"] the batches, and what stages shard, are those of the data-parallel ranks."""
    parts = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (ranks // parts, parts), mesh_dim_names=("dp", "tp"))
    copies, copy = mesh["dp"].size(), mesh["dp"].get_local_rank()
    refused(ts.InvalidArgument, "a mesh of 2 dimensions", lambda: engine_of(configuration(), mlp(), mpu=mesh))
    model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    of_half = partial(engine_of, configuration(0, bf16={"enabled": True}), model, mpu=mesh["dp"])
    refused(ts.InvalidArgument, "stage 0 with fp16 or bf16 and tensor parallelism", of_half)
    for stage in range(4):
        model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        engine = engine_of(configuration(stage, gradient_clipping=0.1), model, mpu=mesh["dp"])
        assert (engine.train_batch_size(), engine.dp_world_size, engine.mp_world_size) == (
            copies * MICRO,
            copies,
            parts,
        )
        whole = mlp()
        optimizer = adamw(whole.parameters())
        for number in range(3):
            engine.backward(loss_of(engine, batch(number, copy)))
            engine.step()
            optimizer.zero_grad()
            for of in range(copies):
                (loss_of(whole, batch(number, of)) / copies).backward()
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            torch.testing.assert_close(engine.get_global_grad_norm(), float(norm), rtol=1e-4, atol=1e-6)
            optimizer.step()
        expected = {name: one.detach() for name, one in whole.named_parameters()}
        torch.testing.assert_close(complete(engine.module), expected, rtol=1e-4, atol=1e-5)
        where = Path(directory, f"tensor parallel {stage}")
        engine.save_checkpoint(where)
        plain = engine_of(configuration(3 - stage), mlp())
        plain.load_checkpoint(where)
        torch.testing.assert_close(complete(plain.module), complete(engine.module), rtol=0, atol=0)


def parameters_among_few_ranks() -> None:
    """zero_hpz_partition_size: at stage 3 parameters stay in groups of ranks from forward to backward."""
    few = 2 if ranks % 2 == 0 else ranks
    zero = {"stage": 3, "zero_hpz_partition_size": few}
    engine, alone = engine_of(configuration(zero_optimization=zero)), Alone(adamw, 1, 1.0)
    for number in range(2):
        torch.testing.assert_close(run(engine, number, 1), alone.step(number), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(engine.get_global_grad_norm(), alone.norm, rtol=1e-5, atol=1e-6)
    zero = {"stage": 3, "zero_hpz_partition_size": ranks + 1}
    refused(ts.InvalidArgument, "does not divide", lambda: engine_of(configuration(zero_optimization=zero)))


def pipelines_of_half_precision() -> None:
    """They learn like float32; an overflow on the last stage skips the step on all."""
    for dtype in ("bf16", "fp16"):
        for stage in (0, 1):
            section = {"enabled": True, **({"initial_scale_power": 6, "hysteresis": 1} if dtype == "fp16" else {})}
            stages = 2 if ranks % 2 == 0 else ranks
            copies, copy = ranks // stages, rank % (ranks // stages)
            module = deepspeed.PipelineModule(layers(), stages, loss_fn=half_loss)
            engine = engine_of(configuration(stage, 2, **{dtype: section}), module)
            whole = Whole(of_all_stages(engine.module))
            optimizer = adamw(whole.parameters())
            for number in range(3):
                given = [batch(2 * number + micro, copy) for micro in range(2)]
                loss = engine.train_batch(iter([(x.to(DTYPES[dtype]), y) for x, y in given]))
                optimizer.zero_grad()
                every = [batch(2 * number + micro, of) for micro in range(2) for of in range(copies)]
                expected = torch.stack([half_loss(whole(x), y) for x, y in every]).mean()
                expected.backward()
                nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
                optimizer.step()
                torch.testing.assert_close(loss, expected.detach(), rtol=0.05, atol=0.02)
            assert all(one.dtype is torch.float32 for one in engine.module.parameters())
            if dtype == "fp16":
                before = complete(engine.module)
                factor = math.inf if copy == 0 else 1.0
                poisoned = [(x.to(DTYPES[dtype]), y * factor) for x, y in given]
                engine.train_batch(iter(poisoned))
                assert (engine.loss_scale(), engine.skipped_steps, engine.was_step_applied()) == (32.0, 1, False)
                assert math.isinf(engine.get_global_grad_norm())
                torch.testing.assert_close(complete(engine.module), before, rtol=0, atol=0)


def half_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), labels)


CHECKS: list[Callable[[], object]] = [
    trains_as_one_process,
    reductions_are_the_same_mean,
    optimizers_by_name,
    formulas_of_lion_and_lamb,
    half_precision,
    overflow_skips_the_step_on_all_ranks,
    a_checkpoint_leads_out_of_a_divergence,
    the_optimizers_steps_are_the_engines,
    no_sync_and_boundaries,
    batches_change,
    schedules_by_name,
    optimizers_and_schedulers_of_the_program,
    the_loader_gives_each_sample_once,
    what_the_engine_is,
    what_is_printed,
    bad_arguments,
    bad_configurations,
    ranks_that_differ,
    a_save_goes_on_as_if_nothing_had_been,
    a_loss_scale_is_loaded,
    bad_checkpoints,
    tags_that_differ,
    pipelines,
    bad_pipelines,
    tensor_parallelism,
    parameters_among_few_ranks,
    pipelines_of_half_precision,
    what_a_save_and_a_load_leave_out,
]


def checks(where: str, *names: str) -> None:
    global directory
    directory = where
    with job():
        run_checks(CHECKS, names, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    end()
