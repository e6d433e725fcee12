"""What test_torch_ddp.py runs: under torchrun's environment, one process a rank.

usage: torch_ddp_jobs.py checks DIRECTORY [CHECK...] | dies | late

PyTorch's own DistributedDataParallel over Gloo and Tessera's train the same models on the same ranks. Each check is a
function of this file.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import tessera as ts
import torch
import torch.distributed as dist
from tessera.torch import DistributedDataParallel as Ours
from tessera.torch import allreduce_hook
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Theirs
from torch.utils.checkpoint import checkpoint
from torch_ranks import NOTICED_S, end, patience, refused, run_checks

Build = Callable[..., nn.Module]

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
directory = ""
SMALL = {"bucket_cap_mb": 0.0005}  # some buckets


def data(step: int, *shape: int) -> torch.Tensor:
    """Other values on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


class Net(nn.Module):
    """Sizes that ranks do not divide, buffers, a frozen parameter, and one whose memory is not row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.rand(5), requires_grad=False)
        self.down = nn.Linear(12, 5)
        self.down.weight = nn.Parameter(torch.randn(12, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.up(x)))
        return torch.as_tensor(self.down(hidden) * self.scale + self.empty.sum())


class Parts(nn.Module):
    """Linear layers, of which a forward pass uses those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, which: list[int]) -> dict[str, Any]:
        for i in which:
            x = torch.tanh(self.parts[i](x))
        return {"out": [x], "count": len(which)}


@dataclass
class Run:
    """What a training told: compared between both kinds."""

    losses: list[torch.Tensor]
    grads: list[dict[str, torch.Tensor | None]]
    state: dict[str, torch.Tensor]

    def check(self, other: Run, what: str, **tolerance: float) -> None:
        for name, one, two in [
            ("loss", self.losses, other.losses),
            ("gradient", self.grads, other.grads),
            ("state", self.state, other.state),
        ]:
            torch.testing.assert_close(one, two, msg=lambda text, name=name: f"{what}, {name}: {text}", **tolerance)


def model_of(kind: Callable[[], nn.Module]) -> nn.Module:
    """Another one on each rank, so that what the ranks agree on is rank 0's."""
    torch.manual_seed(rank)
    return kind()


Loss = Callable[[nn.Module, int], torch.Tensor]


def loss_of_net(model: nn.Module, step: int) -> torch.Tensor:
    return torch.as_tensor(model(data(step, 8, 6)).square().mean())


def train(
    model: nn.Module,
    loss_of: Loss = loss_of_net,
    steps: int = 4,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    zero: bool = True,
) -> Run:
    """Steps with an optimizer that keeps state; of `accumulate` backward passes all but the last are without
    synchronisation."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    run = Run([], [], {})
    for step in range(steps):
        for turn in range(accumulate):
            with model.no_sync() if turn + 1 < accumulate else nullcontext():
                loss = loss_of(model, step * accumulate + turn)
                loss.backward()
        run.losses.append(loss.detach())
        run.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        if zero:
            optimizer.zero_grad(set_to_none=set_to_none)
    run.state = {name: value.clone() for name, value in model.state_dict().items()}
    return run


def both(
    what: str,
    kind: Callable[[], nn.Module] = Net,
    loss_of: Loss = loss_of_net,
    options: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], object] = lambda _: None,
    tolerance: dict[str, float] | None = None,
    **how: Any,
) -> None:
    """PyTorch's and ours are one."""
    runs = []
    for build in (Theirs, Ours):
        model = build(model_of(kind), **{**SMALL, **(options or {})})
        prepare(model)
        runs.append(train(model, loss_of, **how))
    runs[1].check(runs[0], what, **(tolerance or {}))


# ---------------------------------------------------------------- options


def losses_and_gradients() -> None:
    both("defaults", options={"bucket_cap_mb": None})
    both("small buckets")
    both("zeroed gradients", set_to_none=False)
    both("views", options={"gradient_as_bucket_view": True})
    both("no zero_grad at all", zero=False)
    both("accumulation", accumulate=3)
    both("accumulation of views", accumulate=2, options={"gradient_as_bucket_view": True}, set_to_none=False)


def buffers() -> None:
    both("own buffers", options={"broadcast_buffers": False})
    both("buffers at the beginning", options={"forward_sync_buffers": False})

    def replaces(model: nn.Module) -> None:
        """A module that makes its buffers anew, and one whose memory has gaps."""
        net = model.module
        net.norm.running_mean = torch.zeros(24)[::2] + rank

        def anew(module: nn.Module, _: Any) -> None:
            module.running_var = module.running_var * 2 + rank

        net.norm.register_forward_pre_hook(anew)

    both("buffers that are replaced", prepare=replaces)
    model = Ours(model_of(Net))
    model.module.norm.running_mean = torch.zeros(3)
    refused(ts.InvalidState, "'norm.running_mean'", lambda: model(data(0, 8, 6)))


def without_synchronisation_at_the_beginning() -> None:
    """Ranks keep their values, and average gradients."""
    both("init_sync", options={"init_sync": False, "broadcast_buffers": False})


def what_the_model_ignores() -> None:
    def build(wrap: Build) -> Run:
        net = model_of(Net)
        wrap._set_params_and_buffers_to_ignore_for_model(net, ["up.bias", "norm.running_mean"])
        return train(wrap(net, **SMALL))

    build(Ours).check(build(Theirs), "ignored")


def unused_parameters() -> None:
    def some(model: nn.Module, step: int) -> torch.Tensor:
        """Part 0 always; 1 on rank 0; 2 in odd steps on the last rank; 3 never."""
        which = [0] + [1] * (rank == 0) + [2] * (step % 2 == 1 and rank == ranks - 1)
        return torch.as_tensor(model(data(step, 3, 4), which)["out"][0].square().mean())

    found = {"find_unused_parameters": True}
    both("unused", Parts, some, found)
    both("unused, zeroed", Parts, some, found, set_to_none=False)
    both("unused, accumulated", Parts, some, found, accumulate=2)
    both("unused, kept", Parts, some, {**found, "gradient_as_bucket_view": True}, zero=False)

    def same(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(data(step, 3, 4), [0, 2])["out"][0].square().mean())

    both("static", Parts, same, {"static_graph": True})
    both("skipped", Parts, same, {**found, "skip_all_reduce_unused_params": True})
    expected = train(Theirs(model_of(Parts), **found), same, accumulate=2)  # which cannot do this with static_graph
    train(Ours(model_of(Parts), static_graph=True), same, accumulate=2).check(expected, "static, accumulated")

    model = Ours(model_of(Parts))
    refused(
        ts.InvalidState,
        "2 of 8 gradients are missing",
        lambda: model(data(0, 3, 4), [0, 1, 2])["out"][0].sum().backward(),
    )
    refused(ts.InvalidState, "'parts.3.weight', 'parts.3.bias'", lambda: model._gradients.ended())
    refused(ts.InvalidState, "ended with an error", lambda: model(data(0, 3, 4), [0]))
    static = Ours(model_of(Parts), static_graph=True)
    same(static, 0).backward()

    def other(model: nn.Module) -> None:
        model(data(1, 3, 4), [0, 1, 2])["out"][0].sum().backward()

    refused(ts.InvalidState, "not in the first step", lambda: other(static))

    both("static, said later", Parts, same, prepare=lambda model: model._set_static_graph())
    begun = Ours(model_of(Parts), **found)
    same(begun, 0).backward()
    refused(ts.InvalidState, "should be called before training loop starts", begun._set_static_graph)


def checkpointed_activations() -> None:
    def reentrant(model: nn.Module, step: int, use_reentrant: bool = True) -> torch.Tensor:
        x = data(step, 3, 4).requires_grad_()

        def inner(x: torch.Tensor) -> torch.Tensor:
            for part in model.module.parts[:3]:
                x = checkpoint(part, x, use_reentrant=use_reentrant)
            return model.module.parts[3](checkpoint(model.module.parts[0], x, use_reentrant=use_reentrant))

        plain, model.module.forward = model.module.forward, inner
        try:
            return torch.as_tensor(model(x).square().mean())
        finally:
            model.module.forward = plain

    def once(model: nn.Module, step: int) -> torch.Tensor:
        """Three parts in passes inside the one that the last part is in."""
        plain = model.module.forward

        def inner(x: torch.Tensor) -> torch.Tensor:
            for part in model.module.parts[:3]:
                x = checkpoint(part, x, use_reentrant=True)
            return torch.as_tensor(model.module.parts[3](x))

        model.module.forward = inner
        try:
            return torch.as_tensor(model(data(step, 3, 4).requires_grad_()).square().mean())
        finally:
            model.module.forward = plain

    both("checkpointed once, reentrant", Parts, once)
    both("checkpointed", Parts, lambda model, step: reentrant(model, step, use_reentrant=False))
    both("checkpointed, reentrant, a part used twice", Parts, reentrant, {"static_graph": True})
    model = Ours(model_of(Parts))
    refused(ts.InvalidState, "was written again in the same step", lambda: reentrant(model, 0).backward())


def backward_passes_of_many_kinds() -> None:
    """Several forward passes in one, one forward pass in several, passes that are none of the model's."""

    def siamese(model: nn.Module, step: int) -> torch.Tensor:
        return loss_of_net(model, step) + loss_of_net(model, step + 50)

    both("two forward passes", loss_of=siamese, options={"broadcast_buffers": False})

    model, theirs = Ours(model_of(Net), **SMALL), Theirs(model_of(Net), **SMALL)
    loss = loss_of_net(model, 1)
    loss.backward(retain_graph=True)
    loss.backward()  # averages the sum of what is averaged and what is not
    with theirs.no_sync():
        loss_of_net(theirs, 1).backward()
    theirs.module.norm.load_state_dict(model.module.norm.state_dict())
    x = torch.ones(3, requires_grad=True)
    (model.module.scale.sum() * x.sum()).backward()
    for (name, one), two in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if two.grad is not None:
            sums = two.grad.clone()
            dist.all_reduce(sums)
            torch.testing.assert_close(one.grad, 2 * sums / ranks, msg=lambda text, name=name: f"{name}: {text}")
    refused(ts.InvalidState, "set require_manual", model.finalize_backward)
    model.require_manual_backward_finalization = True
    model.zero_grad()
    loss_of_net(model, 2).backward()
    refused(ts.InvalidState, "finalize_backward()", lambda: loss_of_net(model, 2))
    model.finalize_backward()
    loss_of_net(model, 3).backward()
    model.finalize_backward()


def types_of_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
            self.narrow = nn.Parameter(torch.randn(7).half())
            self.brain = nn.Parameter(torch.randn(5, 1).bfloat16())
            self.complex = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
            self.image = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
            self.number = nn.Parameter(torch.randn(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.wide, self.narrow, self.brain, self.complex.abs(), self.image(x), self.number]
            return torch.stack([part.double().square().sum() for part in parts]).sum() * x.mean()

    class Tied(nn.Module):
        """One weight in two places."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.words.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.out(self.words(words)))

    both("tied", Tied, lambda model, step: model((torch.arange(4) + step + rank) % 7).square().mean())

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(data(step, 2, 2, 5, 5)))

    both("types", Mixed, loss_of, steps=2, tolerance={"rtol": 1e-2, "atol": 1e-3})
    model = Ours(model_of(Mixed))
    loss_of(model, 0).backward()
    assert model.module.image.weight.grad.is_contiguous(memory_format=torch.channels_last)
    refused(ts.Unsupported, "'weight' is on meta", lambda: Ours(nn.Linear(2, 2, device="meta")))


class Words(nn.Module):
    """Tables with sparse gradients before the rest; each rank and step uses rows of its own, some of them twice.

    In f64, as rows of few kinds have next to no variance, by which the BatchNorm divides what is left of the gradient
    of a bias before it: rounding alone."""

    def __init__(self, sparse: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(7, 6, mode="sum", sparse=sparse)
        self.rest = Net()
        self.to(dtype)

    def forward(self, step: int, uses_bags: bool = True) -> torch.Tensor:
        x = self.words((torch.arange(8) * (step + 2)) % (rank + 3))
        if uses_bags:
            x = x + self.bags(torch.arange(16).view(8, 2) % (rank + step % 3 + 1))
        return torch.as_tensor(self.rest(x).square().mean())


def sparse_gradients() -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(step))

    both("sparse", Words, loss_of)
    f32 = {"rtol": 1e-4, "atol": 1e-3}
    both("sparse, f32", lambda: Words(dtype=torch.float32), loss_of, tolerance=f32)
    both("sparse, zeroed", Words, loss_of, set_to_none=False)
    both("sparse, added up", Words, loss_of, zero=False)
    both("sparse, accumulated", Words, loss_of, accumulate=3)
    both("sparse, a rank's own values", Words, loss_of, {"init_sync": False, "broadcast_buffers": False})
    both("sparse, static", Words, loss_of, {"static_graph": True})
    both("nothing else", lambda: nn.Embedding(5, 3, sparse=True), lambda model, step: model(torch.tensor(rank)).sum())

    # PyTorch's takes no sparse parameter that has no gradient, so it gets dense ones.
    def some(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(step, uses_bags=step == 2 and rank == 0))

    found = {"find_unused_parameters": True}
    theirs = train(Theirs(model_of(lambda: Words(sparse=False)), **found), some)
    ours = train(Ours(model_of(Words), **found), some)
    for step, grads in enumerate(ours.grads):
        for name in ("module.words.weight", "module.bags.weight"):
            grad, expected = grads[name], theirs.grads[step][name]
            assert (grad is None) == (name == "module.bags.weight" and step != 2), (step, name)
            if grad is not None:
                assert grad.layout is torch.sparse_coo and grad.is_coalesced()
                assert grad._nnz() < len(grad), "rows that no rank used have no entries"
                torch.testing.assert_close(grad.to_dense(), expected)
                of_ranks = [torch.empty_like(expected) for _ in range(ranks)]
                dist.all_gather(of_ranks, grad.to_dense())
                assert all(torch.equal(one, of_ranks[0]) for one in of_ranks), "the same bits"
    for name, value in ours.state.items():
        torch.testing.assert_close(value, theirs.state[name], msg=lambda text, name=name: f"unused, {name}: {text}")

    def hooked(model: nn.Module) -> None:
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    both("sparse, by a hook", Words, loss_of, prepare=hooked)
    model, lasts = Ours(model_of(Words), **SMALL), []

    def doubles(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        lasts.append((bucket.index(), bucket.is_last(), bucket.buffer().is_sparse))
        assert [part.shape for part in bucket.gradients()] == [param.shape for param in bucket.parameters()]
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    expected = train(Ours(model_of(Words), **SMALL), loss_of, steps=1)
    model.register_comm_hook(None, doubles)
    seen = train(model, loss_of, steps=1)
    for name, grad in seen.grads[0].items():
        if grad is not None:
            torch.testing.assert_close(grad, expected.grads[0][name] * 2 * ranks)
    dense = len(lasts) - 2
    assert [index for index, _, _ in lasts[:dense]] == sorted({index for index, _, _ in lasts[:dense]})
    assert lasts[dense:] == [(lasts[dense - 1][0] + 1, False, True), (lasts[dense - 1][0] + 2, True, True)]
    assert not any(is_last or is_sparse for _, is_last, is_sparse in lasts[:dense])


def what_sparse_gradients_cannot() -> None:
    def joins() -> None:
        with Ours(model_of(Words)).join():
            pass

    refused(ts.Unsupported, "'words.weight' has sparse gradients", joins)
    with (model := Ours(model_of(Words))).join(throw_on_early_termination=True):
        model(0).backward()
    refused(ts.Mismatch, '"weight"', lambda: Ours(nn.Embedding(3 + rank % 2, 3, sparse=True)))
    refused(ts.Mismatch, '"weight"', lambda: Ours(nn.Embedding(3, 3, sparse=rank % 2 == 0)))

    class Tied(nn.Module):
        """Dense by its second use."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.words(words) @ self.words.weight.t()

    class Hidden(nn.Module):
        """Sparse, and no module says so."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 4))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(words, self.table, sparse=True)

    for kind, layout in ((Tied, "torch.strided"), (Hidden, "torch.sparse_coo")):
        model = Ours(kind())
        refused(ts.Unsupported, f"is {layout}; ", lambda model=model: model(torch.arange(3)).sum().backward())


class Jumbled(nn.Module):
    """Registered in an order that is not that of use; the memory of each weight fills half a bucket of 2 KiB."""

    USE = (3, 0, 5, 1, 4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in self.USE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.USE:
            x = torch.tanh(self.parts[i](x))
        return x


def buckets_in_the_order_of_use() -> None:
    """From the second step on, as PyTorch's; gradients stay where they are."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(data(step, 3, 16)).square().mean())

    pairs = {"bucket_cap_mb": 2048 / 2**20}
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        both(f"rebuilt {options}", Jumbled, loss_of, {**pairs, **options}, set_to_none=False)
    both("rebuilt, accumulated", Jumbled, loss_of, pairs, accumulate=2)

    def told(wrap: Build, **options: Any) -> list[list[tuple[set[int], bool]]]:
        """Of each step and bucket, which parts are in it and whether it is the last."""
        model = wrap(model_of(Jumbled), **pairs, **options)
        number = {id(part.weight): i for i, part in enumerate(model.module.parts)}
        steps: list[list[tuple[set[int], bool]]] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch compares annotations
            steps[-1].append(({number[id(param)] for param in bucket.parameters()}, bucket.is_last()))
            assert bucket.index() == len(steps[-1]) - 1
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
        places = []
        for step in range(3):
            steps.append([])
            loss_of(model, step).backward()
            places.append([param.grad.data_ptr() for param in model.parameters()])
            model.zero_grad()
        assert wrap is Theirs or places == [places[0]] * 3
        return steps

    registered = [({5, 4}, False), ({3, 2}, False), ({1, 0}, True)]
    used = [({2, 4}, False), ({1, 5}, False), ({0, 3}, True)]
    assert told(Ours) == [registered, used, used]
    assert told(Theirs)[1:] == [used, used]
    assert told(Ours, static_graph=True) == [registered, used, used]
    assert told(Ours, find_unused_parameters=True) == [registered] * 3  # as PyTorch's: steps may differ


def reduced_in_bf16() -> None:
    model = Ours(model_of(Net), mixed_precision=SimpleNamespace(reduce_dtype=torch.bfloat16), **SMALL)
    train(model).check(train(Theirs(model_of(Net), **SMALL)), "bf16", rtol=0.05, atol=0.02)
    for kind in ("param_dtype", "buffer_dtype"):
        policy = SimpleNamespace(**{kind: torch.bfloat16})
        refused(ts.Unsupported, kind, lambda policy=policy: Ours(model_of(Net), mixed_precision=policy))


def delayed_all_reduce() -> None:
    """Beside PyTorch's without a delay: with it, PyTorch's does not wait for the sum, and steps with what is there."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(data(step, 3, 4), [0, 1, 2, 3])["out"][0].square().mean())

    net = model_of(Parts)
    late = [(name, param) for name, param in net.named_parameters() if not name.startswith("parts.0")]
    first = net.parts[0].bias
    model = Ours(net, delay_all_reduce_named_params=late, param_to_hook_all_reduce=first)
    train(model, loss_of).check(train(Theirs(model_of(Parts)), loss_of), "delayed")
    refused(ts.InvalidArgument, "together", lambda: Ours(model_of(Parts), param_to_hook_all_reduce=first))
    stranger = [("x", nn.Parameter(torch.ones(1)))]
    refused(
        ts.InvalidArgument,
        "'x'",
        lambda: Ours(model_of(Parts), delay_all_reduce_named_params=stranger, param_to_hook_all_reduce=first),
    )


# ---------------------------------------------------------------- ranks


def ranks_of_many_kinds() -> None:
    """A group of ours, of Gloo, some of the ranks, a mesh, a communicator."""
    expected = train(Theirs(model_of(Net), **SMALL))
    from torch.distributed.device_mesh import init_device_mesh

    group = dist.new_group(backend="tessera")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for how in ({"process_group": group}, {"device_mesh": mesh}):
        train(Ours(model_of(Net), **SMALL, **how)).check(expected, str(how))
    from tessera.torch.meeting import communicator_of

    comm = communicator_of(None).split(0, rank, name="the program's")
    train(Ours(model_of(Net), **SMALL, process_group=comm)).check(expected, "a communicator")
    comm.close()
    train(Theirs(model_of(Net), process_group=group)).check(expected, "theirs on our backend")

    pairs = [dist.new_group([2 * i, 2 * i + 1]) for i in range(ranks // 2)]
    pair = pairs[rank // 2]
    train(Ours(model_of(Net), process_group=pair)).check(train(Theirs(model_of(Net), process_group=pair)), "pairs")
    grid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
    refused(ts.InvalidArgument, "2 dimensions", lambda: Ours(model_of(Net), device_mesh=grid))
    refused(ts.InvalidArgument, "both", lambda: Ours(model_of(Net), device_mesh=mesh, process_group=pair))


def several_models() -> None:
    """Two in one step, as in adversarial training; and what is gone takes nothing along."""

    def trained(wrap: Build) -> list[torch.Tensor]:
        makes, judges = wrap(model_of(Net), **SMALL), wrap(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), **SMALL)
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (makes, judges)]
        losses = []
        for step in range(3):
            judged = judges(makes(data(step, 8, 6)).detach()).square().mean()
            judged.backward()
            optimizers[1].step()
            for parameter in judges.parameters():
                parameter.requires_grad_(False)
            made = judges(makes(data(step, 8, 6))).mean()
            made.backward()
            for parameter in judges.parameters():
                parameter.requires_grad_(True)
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += [judged.detach(), made.detach()]
        return losses

    torch.testing.assert_close(trained(Ours), trained(Theirs))
    net = model_of(Net)
    model = Ours(net)
    loss_of_net(model, 0).backward()
    kept = net.up.weight.grad
    value, alive = kept.clone(), weakref.ref(model)
    del model
    assert alive() is None
    loss_of_net(net, 1).backward()  # averages nothing any more
    assert not torch.equal(net.up.weight.grad, value)
    assert kept is net.up.weight.grad


# ---------------------------------------------------------------- join


def uneven_inputs() -> None:
    def trained(wrap: Build, accumulate: int = 1, **how: Any) -> dict[str, torch.Tensor]:
        model = wrap(model_of(Net), **SMALL)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for _ in range(2):
            with model.join(**how):
                for step in range(2 + 2 * rank):
                    with model.no_sync() if (step + 1) % accumulate else nullcontext():
                        loss_of_net(model, step).backward()
                    if (step + 1) % accumulate == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        means = [torch.empty(12) for _ in range(ranks)]
        dist.all_gather(means, model.module.norm.running_mean)
        assert all(torch.equal(mean, means[0]) for mean in means)
        return {name: param.detach() for name, param in model.named_parameters()}

    for how in ({}, {"divide_by_initial_world_size": False}, {"accumulate": 2}):
        ours, theirs = trained(Ours, **how), trained(Theirs, **how)
        torch.testing.assert_close(ours, theirs, msg=lambda text, how=how: f"{how}: {text}")

    model = Ours(model_of(Net))
    with model.join(enable=False):
        loss_of_net(model, 0).backward()

    def ends_early() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + (rank > 0)):
                loss_of_net(model, step).backward()

    refused(ts.InvalidState, "ranks without data left: 0;", ends_early)
    with model.join(throw_on_early_termination=True):
        loss_of_net(model, 0).backward()
    from torch.distributed.algorithms.join import Join

    refused(ts.Unsupported, "model.join()", lambda: Join([model]))


# ---------------------------------------------------------------- hooks


def communication_hooks() -> None:
    def hooked(hook: Any, state: Callable[[], object] = lambda: None) -> Callable[[Any], object]:
        return lambda model: model.register_comm_hook(state(), hook)

    def doubling(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch compares annotations
        parts = bucket.gradients()
        assert [part.shape for part in parts] == [param.shape for param in bucket.parameters()]
        largest = max(parts, key=torch.numel)
        assert largest.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 2)

    both("a hook", prepare=hooked(doubling))
    both("PyTorch's hook", prepare=hooked(default_hooks.allreduce_hook))
    both("f16", prepare=hooked(default_hooks.fp16_compress_hook), tolerance={"rtol": 1e-3, "atol": 1e-3})

    def power() -> object:
        return powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
        )

    def whole(model: nn.Module, step: int) -> torch.Tensor:
        return torch.as_tensor(model(data(step, 3, 4), [0, 1, 2, 3])["out"][0].square().mean())

    one_bucket, close = {"bucket_cap_mb": 25}, {"rtol": 1e-4, "atol": 1e-5}
    both("PowerSGD", Parts, whole, one_bucket, hooked(powerSGD_hook.powerSGD_hook, power), close)

    model = Ours(model_of(Net), **SMALL)
    lasts = []

    def replaces(state: list[bool], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        state.append((bucket.index(), bucket.is_last()))
        bucket.set_buffer(torch.full_like(bucket.buffer(), 7))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(lasts, replaces)
    loss_of_net(model, 0).backward()
    assert model.module.up.weight.grad.eq(7).all()
    assert lasts == [(i, i + 1 == len(model.stats())) for i in range(len(model.stats()))]
    refused(ts.InvalidState, "one can be registered", lambda: model.register_comm_hook(None, replaces))
    refused(TypeError, "hook(state, bucket)", lambda: Ours(model_of(Net)).register_comm_hook(None, 3))
    refused(TypeError, "cannot be called", lambda: Ours(model_of(Net)).register_comm_hook(None, lambda bucket: bucket))

    def of_number(state: object, bucket: int) -> Any:
        return bucket

    def of_list(state: object, bucket: list[dist.GradBucket]) -> torch.futures.Future[torch.Tensor]:
        return replaces([], bucket)

    def to_tensor(state: object, bucket: dist.GradBucket) -> torch.Tensor:
        return bucket.buffer()

    def to_number(state: object, bucket: Any) -> torch.futures.Future[int]:
        return torch.futures.Future()

    model = Ours(model_of(Net))
    for hook, text in (
        (of_number, "<class 'int'>; expected GradBucket"),
        (of_list, "expected GradBucket"),
        (to_tensor, "<class 'torch.Tensor'>; expected torch.futures.Future"),
        (to_number, "[int]; expected torch.futures.Future"),
    ):
        refused(ts.InvalidArgument, text, lambda hook=hook: model.register_comm_hook(None, hook))
        if text.startswith("<"):
            hook.__annotations__ = inspect.get_annotations(hook, eval_str=True)
            refused(ts.InvalidArgument, text, lambda hook=hook: model.register_comm_hook(None, hook))

    def unknown(state: object, bucket: Nowhere) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        return allreduce_hook(None, bucket)

    for hook in (unknown, allreduce_hook, default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook):
        Ours(model_of(Net)).register_comm_hook(None, hook)
    groups = [dist.new_group([one]) for one in range(ranks)]  # the failures of some come to the others as Aborted

    def fails(state: object, bucket: Any) -> Any:
        raise OSError("no route")

    def gives_too_little(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.ones(1))
        return future

    for hook, cause in ((fails, "no route"), (gives_too_little, "one tensor of")):
        model = Ours(model_of(Net), process_group=groups[rank])
        model.register_comm_hook(None, hook)
        try:
            loss_of_net(model, 0).backward()
        except ts.UserError as error:
            assert cause in str(error.__cause__), error.__cause__
        else:
            raise AssertionError(cause)


# ---------------------------------------------------------------- state


def states() -> None:
    """Of PyTorch's into ours and back; and a job that is resumed goes on as if it had never ended."""
    import tessera.torch.checkpoint as dcp
    from tessera.torch.checkpoint.state_dict import get_state_dict, set_state_dict

    ours, theirs = Ours(model_of(Net), **SMALL), Theirs(model_of(Net), **SMALL)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, Theirs)
    train(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.module.load_state_dict(theirs.module.state_dict())

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
        loss = loss_of_net(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizer = optimizer_of(ours)
    for number in range(3):
        step(ours, optimizer, number)
    model_state, optimizer_state = get_state_dict(ours, optimizer)
    assert not any(name.startswith("module.") for name in model_state)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{directory}/state")
    expected = [step(ours, optimizer, number) for number in range(3, 6)]
    for build in (Ours, Theirs):
        torch.manual_seed(99)
        again = build(Net(), **SMALL)
        optimizer = optimizer_of(again)
        step(again, optimizer, 0)
        state = dict(zip(("model", "optim"), get_state_dict(again, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{directory}/state")
        set_state_dict(again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        torch.testing.assert_close([step(again, optimizer, number) for number in range(3, 6)], expected)


def pickled_and_copied() -> None:
    """As PyTorch's, of the default process group: each goes on from where the model was."""
    model = Ours(model_of(Net), **SMALL, find_unused_parameters=True)
    loss_of_net(model, 0).backward()
    file = io.BytesIO()
    torch.save(model.eval(), file)
    file.seek(0)
    alone = torch.load(file, weights_only=False)
    assert not alone.training
    assert alone.state_dict().keys() == model.state_dict().keys()  # for which no rank is asked
    for other in (alone, copy.deepcopy(model)):
        seen: list[object] = []
        other.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert other.find_unused_parameters
        model.zero_grad()
        for one in (model, other.train()):
            one.train()
            loss_of_net(one, 1).backward()
        assert seen
        for got, expected in zip(other.parameters(), model.parameters(), strict=True):
            assert got is not expected
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=0)
        assert len(other.stats()) == len(model.stats())
        model.eval()
    group = dist.new_group(list(range(ranks)))
    refused(TypeError, "model.module", lambda: pickle.dumps(Ours(model_of(Net), process_group=group)))


def signature() -> None:
    """PyTorch's, and none of its methods runs by inheritance."""
    own, other = (list(inspect.signature(kind).parameters.items()) for kind in (Ours, Theirs))
    assert [(name, one.default, one.kind) for name, one in own] == [
        (name, one.default, one.kind) for name, one in other
    ]
    public = {name for name in vars(Theirs) if not name.startswith("_")}
    assert public <= set(vars(Ours)), public - set(vars(Ours))
    for name in public:
        one, two = getattr(Ours, name), getattr(Theirs, name)
        if inspect.isfunction(two) and name not in ("forward", "scatter", "gather", "to_kwargs", "join_hook"):
            assert list(inspect.signature(one).parameters) == list(inspect.signature(two).parameters), name


def what_is_refused() -> None:
    for options, kind, text in [
        ({"device_ids": [0]}, ts.InvalidArgument, "device_ids is [0]"),
        ({"output_device": 0}, ts.InvalidArgument, "output_device is 0"),
        ({"bucket_cap_mb": 0}, ts.InvalidArgument, "bucket_cap_mb is 0"),
        ({"bucket_cap_mb_list": [1, 25]}, ts.Unsupported, "bucket_cap_mb_list"),
        ({"mixed_precision": SimpleNamespace(reduce_dtype=torch.int8)}, ts.InvalidArgument, "i8"),
    ]:
        refused(kind, text, lambda options=options: Ours(model_of(Net), **options))
    refused(ts.InvalidArgument, "requires a gradient", lambda: Ours(nn.Linear(2, 2).requires_grad_(False)))
    refused(ts.InvalidState, "'weight' has no shape yet", lambda: Ours(nn.LazyLinear(2)))
    refused(ts.Unsupported, "SyncBatchNorm", lambda: Ours(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))))
    refused(ts.Unsupported, "memory has gaps", lambda: Ours(nn.ParameterList([nn.Parameter(torch.ones(4, 4)[:, ::2])])))
    refused(ts.Mismatch, '"weight"', lambda: Ours(nn.Linear(2, 2 + rank % 2)))
    refused(ts.Mismatch, "find_unused", lambda: Ours(nn.Linear(2, 2), find_unused_parameters=bool(rank % 2)))
    model = Ours(model_of(Net))
    for method in (model._get_ddp_logging_data, lambda: model._set_ddp_runtime_logging_sample_rate(1)):
        refused(ts.Unsupported, "stats()", method)
    for method in ("scatter", "gather"):
        refused(
            ts.Unsupported, method, lambda method=method: getattr(model, method)(1, *[2] * (1 + (method == "scatter")))
        )
    refused(ts.Unsupported, "to_kwargs", lambda: model.to_kwargs(1, 2, 3))
    for parameter in model.parameters():
        parameter._in_backward_optimizers = []
    refused(ts.Unsupported, "apply_optimizer_in_backward", lambda: loss_of_net(model, 0))


def parameters_that_would_not_be_averaged() -> None:
    """PyTorch's own lets each rank train them alone, in silence."""

    def unfreeze(model: Net) -> None:
        model.scale.requires_grad_(True)

    def replace(model: Net) -> None:
        model.up.bias = nn.Parameter(torch.zeros(12))

    def add(model: Net) -> None:
        model.more = nn.Parameter(torch.zeros(3))

    for change, name in ((unfreeze, "'scale'"), (replace, "'up.bias'"), (add, "'more'")):
        net = Net()
        model = Ours(net)
        loss_of_net(model, 0).backward()
        change(net)
        refused(ts.InvalidState, f"gradients of {name} would not be averaged", partial(loss_of_net, model, 1))
        with torch.no_grad():
            loss_of_net(model, 1)
        net.get_parameter(name.strip("'")).requires_grad_(False)
        if change is not replace:  # else a gradient is missing
            loss_of_net(model, 1).backward()
    ignored = Net()
    ignored._ddp_params_and_buffers_to_ignore = ["scale"]  # type: ignore[assignment]
    model = Ours(ignored)
    ignored.scale.requires_grad_(True)
    loss_of_net(model, 0).backward()
    assert ignored.scale.grad is not None


CHECKS = [
    losses_and_gradients,
    parameters_that_would_not_be_averaged,
    buffers,
    without_synchronisation_at_the_beginning,
    what_the_model_ignores,
    unused_parameters,
    checkpointed_activations,
    backward_passes_of_many_kinds,
    types_of_parameters,
    reduced_in_bf16,
    sparse_gradients,
    what_sparse_gradients_cannot,
    buckets_in_the_order_of_use,
    delayed_all_reduce,
    ranks_of_many_kinds,
    several_models,
    uneven_inputs,
    communication_hooks,
    states,
    pickled_and_copied,
    signature,
    what_is_refused,
]


@contextmanager
def job() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(60)))
    yield
    dist.destroy_process_group()


def checks(where: str, *names: str) -> None:
    global directory
    directory = where
    warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of broadcast_buffers
    with job():
        run_checks(CHECKS, names, rank)


def dies() -> None:
    """The last rank is killed in the middle of a backward pass; the others are told whom they lost."""
    with job():
        model = Ours(model_of(Net), **SMALL)
        loss_of_net(model, 0).backward()
        if rank == ranks - 1:
            model.module.up.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        since = time.monotonic()
        refused(ts.PeerLost, f"rank {ranks - 1}", loss_of_net(model, 1).backward)
        assert time.monotonic() - since < NOTICED_S
        os._exit(0)  # Gloo's store has lost a rank


def late() -> None:
    """The last rank comes to its backward pass when the others have given it up: at their deadline they name it."""
    with job():
        model = Ours(model_of(Net), **SMALL)
        assert model._gradients.comm.timeout == patience(60), "the group's"
        loss_of_net(model, 0).backward()
        loss = loss_of_net(model, 1)
        if rank < ranks - 1:
            model._gradients.comm.timeout = 1.5
            refused(ts.TesseraTimeout, f"rank {ranks - 1} (pid ", loss.backward)
            dist.monitored_barrier(timeout=timedelta(seconds=patience(40)))
        else:
            dist.monitored_barrier(timeout=timedelta(seconds=patience(40)))  # the others have given up
            refused(ts.TesseraTimeout, f"rank {ranks - 1} (pid {os.getpid()}", loss.backward)
        refused(ts.InvalidState, "ended with an error", lambda: loss_of_net(model, 2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    end()
