"""The engine: DeepSpeed's methods over `tessera.torch`'s parallel modules and PyTorch's optimizers."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...engine import LossScale
from ...errors import InvalidArgument, InvalidState
from ..norm import clip_grad_norm_
from ..slices import local
from .comm import get_local_rank
from .models import Replicated, Sharded
from .saves import Saves
from .settings import Settings

__all__ = ["DeepSpeedEngine"]


class _Times:
    """Where the time since the last printed step went."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - since

    def taken(self) -> str:
        """What they are; from now on they begin at zero."""
        told = ", ".join(f"{part} {1000 * seconds:.2f} ms" for part, seconds in self._seconds.items())
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return told


class DeepSpeedEngine(Saves, nn.Module):
    """A module that trains as a ds_config says. Made by `initialize`; all ranks make the same calls.

    Names that are not the engine's are the module's. Not thread-safe.
    """

    def __init__(
        self,
        module: nn.Module,
        model: Replicated | Sharded,
        optimizer: Any,
        lr_scheduler: Any,
        training_dataloader: Any,
        settings: Settings,
        ranks: Any,
        group: Any,
        mpu: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.__dict__["_model"] = model  # not as a part of this module
        self.optimizer = self.basic_optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.mpu = mpu
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = get_local_rank()
        self.device = torch.device("cpu")
        self.data_parallel_group = group
        self.dp_world_size = dist.get_world_size(group)
        self.mp_world_size = self.world_size // self.dp_world_size
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self._settings = settings
        self._ranks = ranks
        self._train_batch, self._micro_batch = settings.train_batch, settings.micro_batch
        self._accumulation = settings.accumulation
        self._loss_scale = LossScale(**settings.loss_scale)
        self._passes = 0  # that have ended since the last boundary
        self._steps = 0  # calls of step since the last boundary
        self._is_due = False  # a pass has ended whose step did not come yet
        self._in_no_sync = False
        self._boundary: bool | None = None
        self._was_applied = False
        self._diverged: str | None = None  # why no step can follow
        self._steps_optimizer = False
        if optimizer is not None:
            optimizer.register_step_pre_hook(_only_of(weakref.ref(self)))
        self._norm: float | None = None
        self._times = _Times()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules:
                raise
        return getattr(modules["module"], name)

    # ------------------------------------------------------------ a pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self._times.of("forward"):
            return self._model(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **ignored: Any
    ) -> torch.Tensor:
        """Run a backward pass. It reduces the gradients if a step of the optimizer follows, or from stage 2 on.

        Parameters
        ----------
        loss : Tensor
            One element, with a gradient.
        retain_graph : bool
            As for PyTorch's ``backward``.
        scale_wrt_gas : bool
            Divide the loss by the accumulation.
        **ignored
            DeepSpeed's older arguments; no effect.

        Returns
        -------
        The loss, divided by the accumulation.
        """
        self._check_optimizer("backward()")
        self._check_converges()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgument(f"the loss is {_shown(loss)}; it must be a tensor of one element with a gradient")
        if self._is_due:
            raise InvalidState(
                f"rank {self.global_rank}: a second backward pass without a step(); call step() after each pass, or "
                "run the earlier passes inside no_sync()"
            )
        with self._times.of("backward"):
            if scale_wrt_gas:
                loss = loss / self._accumulation
            reduces = not self._in_no_sync and (self._settings.stage >= 2 or self.is_gradient_accumulation_boundary())
            self._model.begin_pass(reduces)
            scale = self._loss_scale.value
            scaled = loss.float() * scale if scale != 1 else loss
            self._model.watch(scaled)
            scaled.backward(retain_graph=retain_graph)
        self._passes += 1
        self._is_due = not self._in_no_sync
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backward passes accumulate gradients on each rank, and need no step(). Stages 0 and 1 only."""
        if self._in_no_sync:
            raise InvalidState("no_sync() is already on; it cannot be nested")
        if self._settings.stage >= 2:
            raise InvalidState(
                f"no_sync() is not possible at stage {self._settings.stage}: gradients are sharded, so each backward "
                "pass reduces them; use stage 0 or 1"
            )
        if self._is_due:
            raise InvalidState("no_sync() between a backward pass and its step(); call step() first")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    # ------------------------------------------------------------ a step

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() is one of the optimizer."""
        if self._boundary is not None:
            return self._boundary
        return self._settings.every_step_is_boundary or self._steps + 1 >= self._accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Override `is_gradient_accumulation_boundary` from now on; None: the accumulation decides again."""
        if is_boundary is not None and not isinstance(is_boundary, (bool, np.bool_)):
            raise TypeError(f"is_boundary is {is_boundary!r}; it must be a bool, or None")
        if self._is_due and is_boundary != self.is_gradient_accumulation_boundary():
            raise InvalidState(
                "set_gradient_accumulation_boundary() between a backward pass and its step(), which has or has not "
                "reduced the gradients by now; call it before the pass"
            )
        self._boundary = None if is_boundary is None else bool(is_boundary)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a pass. At a boundary: unscale and clip the gradients, step the optimizer and the scheduler.

        Parameters
        ----------
        lr_kwargs : dict, optional
            Arguments for the scheduler's ``step``.

        Raises
        ------
        InvalidState
            Inside no_sync(), without a backward pass, or the loss scale would have to shrink below its minimum.
        """
        if self._in_no_sync:
            raise InvalidState("step() inside no_sync(), whose gradients are not reduced; call it after the block")
        self._check_converges()
        if not self._is_due:
            raise InvalidState(f"rank {self.global_rank}: step() without a backward pass since the last one")
        with self._times.of("step"):
            is_last = self.is_gradient_accumulation_boundary()
            self._was_applied = False
            if is_last:
                self._step_of_optimizer(lr_kwargs)
            self.micro_steps += 1
            self._steps = 0 if is_last else self._steps + 1
            self._passes = 0 if is_last else self._passes
            self._is_due = False
        if is_last:
            self._print_step()

    def _step_of_optimizer(self, lr_kwargs: dict[str, Any] | None) -> None:
        overflow = self._unscale_and_clip()
        try:
            self._loss_scale.update(overflow)
        except InvalidState as error:
            self._diverged = str(error)
            raise
        if overflow:
            self.skipped_steps += 1
        else:
            self._steps_optimizer = True
            try:
                self.optimizer.step()
            finally:
                self._steps_optimizer = False
            self._was_applied = True
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self._train_batch
        if self._was_applied and self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            except TypeError:  # a schedule of the program's own, by the number of samples
                self.lr_scheduler.step(self._train_batch)

    def _check_converges(self) -> None:
        """Refuse to continue after an overflow at the smallest loss scale, even if its gradients are gone."""
        if self._diverged is not None:
            raise InvalidState(f"{self._diverged}; load an earlier checkpoint to continue")

    def _read(self, path: Path, begun: dict[str, Any]) -> None:
        super()._read(path, begun)
        if self._diverged is not None:
            self.zero_grad()
            self._diverged, self._is_due = None, False
            self._passes = self._steps = 0

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _unscale_and_clip(self) -> bool:
        """Whether the gradients of any rank have an infinity or NaN."""
        settings, params = self._settings, self._trained()
        if settings.fills_missing:
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
        own = [local(param.grad) for param in params if param.grad is not None]
        scale = self._loss_scale.value
        if scale != 1 and own:
            torch._foreach_mul_(own, 1 / scale)
        if settings.computes_norm:
            self._norm = self._clip(params)
            finite = math.isfinite(self._norm)
        else:
            finite = not settings.skips_overflow or all(bool(grad.isfinite().all()) for grad in own)
        if not settings.skips_overflow:
            return False
        flag = torch.tensor([0 if finite else 1], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        overflow = bool(flag.item())
        if overflow and settings.computes_norm:
            self._norm = math.inf
        return overflow

    def _clip(self, params: list[torch.Tensor]) -> float:
        return float(clip_grad_norm_(params, self._settings.clipping or math.inf))

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients. DDP's are zeros in place."""
        if self.optimizer is None:
            self.module.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=not self._model.keeps_gradients)

    def was_step_applied(self) -> bool:
        """Whether the last step() was one of the optimizer."""
        return self._was_applied

    # ------------------------------------------------------------ numbers

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last boundary, before clipping and without the loss scale. None before the
        first one, or without ``compute_grad_norm``; infinite if the step was skipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The betas or the momentum of each group of parameters."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else list(self.optimizer.param_groups)

    def get_batch_info(self) -> tuple[int, int, int]:
        """The train batch, the micro-batch and the accumulation."""
        return self._train_batch, self._micro_batch, self._accumulation

    def train_batch_size(self) -> int:
        """Samples of all ranks per step of the optimizer."""
        return self._train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a rank per backward pass."""
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Backward passes per step of the optimizer."""
        return self._accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another train batch, by another accumulation."""
        self._check_nothing_waits("set_train_batch_size()")
        unit = self._micro_batch * self.dp_world_size
        if not _is_count(train_batch_size) or train_batch_size % unit:
            raise InvalidArgument(
                f"train_batch_size {train_batch_size} is not divisible by train_micro_batch_size_per_gpu "
                f"{self._micro_batch} * {self.dp_world_size} data-parallel ranks = {unit}; choose a multiple of {unit}"
            )
        self._train_batch, self._accumulation = int(train_batch_size), int(train_batch_size) // unit

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another micro-batch, and so another train batch."""
        self._check_nothing_waits("set_train_micro_batch_size()")
        if not _is_count(micro_batch_size):
            raise InvalidArgument(f"train_micro_batch_size_per_gpu is {micro_batch_size!r}; it must be at least 1")
        self._micro_batch = int(micro_batch_size)
        self._train_batch = self._micro_batch * self._accumulation * self.dp_world_size

    def _check_nothing_waits(self, what: str) -> None:
        if self._passes:
            raise InvalidState(
                f"{what} while the gradients of {self._passes} backward passes wait for the optimizer's step; call it "
                "after a step at a boundary"
            )

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: they are not clipped."""
        return self._settings.clipping

    def zero_optimization_stage(self) -> int:
        """0: nothing is sharded; 1: the optimizer; 2: gradients too; 3: parameters too."""
        return self._settings.stage

    def zero_optimization(self) -> bool:
        """Whether the stage is at least 1."""
        return self._settings.stage > 0

    def fp16_enabled(self) -> bool:
        """Whether the module computes in float16."""
        return self._settings.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the module computes in bfloat16."""
        return self._settings.dtype is torch.bfloat16

    def loss_scale(self) -> float:
        """What a loss is multiplied by, besides the accumulation."""
        return self._loss_scale.value

    cur_scale = property(loss_scale, doc="The loss scale.")

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self.fp16_enabled() and self._settings.loss_scale["fixed"] == 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss times the loss scale."""
        return loss * self._loss_scale.value

    def steps_per_print(self) -> int:
        """How many steps there are to a printed line; 0: none is printed."""
        return self._settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether times are printed."""
        return self._settings.breaks_down_time

    def dump_state(self) -> bool:
        """Whether the configuration was printed."""
        return self._settings.dumps_state

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with every default filled in."""
        return json.loads(json.dumps(self._settings.resolved))

    def get_data_parallel_rank(self) -> int:
        """This rank among those with other data."""
        return dist.get_rank(self.data_parallel_group)

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """In which gradients are reduced; None: in their own."""
        return self._settings.grad_dtype

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state, without the engine's prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **_: Any) -> None:
        """Load a state into the module."""
        self.module.load_state_dict(state_dict, strict=strict)

    def destroy(self) -> None:
        """No effect: everything is freed with the engine."""

    def _check_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise InvalidState(f"{call} needs an optimizer; pass one to initialize(), or name one in the configuration")

    def _print_step(self) -> None:
        """On rank 0, at every steps_per_print-th step."""
        every = self._settings.steps_per_print
        if self.global_rank != 0 or not every or self.global_steps % every:
            return
        line = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}"
        if self.fp16_enabled():
            line += f", loss_scale={self._loss_scale.value:g}"
        print(line, flush=True)
        if self._settings.breaks_down_time:
            print(f"time since the last printed step: {self._times.taken()}", flush=True)

    def print_state(self) -> None:
        """Print the configuration with every default filled in."""
        print(json.dumps({"ds_config": self._settings.resolved}, indent=2), flush=True)


def _only_of(engine: weakref.ref[DeepSpeedEngine]) -> Callable[..., None]:
    """A hook of an optimizer: its steps are the engine's, which unscales, clips and drops gradients with them."""

    def check(optimizer: Any, args: Any, kwargs: Any) -> None:
        owner = engine()
        if owner is not None and not owner._steps_optimizer:
            raise InvalidState("step() of an optimizer that is the engine's; call engine.step(), which calls it")

    return check


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
