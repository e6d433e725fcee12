"""DeepSpeed's pipelines: a list of layers, cut into stages, which `tessera.torch.pipelining` runs.

Ranks are stages by replicas: rank = stage * replicas + replica. Each rank builds the layers of its stage only. The
micro-batches of a step are the accumulation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint

from ...errors import InvalidArgument, InvalidState, Unsupported
from ..norm import norms
from ..slices import local
from .comm import init_distributed
from .loader import RepeatingLoader
from .runtime import DeepSpeedEngine
from .settings import Settings

__all__ = ["LayerSpec", "PipelineEngine", "PipelineModule", "TiedLayerSpec", "check_pipeline"]


class LayerSpec:
    """A layer that is built on the rank of its stage only: ``typename(*module_args, **module_kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise InvalidArgument(f"a LayerSpec has {typename!r}; it must be a class of torch.nn.Module")
        self.typename = typename
        self.module_args, self.module_kwargs = module_args, module_kwargs

    def build(self) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with the others of the same key, such as an embedding with the head.

    Parameters
    ----------
    key : str
        Layers of one key have one module. Its stages have equal copies, whose gradients are added up.
    typename, *module_args, **module_kwargs
        As for `LayerSpec`; those of the stage's first layer of the key count.
    forward_fn : callable, optional
        ``forward_fn(module, inputs)`` instead of the module's own forward.
    tied_weight_attr : str or list of str
        No effect: all parameters are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: Any = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        del tied_weight_attr
        self.key, self.forward_fn = key, forward_fn


class PipelineModule(nn.Module):
    """The layers of this rank's stage. Collective; initialises `torch.distributed` if it is not.

    Parameters
    ----------
    layers : iterable
        Modules, specifications or functions; each gets the output of the one before it.
    num_stages : int, optional
        Must divide the world size; the rest are replicas.
    topology : optional
        Instead of `num_stages`: an object with ``get_dim("pipe")``.
    loss_fn : callable, optional
        ``loss_fn(output, labels)`` of a micro-batch, on the last stage.
    seed_layers : bool
        Seed PyTorch with `base_seed` plus the layer's number before each is built.
    seed_fn : callable, optional
        Called with that instead.
    base_seed : int
        See `seed_layers`.
    partition_method : str
        Stages have about the same number of "parameters" (default), of layers ("uniform"), or of layers whose class
        name matches REGEX ("type:REGEX").
    activation_checkpoint_interval : int
        Recompute the activations of every N layers in backward; 0: keep them.
    activation_checkpoint_func : callable, optional
        Instead of PyTorch's ``checkpoint``.
    """

    def __init__(
        self,
        layers: Any,
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        del ignored
        init_distributed()
        world = dist.get_world_size()
        if topology is not None:
            num_stages = topology.get_dim("pipe")
        if not isinstance(num_stages, int) or num_stages < 1 or world % num_stages:
            raise InvalidArgument(f"num_stages is {num_stages!r}; it must be a divisor of the {world} ranks")
        specs = list(layers)
        if len(specs) < num_stages:
            raise InvalidArgument(f"the pipeline has {len(specs)} layers for {num_stages} stages; each needs one")
        self.loss_fn = loss_fn
        self.num_stages = num_stages
        shape = (num_stages, world // num_stages, 1)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "alone"))
        self.stage_id = self.mesh.get_local_rank("pp")
        self.parts = _bounds(_weights(specs, partition_method), num_stages)
        self._interval = activation_checkpoint_interval
        self._checkpoint = activation_checkpoint_func or _recomputed
        self._calls: list[Callable[[Any], Any]] = []
        self.tied_modules = nn.ModuleDict()
        for number in range(self.parts[self.stage_id], self.parts[self.stage_id + 1]):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + number)
            self._calls.append(self._call_of(number, specs[number]))
        # By key, the stages that have it.
        self.tied_stages: dict[str, list[int]] = {}
        for number, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                stage = next(s for s in range(num_stages) if number < self.parts[s + 1])
                stages = self.tied_stages.setdefault(spec.key, [])
                if stage not in stages:
                    stages.append(stage)

        self.tied_groups: dict[str, Any] = {}  # by key, the stages that have it, of this replica

    def tie(self) -> None:
        """Give all stages the tied parameters of the first one that has them. Collective."""
        replica, replicas = self.mesh.get_local_rank("dp"), self.mesh["dp"].size()
        for key, stages in self.tied_stages.items():
            for one in range(replicas if len(stages) > 1 else 0):
                group = dist.new_group([stage * replicas + one for stage in stages])
                if one == replica and self.stage_id in stages:
                    self.tied_groups[key] = group
        for key, group in self.tied_groups.items():
            first = dist.get_process_group_ranks(group)[0]
            for tensor in [*self.tied_modules[key].parameters(), *self.tied_modules[key].buffers()]:
                dist.broadcast(tensor.data, first, group=group)

    def _call_of(self, number: int, spec: Any) -> Callable[[Any], Any]:
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            module, forward_fn = self.tied_modules[spec.key], spec.forward_fn
            return module if forward_fn is None else lambda inputs: forward_fn(module, inputs)
        made = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(made, nn.Module):
            self.add_module(str(number), made)
        elif not callable(made):
            raise InvalidArgument(
                f"layer {number} is a {type(made).__name__}; it must be a module, a LayerSpec or a function"
            )
        return made

    @property
    def data_parallel_group(self) -> Any:
        """The ranks that have this stage."""
        return self.mesh.get_group("dp")

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage_id == self.num_stages - 1

    def forward(self, *inputs: Any) -> Any:
        """Run the layers of this stage."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        every = self._interval or len(self._calls)
        for begin in range(0, len(self._calls), every):
            part = self._calls[begin : begin + every]
            value = self._checkpoint(_run(part), value) if self._interval else _run(part)(value)
        return value


def _run(calls: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    return run


def _recomputed(function: Callable[[Any], Any], value: Any) -> Any:
    return checkpoint(function, value, use_reentrant=False)


def _weights(specs: Sequence[Any], method: str) -> list[int]:
    """What each layer counts for."""
    kind = method.lower()
    if kind == "uniform":
        return [1] * len(specs)
    if kind == "parameters":
        return [_parameters_of(spec) for spec in specs]
    if kind.startswith("type:"):
        wanted = re.compile(method[5:], re.IGNORECASE)
        names = [(one.typename if isinstance(one, LayerSpec) else type(one)).__name__ for one in specs]
        found = [int(wanted.search(name) is not None) for name in names]
        if not any(found):
            raise InvalidArgument(f"partition_method is {method!r}, but no layer's class is named so")
        return found
    raise InvalidArgument(f'partition_method is {method!r}; it must be "parameters", "uniform" or "type:REGEX"')


def _parameters_of(spec: Any) -> int:
    if isinstance(spec, LayerSpec):
        with torch.device("meta"):
            spec = spec.build()
    return sum(param.numel() for param in spec.parameters()) if isinstance(spec, nn.Module) else 0


def _bounds(weights: Sequence[int], parts: int) -> list[int]:
    """Where the parts begin, and the end: the largest part is as small as it can be, and none is empty."""

    def within(most: int) -> list[int] | None:
        bounds, total = [0], 0
        for i, weight in enumerate(weights):
            must_end = len(weights) - i == parts - len(bounds)  # one layer for each of the parts that are left
            if i > bounds[-1] and (total + weight > most or must_end) and len(bounds) < parts:
                bounds.append(i)
                total = 0
            total += weight
            if total > most:
                return None
        return [*bounds, len(weights)] if len(bounds) == parts else None

    low, high = max(weights), max(sum(weights), 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(middle) is not None else (middle + 1, high)
    found = within(low)
    assert found is not None
    return found


class PipelineEngine(DeepSpeedEngine):
    """An engine of a `PipelineModule`: `train_batch` and `eval_batch`, on all ranks alike."""

    module: PipelineModule

    def __init__(self, module: PipelineModule, *given: Any) -> None:
        super().__init__(module, *given)
        self._schedule: Any = None
        self._batches: Iterator[Any] | None = None

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return self.module.is_first

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self.module.is_last

    def set_dataiterator(self, iterator: Any) -> None:
        """The batches of `train_batch` without an argument."""
        self._batches = iterator

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Train on as many micro-batches as the accumulation, and step. Collective.

        Parameters
        ----------
        data_iter : iterator, optional
            Gives (inputs, labels) of this replica's micro-batches, on the ranks of the first and the last stage; by
            default the engine's loader, over and over.

        Returns
        -------
        The mean loss of all micro-batches and replicas, on all ranks.
        """
        self._check_optimizer("train_batch()")
        self._check_converges()
        losses: list[Any] = []
        with self._times.of("forward"):
            self._run(data_iter, self._accumulation, losses, trains=True)
        scale = self._loss_scale.value
        with self._times.of("step"):
            for key, group in self.module.tied_groups.items():
                for param in self.module.tied_modules[key].parameters():
                    if param.grad is not None:
                        dist.all_reduce(local(param.grad), group=group)
            self._was_applied = False
            self._step_of_optimizer(None)
            self.micro_steps += self._accumulation
        self._print_step()
        return self._mean(losses, scale)

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of as many micro-batches as the accumulation, without gradients. Collective.

        Parameters
        ----------
        data_iter : iterator
            As for `train_batch`.
        return_logits : bool
            Also return the outputs, on the ranks of the last stage; on others None.
        compute_loss : bool
            If False, return the outputs alone.
        reduce_output : str, optional
            Must be "avg".
        bcast_loss : bool
            No effect: all ranks get the loss.
        num_micro_batches : int, optional
            Another number of micro-batches.
        """
        del bcast_loss
        if reduce_output not in ("avg", None):
            raise InvalidArgument(f'reduce_output is {reduce_output!r}; it must be "avg"')
        losses: list[Any] = []
        count = num_micro_batches or self._accumulation
        outputs = self._run(data_iter, count, losses, trains=False, scores=compute_loss)
        if not compute_loss:
            return outputs
        loss = self._mean(losses, 1.0)
        return (loss, outputs) if return_logits else loss

    def _run(self, data_iter: Any, count: int, losses: list[Any], trains: bool, scores: bool = True) -> Any:
        module, given = self.module, {}
        refusal: Exception | None = None
        if module.is_first or module.is_last:
            try:
                inputs, labels = self._micro_batches(data_iter, count)
                if module.is_first:
                    given["arg_mbs"] = inputs
                if module.is_last and scores:
                    given |= {"target_mbs": labels, "losses": losses}
            except Exception as error:
                refusal = error
        self._ranks.agree(refusal)
        schedule = self._schedule_of(count)
        if trains:
            return schedule.step(return_outputs=False, **given)
        with torch.no_grad():
            return schedule.eval(**given)

    def _micro_batches(self, data_iter: Any, count: int) -> tuple[list[Any], list[Any]]:
        if data_iter is None:
            if self._batches is None and self.training_dataloader is not None:
                self._batches = RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        if data_iter is None:
            raise InvalidArgument("there is no data; pass an iterator, or training_data to initialize()")
        inputs, labels = [], []
        for i in range(count):
            try:
                batch = next(data_iter)
            except StopIteration:
                raise InvalidState(
                    f"the data ended after {i} of {count} micro-batches; use a RepeatingLoader, or fewer steps"
                ) from None
            if not isinstance(batch, (list, tuple)) or len(batch) != 2:
                raise InvalidArgument(
                    f"a micro-batch is a {type(batch).__name__}; it must be a pair of inputs and labels"
                )
            inputs.append(tuple(batch[0]) if isinstance(batch[0], (list, tuple)) else (batch[0],))
            labels.append(batch[1])
        return inputs, labels

    def _schedule_of(self, count: int) -> Any:
        from ..pipelining import Schedule1F1B, ScheduleGPipe

        if self._schedule is None or self._schedule[0] != count:
            module = self.module
            group = module.mesh.get_group("pp")
            run = self._model if isinstance(self._model, nn.Module) else module
            stage = PipelineStage(run, module.stage_id, module.num_stages, self.device, group=group)
            kind = Schedule1F1B if count >= module.num_stages else ScheduleGPipe
            self._schedule = count, kind(stage, n_microbatches=count, loss_fn=self._scaled_loss)
        return self._schedule[1]

    def _scaled_loss(self, output: Any, labels: Any) -> torch.Tensor:
        loss: torch.Tensor = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        scale = self._loss_scale.value if torch.is_grad_enabled() else 1.0
        return loss.float() * scale if scale != 1 else loss

    def _mean(self, losses: list[Any], scale: float) -> torch.Tensor:
        """Of all micro-batches and replicas."""
        module = self.module
        total = torch.zeros(())
        if module.is_last:
            total = torch.stack([loss.detach().float() for loss in losses]).mean() / scale
            dist.all_reduce(total, group=module.data_parallel_group)
            total /= self.dp_world_size
        last = dist.get_process_group_ranks(module.mesh.get_group("pp"))[-1]
        dist.broadcast(total, last, group=module.mesh.get_group("pp"))
        return total

    def _clip(self, params: list[torch.Tensor]) -> float:
        """The norm over all stages; tied parameters count once."""
        module = self.module
        again = {
            param
            for key, stages in module.tied_stages.items()
            if key in module.tied_modules and stages[0] != module.stage_id
            for param in module.tied_modules[key].parameters()
        }
        grads: list[Any] = [param.grad for param in params if param.grad is not None]
        own = norms([param.grad for param in params if param.grad is not None and param not in again], 2.0)
        total = torch.tensor([sum(norm * norm for norm in own)], dtype=torch.float64)
        dist.all_reduce(total, group=module.mesh.get_group("pp"))
        norm = float(total.sqrt())
        if self._settings.clipping and norm > 0:
            by = min(1.0, self._settings.clipping / (norm + 1e-6))
            torch._foreach_mul_([local(grad) for grad in grads], by)
        return norm

    def _names_of_all(self, names: list[str]) -> list[str]:
        """Of all stages. Collective."""
        told = self._ranks.gather("\n".join(names).encode())
        return sorted({name for one in told for name in one.decode().split("\n") if name})

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: use `train_batch` or `eval_batch`."""
        raise InvalidState("a PipelineEngine has only train_batch() and eval_batch()")

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: use `train_batch`."""
        raise InvalidState("a PipelineEngine has only train_batch() and eval_batch()")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Not there: use `train_batch`."""
        raise InvalidState("a PipelineEngine has only train_batch() and eval_batch()")


def check_pipeline(settings: Settings) -> None:
    """Refuse settings that a pipeline cannot have."""
    if settings.stage >= 2:
        raise Unsupported(
            f"zero_optimization.stage is {settings.stage}, but the model is a pipeline, whose gradients accumulate "
            "over micro-batches; use stage 0 or 1"
        )
