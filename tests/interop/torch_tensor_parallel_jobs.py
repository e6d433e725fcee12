"""What test_torch_tensor_parallel.py runs: under torchrun's environment, one process a rank, on the backend "tessera".

usage: torch_tensor_parallel_jobs.py [CHECK...]

Results are compared with those of one process, which each rank computes too, and with PyTorch's functions over Gloo.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import tessera as ts
import tessera.torch.fsdp as our_fsdp
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp as their_fsdp
import torch.nn.functional as F
from tessera.torch.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as theirs
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from torch_ranks import end, patience, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
EXACT = {"rtol": 1e-12, "atol": 1e-12}
mesh: DeviceMesh
gloo: DeviceMesh


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param.grad) for name, param in model.named_parameters()}


def expect(got: Any, expected: Any, what: str, **tolerance: float) -> None:
    tolerance = tolerance or EXACT
    torch.testing.assert_close(full(got), expected, msg=lambda text: f"{what}: {text}", equal_nan=True, **tolerance)


# ---------------------------------------------------------------- layers


class Mlp(nn.Module):
    def __init__(self, inner: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up = nn.Linear(6, inner, bias=bias, dtype=dtype)
        self.down = nn.Linear(inner, 5, bias=bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def passed(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"output": y.detach(), "input": x.grad, **gradients(model)}


def linear_layers() -> None:
    """By columns and then by rows; with sizes that the ranks do not divide, and ranks without any column."""
    for inner, dtype in itertools.product((8, 13, 1, 5), (torch.float64, torch.float32)):
        tolerance = EXACT if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.manual_seed(inner)
        whole = Mlp(inner, dtype=dtype)
        x = torch.randn(4, 3, 6, dtype=dtype)
        expected = passed(whole, x)
        parts = parallelize_module(copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        first, count = cut(inner)
        assert parts.up.weight.to_local().equal(whole.up.weight[first : first + count])
        assert parts.down.bias.placements == (Replicate(),)
        got = passed(parts, x)
        expect(got, expected, f"{inner} {dtype}", **tolerance)
        if inner % ranks == 0 and inner > 1:  # what PyTorch can
            plan = {"up": theirs.ColwiseParallel(), "down": theirs.RowwiseParallel()}
            other = passed(theirs.parallelize_module(copy.deepcopy(whole), gloo, plan), x)
            expect(got, other, f"PyTorch, {inner} {dtype}", **tolerance)
    for layer in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        whole_layer = nn.Linear(13, 13, dtype=torch.float64)
        dist.broadcast(whole_layer.weight.data, 0)
        dist.broadcast(whole_layer.bias.data, 0)
        x = torch.arange(26, dtype=torch.float64).reshape(2, 13)
        expect(
            passed(parallelize_module(copy.deepcopy(whole_layer), mesh, layer), x), passed(whole_layer, x), f"{layer}"
        )
    if ranks > 1:
        rows = parallelize_module(nn.Linear(13, 5), mesh, RowwiseParallel())
        refused(ValueError, "it is not sharded: pass input_layouts=Replicate()", lambda: rows(torch.ones(2, 13)))
        refused(ValueError, "the input has 14 columns", lambda: rows(torch.ones(2, 14)))


def cut(size: int) -> tuple[int, int]:
    """The first index and the number of indices of this rank, as PyTorch cuts them."""
    parts = torch.arange(size).chunk(ranks)
    own = parts[rank].tolist() if rank < len(parts) else []
    return (own[0] if own else size), len(own)


def embeddings() -> None:
    """By rows, for ids at the borders of the ranks; also where ranks have no rows. And by columns."""
    for size, padding in ((12, None), (9, 8), (13, 4), (3, None), (1, None)):
        torch.manual_seed(size)
        whole = nn.Embedding(size, 4, padding_idx=padding, dtype=torch.float64)
        ids = (torch.arange(24) % size).view(2, 12)
        factor = torch.randn(2, 12, 4, dtype=torch.float64)
        expected = whole(ids)
        (expected * factor).sum().backward()
        first, count = cut(size)
        for output in (Replicate(), Shard(1)):
            parts = parallelize_module(copy.deepcopy(whole), mesh, RowwiseParallel(output_layouts=output))
            parts.weight.grad = None
            assert parts.weight.to_local().shape == (count, 4)
            got = parts(ids)
            share = factor.chunk(ranks, 1)[rank] if output == Shard(1) else factor
            expect(got, expected.chunk(ranks, 1)[rank] if output == Shard(1) else expected, f"rows of {size}, {output}")
            (got * share).sum().backward()
            assert parts.weight.grad.placements == (Shard(0),)
            expect(
                parts.weight.grad.to_local(), whole.weight.grad[first : first + count], f"gradient of {size}, {output}"
            )
        for wrong in (size, -1, 2**40):
            bad = ids.clone()
            bad[1, 3] = wrong
            refused(IndexError, f"the id {wrong} is out of range: it must be from 0 to {size - 1}", partial(parts, bad))
        columns = parallelize_module(copy.deepcopy(whole), mesh, ColwiseParallel(output_layouts=Replicate()))
        columns.weight.grad = None
        got = columns(ids)
        expect(got, expected, f"columns of {size}")
        (got * factor).sum().backward()
        expect(columns.weight.grad, whole.weight.grad, f"gradient of columns of {size}")
    one_style = RowwiseParallel()  # for both kinds of modules
    both = nn.ModuleDict({"table": nn.Embedding(8 * ranks, 4), "line": nn.Linear(8 * ranks, 4)})
    parallelize_module(both, mesh, {"*": one_style})
    assert both["table"](torch.arange(8)).shape == (8, 4)
    assert both["line"](torch.ones(3, 8)).shape == (3, 4)
    sharded_ids = parallelize_module(nn.Embedding(8, 4), mesh, RowwiseParallel(input_layouts=Shard(-1)))
    assert sharded_ids(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3 * ranks, 4)  # said by the program
    if ranks > 2:
        special = nn.Embedding(ranks + 1, 4, scale_grad_by_freq=True)
        refused(ValueError, "leave some of", lambda: parallelize_module(special, mesh, RowwiseParallel()))
        assert not isinstance(special.weight, DTensor)


def tied_embeddings() -> None:
    """A table that is also the output layer stays one parameter."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(13, 6, dtype=torch.float64)
            self.output = nn.Linear(6, 13, bias=False, dtype=torch.float64)
            self.output.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.output(self.table(ids).tanh())

    torch.manual_seed(3)
    whole = Tied()
    ids = torch.arange(13).view(1, 13)
    whole(ids).square().sum().backward()
    plan = {"table": RowwiseParallel(), "output": ColwiseParallel(output_layouts=Replicate())}
    parts = parallelize_module(copy.deepcopy(whole), mesh, plan)
    parts.zero_grad()
    assert parts.output.weight is parts.table.weight
    parts(ids).square().sum().backward()
    expect(gradients(parts), gradients(whole), "tied")
    optimizer = torch.optim.SGD(parts.parameters(), 0.1)
    optimizer.step()
    assert sum(1 for _ in parts.parameters()) == 1
    refused(
        ValueError,
        "'table.weight' and 'output.weight' are one shared parameter",
        lambda: parallelize_module(whole, mesh, {"table": RowwiseParallel()}),
    )
    refused(ValueError, "one shared parameter", lambda: parallelize_module(whole, mesh, {"*": ColwiseParallel()}))
    assert whole.output.weight is whole.table.weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(whole, mesh, {"table": RowwiseParallel()}, strict=False)
    assert "were one shared parameter" in str(caught[0].message)


# ---------------------------------------------------------------- plans


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(6)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"wq": nn.Linear(6, 6), "wo": nn.Linear(6, 6)})
        self.mlp = Mlp(8, dtype=torch.float32)


def is_whole(model: nn.Module) -> bool:
    hooks = any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return not hooks and not any(isinstance(param, DTensor) for param in model.parameters())


def keys() -> None:
    """Patterns as in PyTorch; names that do not exist are an error that lists all of them, before anything changes."""
    model = Net()
    wrong = {
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wp": ColwiseParallel(),
        "layers.*.mpl.up": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "head": ColwiseParallel(),
    }
    for part in (
        "'layers.*.attention.wp' (no 'wp' in 'layers.0.attention' and 1 more; did you mean 'wq' or 'wo'?)",
        "'layers.*.mpl.up' (no 'mpl' in 'layers.0' and 1 more; did you mean 'mlp'?)",
        "'mlp.up' (no 'mlp' in the Net; did you mean 'layers.0.mlp.up' or 'layers.1.mlp.up'?)",
        "'head' (no 'head' in the Net, which has 'embed', 'layers', 'norm')",
    ):
        refused(ts.InvalidArgument, part, lambda: parallelize_module(model, mesh, wrong))
        refused(ValueError, part, lambda: parallelize_module(model, mesh, wrong))
    assert is_whole(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(model, mesh, wrong, strict=False)
    assert "modules that do not exist: 'layers.*.attention.wp'" in str(caught[0].message), caught
    assert caught[0].filename == __file__
    weights = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert weights == [f"layers.{i}.attention.wq.{of}" for i in range(2) for of in ("weight", "bias")], weights

    for key in ("layers.[01].mlp.u?", "layers.*.*.up"):
        model = Net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize_module(model, mesh, {key: ColwiseParallel()})
        assert isinstance(model.layers[1].mlp.up.weight, DTensor)
        assert (
            ("no 'up' in 'layers.0.attention', 'layers.1.attention'" in str(caught[0].message))
            if caught
            else "?" in key
        )
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parallelize_module(model, mesh) is model
        parallelize_module(model, mesh, {"norm": None})
    assert ["no parallelize_plan" in str(one.message) for one in caught] == [True, False]
    assert "'norm' (no style)" in str(caught[1].message)
    assert is_whole(model)
    refused(TypeError, "parallelize_plan is a str", lambda: parallelize_module(model, mesh, "up"))
    wrong_style: Any = {"norm": SequenceParallel}
    refused(TypeError, "the style of key 'norm' is a ", lambda: parallelize_module(model, mesh, wrong_style))
    with mesh:
        parallelize_module(model, parallelize_plan={"layers.0": {"mlp.up": ColwiseParallel()}})
    assert isinstance(model.layers[0].mlp.up.weight, DTensor)


def modules_that_cannot() -> None:
    model = Net()
    plan: dict[str, ParallelStyle] = {
        "layers.*.mlp.up": ColwiseParallel(),
        "norm": RowwiseParallel(),
        "layers.0": ColwiseParallel(),
    }
    for kind in (ts.Unsupported, NotImplementedError):
        refused(
            kind,
            "'norm': RowwiseParallel of a LayerNorm; 'layers.0': ColwiseParallel of a Layer",
            lambda: parallelize_module(model, mesh, plan),
        )
    refused(NotImplementedError, "'norm'", lambda: parallelize_module(model, mesh, {"norm": theirs.RowwiseParallel()}))
    twice = {"layers.0.mlp.up": ColwiseParallel(), "layers.*.mlp.*": RowwiseParallel()}
    refused(
        ValueError,
        "two styles shard the parameter 'weight' of 'layers.0.mlp.up' (plan key 'layers.*.mlp.*')",
        lambda: parallelize_module(model, mesh, twice),
    )
    assert is_whole(model)
    parallelize_module(model, mesh, {"norm": SequenceParallel()})
    again = {"embed": RowwiseParallel(), "norm": SequenceParallel()}
    refused(
        ts.InvalidState, "'norm': parallelize_module was already called", lambda: parallelize_module(model, mesh, again)
    )
    assert not isinstance(model.embed.weight, DTensor)

    class Other(ColwiseParallel):
        """A program's style, for whatever modules it likes."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            module.applied = True
            return nn.Identity()

    done = parallelize_module(model.layers[0], mesh, Other())
    assert isinstance(done, nn.Identity)
    assert parallelize_module(model.layers[1], mesh, {"": Other()}) is model.layers[1]
    assert model.layers[1].applied


def attention_heads() -> None:
    """Heads and KV heads that the ranks do not divide are named, before anything changes."""
    width, kv = 12 * ranks, ranks + 1

    def layer() -> Any:
        sizes = {"wq": (width, width), "wk": (width, kv * 3), "wo": (width, width)}
        return nn.ModuleDict({"attn": nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})})

    def plan(heads: int, of_kv: int | None) -> dict[str, ParallelStyle]:
        columns, rows = ColwiseParallel(heads=heads), RowwiseParallel(heads=heads)
        return {"*.wq": columns, "*.wk": ColwiseParallel(heads=of_kv), "*.wo": rows}

    model = layer()
    if ranks > 1:
        odd = f"'attn.wk' (plan key '*.wk') has {kv} heads, which do not divide over {ranks} ranks"
        refused(ts.InvalidArgument, odd, lambda: parallelize_module(model, mesh, plan(2 * ranks, kv)))
    for name in ("wq", "wo"):
        cut = f"'attn.{name}' (plan key '*.{name}') has {width} features, which do not divide into {5 * ranks} heads"
        refused(ts.InvalidArgument, cut, lambda: parallelize_module(model, mesh, plan(5 * ranks, None)))
    assert is_whole(model)
    if ranks > 1:  # the ranks compare heads, too
        heads = ranks if rank == 0 else 2 * ranks
        refused(ts.Mismatch, f"heads={heads})", lambda: parallelize_module(model, mesh, plan(heads, None)))
    for wrong in (0, -1, 2.0, True):
        for style in (ColwiseParallel, RowwiseParallel):
            refused(ts.InvalidArgument, f"heads is {wrong!r}", partial(style, heads=wrong))
    parallelize_module(model, mesh, plan(2 * ranks, None))
    assert model["attn"]["wq"].weight.to_local().shape == (12, width)


def fsdp_comes_later() -> None:
    for fully_shard in (their_fsdp.fully_shard, our_fsdp.fully_shard):
        model = Net()
        fully_shard(model.layers[0])
        plan = {"embed": RowwiseParallel(), "layers.*.mlp.up": ColwiseParallel()}
        refused(
            ts.InvalidState,
            "call parallelize_module with mesh['tp'], then fully_shard",
            partial(parallelize_module, model, mesh, plan),
        )
        refused(RuntimeError, "'layers.0.mlp.up'", partial(parallelize_module, model, mesh, plan))
        assert not isinstance(model.embed.weight, DTensor)
        parallelize_module(model, mesh, {"layers.1.mlp.up": ColwiseParallel()})


def meshes() -> None:
    grid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (ranks, 1))
    model = Mlp(8)
    refused(
        ValueError,
        "has 2 dimensions ('dp', 'tp'); pass the dimension of the tensor-parallel ranks: mesh['tp']",
        lambda: parallelize_module(model, grid, {"up": ColwiseParallel()}),
    )
    refused(ValueError, "mesh_dim_names", lambda: parallelize_module(model, unnamed, {"up": ColwiseParallel()}))
    refused(
        TypeError,
        "device_mesh is a ProcessGroup",
        lambda: parallelize_module(model, dist.group.WORLD, {"up": ColwiseParallel()}),
    )
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert model(torch.ones(2, 6, dtype=torch.float64)).shape == (2, 5)


def ranks_that_differ() -> None:
    """Every rank gets an error that names the ranks and the first difference, and the group can still be used."""
    if ranks == 1:
        return
    last = ranks - 1
    others = f"rank{'s' * (ranks > 2)} {', '.join(map(str, range(last)))}"
    good: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    class Plain(ParallelStyle):
        """Its repr has an address."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return module

    def check(*parts: str, **of_last: Any) -> None:
        given: dict[str, Any] = {"module": Mlp(8), "parallelize_plan": good, "src_data_rank": 0}
        given |= of_last if rank == last else {}
        for part in (f"rank {last}: ", f"{others}: ", *parts):
            refused(ts.Mismatch, part, lambda: parallelize_module(device_mesh=mesh, **given))
        assert is_whole(given["module"])

    check("plan key 'up' is ColwiseParallel", "plan key 'down' is", parallelize_plan={"down": RowwiseParallel()})
    check("plan key 'upp'", parallelize_plan={"upp": ColwiseParallel(), "down": RowwiseParallel()})
    check(
        "plan key 'down' is RowwiseParallel(input_layouts=(Replicate(),)",
        parallelize_plan=({"up": ColwiseParallel(), "down": RowwiseParallel(input_layouts=Replicate())}),
    )
    check("the plan is SequenceParallel(sequence_dim=1", parallelize_plan=SequenceParallel())
    check("the plan is None", parallelize_plan=None)
    check("the plan is [3]", parallelize_plan=[3])
    check("src_data_rank is None", src_data_rank=None)
    check("parameter 'up.weight' has shape (9, 6), torch.float64", module=Mlp(9))
    check("parameter 'up.weight' has shape (8, 6), torch.float32", module=Mlp(8, dtype=torch.float32))
    check("parameter 'up.bias' has shape (8,)", "module 'down' is a Linear", module=Mlp(8, bias=False))
    frozen = Mlp(8)
    frozen.down.weight.requires_grad = False
    check("torch.float64, frozen", module=frozen)
    odd = Mlp(8)
    odd.up = nn.Bilinear(6, 6, 8)
    check("module 'up' is a Bilinear", module=odd)
    parallelize_module(Mlp(8), mesh, {"up": Plain()})


def values_come_from_one_rank() -> None:
    """Under every style, and under the key ""; parameters that do not train keep not training."""
    source = ranks - 1

    def filled(module: nn.Module) -> nn.Module:
        for param in module.parameters():
            param.data.fill_(rank + 1)
            param.requires_grad = False
        module.register_buffer("offset", torch.full((2,), rank + 1.0))
        return module

    kinds: list[tuple[Callable[[], nn.Module], ParallelStyle]] = [
        (lambda: nn.Linear(4, 6), ColwiseParallel()),
        (lambda: nn.Linear(6, 4), RowwiseParallel()),
        (lambda: nn.Embedding(6, 4), RowwiseParallel()),
        (lambda: nn.Embedding(4, 6), ColwiseParallel()),
        (lambda: nn.LayerNorm(6), SequenceParallel()),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Dropout()), SequenceParallel()),
    ]
    for make, style in kinds:
        for plan in (style, {"": style}):
            module = parallelize_module(filled(make()), mesh, plan, src_data_rank=source)
            for name, param in module.named_parameters():
                assert full(param).eq(source + 1).all(), (style, name)
                assert not param.requires_grad
            own = parallelize_module(filled(make()), mesh, plan, src_data_rank=None)
            assert all(param.to_local().eq(rank + 1).all() for param in own.parameters())
        if isinstance(style, SequenceParallel):
            assert full(module.offset).eq(source + 1).all()


# ---------------------------------------------------------------- sequences


def sequences() -> None:
    torch.manual_seed(4)
    norm = nn.LayerNorm(6, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    whole = torch.randn(2, 4 * ranks, 6, dtype=torch.float64)
    own = whole.chunk(ranks, 1)[rank]

    def parallel(**options: Any) -> nn.Module:
        return parallelize_module(
            nn.ModuleDict({"norm": copy.deepcopy(norm)}), mesh, {"norm": SequenceParallel(**options)}
        )["norm"]

    factor = torch.randn(2, 4 * ranks, 6, dtype=torch.float64)
    (norm(whole) * factor).sum().backward()
    expected = {name: param.grad for name, param in norm.named_parameters()}
    norm.zero_grad()
    module = parallel(use_local_output=True)
    got = module(own)
    expect(got, norm(whole).chunk(ranks, 1)[rank], "norm")
    (got * factor.chunk(ranks, 1)[rank]).sum().backward()
    assert ranks == 1 or module.weight.grad.placements == (Partial(),)
    expect(gradients(module), expected, "gradients of norm")
    expect(parallel(sequence_dim=0)(own.transpose(0, 1)), norm(whole).transpose(0, 1), "the first dimension")
    expect(parallel()(distribute_tensor(whole, mesh, [Replicate()])), norm(whole), "a DTensor")
    if ranks == 1:
        return
    module = parallel()
    module(torch.zeros(2, 4, 6, dtype=torch.float64))  # a trial: nothing can be said
    module(torch.ones(2, 1, 6, dtype=torch.float64))
    refused(ValueError, f"'norm': all {ranks} ranks got the same input", lambda: module(whole))
    module = parallel()
    module(own)
    module(whole)  # is not looked at any more
    module = parallel()
    uneven = torch.arange(2.0 * 6 * (2 + rank), dtype=torch.float64).view(2, 2 + rank, 6)
    lengths = ", ".join(str(2 + each) for each in range(ranks))
    refused(ValueError, f"'norm': the ranks' parts of dimension 1 have the lengths {lengths}", lambda: module(uneven))
    module = parallel()
    batch = torch.ones(2 + rank, 4, 6, dtype=torch.float64)
    refused(ValueError, f"rank {ranks - 1}: ({ranks + 1}, 4, 6)", lambda: module(batch))
    with CommDebugMode() as mode:
        module = parallel()
        before = mode.get_total_counts()
        module(own)
        first = mode.get_total_counts()
        module(own)
        assert (first - before, mode.get_total_counts() - first) == (1, 0)

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return x if y is None else x + y

    adding = parallelize_module(Adds(), mesh, SequenceParallel(use_local_output=True))
    spread = distribute_tensor(whole, mesh, [Shard(1)])
    expect(adding(own, spread), 2 * own, "two inputs")  # PyTorch's hook loses the second


# ---------------------------------------------------------------- a model


class Attention(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        heads = [w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        q, k, v = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            if i < 2
            else one
            for i, one in enumerate(heads)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, head), FeedForward(width, inner)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """12 heads, which 1 to 4 ranks divide; a vocabulary and an inner size that they do not."""

    def __init__(self, vocabulary: int = 17, inner: int = 37, layers: int = 2) -> None:
        super().__init__()
        width, head = 48, 4
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleDict({str(i): Block(width, head, inner) for i in range(layers)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(12.0, dtype=torch.float64), 10.0 ** -torch.arange(2.0, dtype=torch.float64))
        self.turn = torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x, self.turn)
        return self.output(self.norm(x))


def llama_plan(kind: Any = None) -> dict[str, ParallelStyle]:
    rows: Any = kind.RowwiseParallel if kind else RowwiseParallel
    sequence: Any = kind.SequenceParallel if kind else SequenceParallel
    entering = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "tok_embeddings": rows(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": sequence(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": rows(output_layouts=Shard(1)),
        "layers.*.ffn_norm": sequence(),
        "layers.*.feed_forward": entering,
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": rows(output_layouts=Shard(1)),
        "norm": sequence(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def trained(model: nn.Module, vocabulary: int, steps: int = 5, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """With one of the parts of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    told: dict[str, Any] = {"losses": [], "norms": []}
    ids = torch.randint(vocabulary, (2, 13), generator=torch.Generator().manual_seed(1)).chunk(parts)[part]
    for _ in range(steps):
        with loss_parallel():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        told["norms"].append(full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(full(loss).detach())
    told["state"] = {name: full(value) for name, value in model.state_dict().items()}
    assert told["losses"][-1] < 0.8 * told["losses"][0]
    return told


def llama() -> None:
    """Sequence parallel, with the loss on sharded logits: losses, norms and parameters of one process."""
    torch.manual_seed(5)
    whole = Llama().double()
    parts = parallelize_module(copy.deepcopy(whole), mesh, llama_plan())
    expect(trained(parts, 17), trained(whole, 17), "llama", rtol=1e-8, atol=1e-9)
    if ranks == 2:  # what PyTorch can, over Gloo
        torch.manual_seed(6)
        even = Llama(16, 40, 1).double()
        ours = trained(parallelize_module(copy.deepcopy(even), mesh, llama_plan()), 16)
        other = trained(theirs.parallelize_module(copy.deepcopy(even), gloo, llama_plan(theirs)), 16)
        expect(ours, other, "PyTorch's llama", rtol=1e-8, atol=1e-9)


def llama_with_fsdp() -> None:
    """PyTorch's and Tessera's, two dimensions: each pair of tensor-parallel ranks has half of the batch."""
    if ranks < 4:
        return
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    whole = Llama().double()
    expected = trained(copy.deepcopy(whole), 17)
    for fully_shard in (their_fsdp.fully_shard, our_fsdp.fully_shard):
        parts = parallelize_module(copy.deepcopy(whole), grid["tp"], llama_plan())
        for layer in parts.layers.values():
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(parts, mesh=grid["dp"])
        got = trained(parts, 17, part=grid.get_local_rank("dp"), parts=2)
        losses = torch.stack(got["losses"])
        dist.all_reduce(losses, dist.ReduceOp.AVG, group=grid["dp"].get_group())
        got["losses"] = list(losses)
        expect(got, expected, f"llama under {fully_shard.__module__}", rtol=1e-8, atol=1e-9)


def recomputed_activations() -> None:
    torch.manual_seed(5)
    whole = Llama(layers=1).double()
    parts = parallelize_module(copy.deepcopy(whole), mesh, llama_plan())
    block = parts.layers["0"]
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    ids = torch.arange(12).view(1, 12)
    parts(ids).full_tensor().square().sum().backward()
    whole(ids).square().sum().backward()
    expect(gradients(parts), gradients(whole), "recomputed")


def kept_for_backward(block: Block, x: torch.Tensor, turn: torch.Tensor) -> int:
    """Bytes of activations that autograd keeps of a forward."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[local.untyped_storage().data_ptr()] = local.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = block(x, turn)
    own = [param.to_local() if isinstance(param, DTensor) else param for param in block.parameters()]
    for tensor in [turn, *own]:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    result.sum().backward()
    return sum(storage.nbytes() for storage in kept.values())


def memory_of_activations() -> None:
    """With sequence parallelism a rank keeps its part of all that one process keeps, and the inputs of attention and of
    the feed-forward network whole, because DTensor gathers them before a linear layer, which keeps its input."""
    width, tokens, batch = 48, 12, 2
    torch.manual_seed(5)
    whole = Block(width, 4, 48).double()
    parts = parallelize_module(
        nn.ModuleDict({"layers": nn.ModuleDict({"0": copy.deepcopy(whole)})}),
        mesh,
        {pattern: style for pattern, style in llama_plan().items() if pattern.startswith("layers")},
    )
    x = torch.rand(batch, tokens, width, dtype=torch.float64)
    turn = Llama().turn[:tokens]
    alone = kept_for_backward(whole, x.clone().requires_grad_(), turn)
    own = x.chunk(ranks, 1)[rank].clone().requires_grad_()
    together = kept_for_backward(parts["layers"]["0"], own, turn)
    gathered = 2 * x.nbytes if ranks > 1 else 0
    assert together == (alone - gathered) // ranks + gathered, (together, alone, gathered)


# ---------------------------------------------------------------- losses


def logits_and_targets(shape: tuple[int, ...], scale: float, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    classes = shape[1] if len(shape) > 1 else shape[0]
    target_shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    return logits, torch.randint(classes, target_shape, generator=generator), classes


def compare_loss(shape: tuple[int, ...], scale: float, grid: DeviceMesh, placements: list[Any], **options: Any) -> None:
    dtype = options.pop("dtype", torch.float64)
    tolerance = EXACT if dtype is torch.float64 else {"rtol": 3e-2, "atol": 2e-2}
    logits, targets, classes = logits_and_targets(shape, scale, dtype)
    if targets.ndim and "ignore_index" in options:
        targets.view(-1)[:2] = options["ignore_index"]
    if options.pop("weighted", False):
        options["weight"] = torch.linspace(0.5, 2, classes, dtype=dtype)
    what = f"{shape} {scale} {placements} {options} {dtype}"
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, **options)
    expected.square().sum().backward()
    parts = distribute_tensor(logits, grid, placements).requires_grad_()
    given: Any = targets
    if grid.ndim > 1:
        at = 1 if len(shape) > 1 else 0
        moved = [
            Replicate() if p == Shard(at) else Shard(p.dim - 1) if p.is_shard() and p.dim > at else p
            for p in placements
        ]
        given = distribute_tensor(targets, grid, moved)
    with loss_parallel():
        got = F.cross_entropy(parts, given, **options)
        if options["reduction"] == "mean":
            assert all(one == Replicate() for one in got.placements), what
        got.redistribute(placements=[Replicate()] * grid.ndim).square().sum().backward()
    expect(got, expected.detach(), what, **tolerance)
    assert parts.grad is not None
    assert parts.grad.placements == tuple(placements)
    expect(parts.grad, whole.grad, f"gradient, {what}", **tolerance)


def losses() -> None:
    """Those of one process: every shape and option, huge logits, ranks with fewer classes or none."""
    from sampling import sample  # torch_ranks lets it be found

    reductions = ("none", "sum", "mean")
    shapes = itertools.product((12, 13, 9, 2, 1), ((0,), (6,), (3, 4), (2, 3, 2)))
    cases = itertools.product(sample(shapes, 8, f"logits on {ranks} ranks"), (1.0, 1e4), reductions, (False, True))
    for i, ((classes, others), scale, reduction, weighted) in enumerate(cases):
        shape = (classes,) if others == (0,) else (others[0], classes, *others[1:])
        options: dict[str, Any] = {"reduction": reduction, "weighted": weighted}
        if i % 2:
            options["ignore_index"] = -100 if i % 4 == 1 else classes // 2
        compare_loss(shape, scale, mesh, [Shard(int(len(shape) > 1))], **options)
    for reduction in reductions:
        compare_loss((6, 9), 3.0, mesh, [Shard(1)], reduction=reduction, dtype=torch.bfloat16)
    logits, targets, _ = logits_and_targets((6, 9), 1.0)
    parts = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel():
        expect(nn.CrossEntropyLoss()(parts, targets), F.cross_entropy(logits, targets), "the class")
        nothing = F.cross_entropy(parts, torch.full((6,), -100))
        assert full(nothing).isnan()
        for wrong in (9, -1):
            bad = targets.clone()
            bad[2] = wrong
            refused(IndexError, f"the target {wrong} is out of range", partial(F.cross_entropy, parts, bad))
        for kind in (ts.Unsupported, NotImplementedError):
            refused(kind, "label_smoothing, got 0.1", lambda: F.cross_entropy(parts, targets, label_smoothing=0.1))
        smooth = nn.CrossEntropyLoss(label_smoothing=0.2)
        refused(ts.Unsupported, "label_smoothing, got 0.2", lambda: smooth(parts, targets))
        refused(ts.Unsupported, "class indices", lambda: F.cross_entropy(parts, logits.softmax(1)))
        expect(
            F.cross_entropy(logits, targets, label_smoothing=0.1),
            F.cross_entropy(logits, targets, label_smoothing=0.1),
            "plain tensors",
        )
        whole = distribute_tensor(logits, mesh, [Replicate()])
        refused(ValueError, "are sharded by exactly one mesh dimension", lambda: F.cross_entropy(whole, targets))


def losses_on_two_dimensions() -> None:
    """A batch that is sharded too, unevenly, with other numbers of ignored targets on each rank."""
    if ranks < 4:
        return
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    for reduction, weighted in itertools.product(("none", "sum", "mean"), (False, True)):
        options: dict[str, Any] = {"reduction": reduction, "weighted": weighted, "ignore_index": 1}
        compare_loss((5, 9), 2.0, grid, [Shard(0), Shard(1)], **options)
        compare_loss((5, 1), 2.0, grid, [Shard(1), Shard(0)], **{**options, "ignore_index": -1})
        compare_loss((5, 9), 2.0, grid, [Replicate(), Shard(1)], **options)
        compare_loss((3, 9, 5), 2.0, grid, [Shard(2), Shard(1)], **options)
    logits, targets, _ = logits_and_targets((5, 9), 1.0)
    parts = distribute_tensor(logits, grid, [Shard(0), Shard(1)])
    with loss_parallel():
        refused(ValueError, "a target that is a DTensor", lambda: F.cross_entropy(parts, targets))
        placed = distribute_tensor(targets, grid, [Replicate(), Replicate()])
        refused(ValueError, "a target placed as", lambda: F.cross_entropy(parts, placed))


def blocks_of_loss_parallel() -> None:
    """Kernels are restored however a block ends, and as long as an outer block needs them."""
    kernels = DTensor._op_dispatcher._custom_op_handlers
    before = dict(kernels)
    logits, targets, _ = logits_and_targets((6, 9), 1.0)
    parts = distribute_tensor(logits, mesh, [Shard(1)])
    expected = F.cross_entropy(logits, targets)

    class Stop(Exception):
        pass

    def fails() -> None:
        with loss_parallel(), loss_parallel():
            raise Stop

    refused(Stop, "", fails)
    assert kernels == before
    with loss_parallel():
        refused(Stop, "", fails)
        with loss_parallel():
            pass
        expect(F.cross_entropy(parts, targets), expected, "after an inner block")
    assert kernels == before
    first, second = loss_parallel(), loss_parallel()
    first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    expect(F.cross_entropy(parts, targets), expected, "after the second block")
    first.__exit__(None, None, None)
    assert kernels == before
    with theirs.loss_parallel():
        during = dict(kernels)
        with loss_parallel():
            expect(F.cross_entropy(parts, targets), expected, "in PyTorch's block")
        assert kernels == during

    @loss_parallel()
    def decorated() -> torch.Tensor:
        return F.cross_entropy(parts, targets)

    expect(decorated(), expected, "a decorated function")
    assert kernels == before


# ---------------------------------------------------------------- what is sent


def counted(act: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    with CommDebugMode() as mode:
        result = act()
    short = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "AA"}

    def named(op: Any) -> str:
        return next((to for of, to in short.items() if of in str(op)), str(op))

    counts: Counter[str] = Counter()
    for op, count in mode.get_comm_counts().items():
        counts[named(op)] += count
    return result, counts


def collectives() -> None:
    """How many, forward and backward, of the styles and of a layer."""
    if ranks == 1:
        return
    none: dict[str, int] = {}

    def check(module: nn.Module, x: torch.Tensor, forward: dict[str, int], backward: dict[str, int]) -> None:
        module(x)  # the first forward compares
        x = x.clone().requires_grad_(x.is_floating_point())
        y, there = counted(lambda: module(x))
        _, back = counted(lambda: y.sum().backward())
        assert (dict(there), dict(back)) == (forward, backward), (module, there, back)

    def linear(style: ParallelStyle) -> nn.Module:
        return parallelize_module(nn.Linear(4 * ranks, 4 * ranks), mesh, style)

    def table(style: ParallelStyle) -> nn.Module:
        return parallelize_module(nn.Embedding(4 * ranks, 4 * ranks), mesh, style)

    whole = torch.rand(2, 4 * ranks, 4 * ranks)
    rows, columns = whole.chunk(ranks, 1)[rank], whole.chunk(ranks, 2)[rank]
    AR, AG, RS = {"AR": 1}, {"AG": 1}, {"RS": 1}
    check(linear(ColwiseParallel()), whole, none, AR)
    check(linear(ColwiseParallel(output_layouts=Replicate())), whole, AG, AR)
    check(linear(ColwiseParallel(input_layouts=Shard(1))), rows, AG, RS)
    check(linear(RowwiseParallel()), columns, AR, none)
    check(linear(RowwiseParallel(output_layouts=Shard(1))), columns, RS, AG)
    check(linear(RowwiseParallel(input_layouts=Replicate())), whole, AR, AG)
    ids = torch.arange(4 * ranks).view(1, -1)
    check(table(RowwiseParallel()), ids, AR, none)
    check(table(RowwiseParallel(output_layouts=Shard(1))), ids, RS, AG)
    check(table(ColwiseParallel()), ids, none, none)
    check(table(ColwiseParallel(output_layouts=Replicate())), ids, AG, none)
    for inner in (8 * ranks, 13):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        check(parallelize_module(Mlp(inner), mesh, plan), torch.rand(2, 6, dtype=torch.float64), AR, AR)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6, dtype=torch.float64)
            self.mlp = Mlp(13)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.norm(x))

    layer = parallelize_module(
        Layer(),
        mesh,
        {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    check(layer, torch.rand(2, 4 * ranks, 6, dtype=torch.float64).chunk(ranks, 1)[rank], AG | RS, AG | RS)
    if 12 % ranks == 0:  # attention and MLP, without sequence parallel
        stays = PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None))
        plan = {
            "attention": stays,
            "attention.w[qkv]": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
            "feed_forward.w[13]": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        block = parallelize_module(Llama(layers=1).layers["0"], mesh, plan)
        block.forward = partial(block.forward, turn=Llama(layers=0).turn.to(torch.complex64))
        check(block, torch.rand(2, 12, 48), {"AR": 2}, {"AR": 2})
    parts = distribute_tensor(torch.rand(6, 9), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss, there = counted(lambda: F.cross_entropy(parts, torch.arange(6)))
        _, back = counted(loss.backward)
    assert (dict(there), dict(back)) == ({"AR": 3}, none), (there, back)


def dtensors_of_any_size() -> None:
    """Every change of placement, of sizes that the ranks do not divide: what DTensor asks of a process group."""
    for shape in ((13, 6), (1, 5), (4, 9, 3)):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            whole = torch.arange(shape[0] * 100).repeat(10)[: torch.Size(shape).numel()].view(shape).to(dtype)
            placements = [Replicate(), Partial(), *(Shard(i) for i in range(len(shape)))]
            for one, other in itertools.product(placements, placements):
                if other == Partial() or (one == Partial() and dtype is torch.bfloat16):
                    continue
                local = whole if rank == 0 else torch.zeros_like(whole)
                for grid in (mesh, gloo) if dtype is torch.float64 else (mesh,):
                    start = (
                        DTensor.from_local(local, grid, [one])
                        if one == Partial()
                        else distribute_tensor(whole, grid, [one])
                    )
                    moved = start.redistribute(placements=[other])
                    expected = distribute_tensor(whole, grid, [other], src_data_rank=None)
                    assert moved.to_local().equal(expected.to_local()), (shape, dtype, one, other)
                    assert moved.full_tensor().equal(whole), (shape, dtype, one, other)


def functional_exchanges() -> None:
    """An all-to-all of rows whose numbers differ, and lists: what DTensor's CPU meshes do not use themselves."""
    group = mesh.get_group()
    rows = [(rank + other) % 3 for other in range(ranks)]  # to, and from, each rank
    sent = torch.cat([torch.full((count, 2), 10.0 * rank + to) for to, count in enumerate(rows)])
    got = funcol.wait_tensor(funcol.all_to_all_single(sent, rows, rows, group))
    assert got.equal(torch.cat([torch.full((count, 2), 10.0 * of + rank) for of, count in enumerate(rows)])), got
    pair = [torch.full((ranks, 3), rank + 1.0), torch.full((2 * ranks,), rank + 2.0)]
    sums = funcol.reduce_scatter_single_coalesced(pair, "sum", [0, 0], group)
    assert [one.shape[0] for one in sums] == [1, 2]
    assert sums[0].eq(sum(range(1, ranks + 1))).all()
    whole = funcol.all_gather_single_coalesced(pair, group)
    assert [one.shape[0] for one in whole] == [ranks * ranks, 2 * ranks * ranks]
    reduced = [funcol.wait_tensor(one) for one in funcol.all_reduce_coalesced(pair, "sum", group)]
    assert reduced[1].eq(sum(range(2, ranks + 2))).all()


def outputs_and_styles_of_pytorch() -> None:
    """PyTorch's styles in our function, ours in PyTorch's."""
    torch.manual_seed(2)
    whole = Mlp(8 * ranks)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = passed(whole, x)
    for function, kind in ((parallelize_module, theirs), (theirs.parallelize_module, None)):
        rows: Any = kind.RowwiseParallel if kind else RowwiseParallel
        plan = {
            "up": ColwiseParallel(),
            "down": rows(use_local_output=False),
            "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        }
        expect(passed(function(copy.deepcopy(whole), mesh, plan), x), expected, f"{function.__module__}")
    assert issubclass(RowwiseParallel, theirs.RowwiseParallel)
    assert issubclass(SequenceParallel, theirs.SequenceParallel)
    assert repr(RowwiseParallel()) == repr(theirs.RowwiseParallel())


CHECKS = [
    linear_layers,
    embeddings,
    tied_embeddings,
    keys,
    modules_that_cannot,
    attention_heads,
    fsdp_comes_later,
    meshes,
    ranks_that_differ,
    values_come_from_one_rank,
    sequences,
    llama,
    llama_with_fsdp,
    recomputed_activations,
    memory_of_activations,
    losses,
    losses_on_two_dimensions,
    blocks_of_loss_parallel,
    collectives,
    dtensors_of_any_size,
    functional_exchanges,
    outputs_and_styles_of_pytorch,
]


def main() -> None:
    global mesh, gloo
    torch.set_num_threads(1)
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(60)))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    # With another name: PyTorch takes equal meshes for the same one and would use the group of the first.
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu", mesh_dim_names=("gloo",))
    run_checks(CHECKS, sys.argv[1:], rank)
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main()
