"""What test_torch_backend.py runs: under torchrun's environment, one process a rank, on the backend "tessera".

usage: torch_backend_jobs.py collectives [CHECK...] | training DIRECTORY | dies | leaves

`tessera` is not imported before a process group asks for it. Each check of `collectives` is a function of this file;
most compare results with Gloo's on the same ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch_ranks import NOTICED_S, patience, run_checks

Check = Callable[[], object]
Tensors = Sequence[torch.Tensor]

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]
SHAPES = [(0,), (1,), (7,), (3, 5), (70001,)]

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
gloo: Any = None  # the group to compare with; the default group is Tessera's


def values(shape: Sequence[int], dtype: torch.dtype, of: int | None = None) -> torch.Tensor:
    """Small whole numbers, other ones a rank: every dtype and every order of summation gives the same result."""
    made = torch.Generator().manual_seed(1000 + (rank if of is None else of))
    return torch.randint(0, 3, tuple(shape), generator=made).to(dtype)


def same(ours: Any, theirs: Any, what: object = "") -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other), f"rank {rank} {what}: {one.flatten()[:8]} {other.flatten()[:8]}"


def compare(operation: Callable[[Any], Tensors], what: object = "") -> None:
    """What `operation(group)` gives on our group is what it gives on Gloo's."""
    same(operation(None), operation(gloo), what)


def refused(kind: str, text: str, operation: Check) -> Exception:
    """The error of class `kind` that the operation raises; its message holds `text`."""
    try:
        operation()
    except Exception as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        assert kind in names, f"{names}: {error}"
        assert text in str(error), str(error)
        return error
    raise AssertionError(f"rank {rank}: no {kind}")


# ---------------------------------------------------------------- collectives


def reductions() -> None:
    ops = ["SUM", "MIN", "MAX", "PRODUCT"]
    for dtype in DTYPES:
        bits = ["BAND", "BOR", "BXOR"] if not dtype.is_floating_point else []
        averages = ["AVG"] if dtype.is_floating_point else []
        for shape in SHAPES:
            for name in ops + bits + averages:
                op = getattr(dist.ReduceOp, name)

                def all_reduce(group: Any, op: Any = op, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                    tensor = values(shape, dtype)
                    dist.all_reduce(tensor, op, group=group)
                    return [tensor]

                compare(all_reduce, (name, dtype, shape))
            for name in ["SUM", "MAX", *bits]:
                op = getattr(dist.ReduceOp, name)

                def reduce(group: Any, op: Any = op, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                    tensor = values(shape, dtype)
                    dist.reduce(tensor, dst=ranks - 1, op=op, group=group)
                    return [tensor] if rank == ranks - 1 else []

                compare(reduce, (name, dtype, shape))

                def reduce_scatter(group: Any, op: Any = op, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                    part, parts = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
                    whole = values((ranks, *shape), dtype)
                    dist.reduce_scatter_single(part, whole.flatten(0, 1), op, group=group)
                    dist.reduce_scatter(parts, list(whole), op, group=group)
                    return [part, parts]

                compare(reduce_scatter, (name, dtype, shape))


def reduction_of_real_numbers() -> None:
    def all_reduce(group: Any) -> torch.Tensor:
        tensor = torch.randn(10007, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(tensor, group=group)
        return tensor

    torch.testing.assert_close(all_reduce(None), all_reduce(gloo))

    def complex_sum(group: Any) -> Tensors:
        tensor = torch.complex(values((5,), torch.float32), values((5,), torch.float32))
        dist.all_reduce(tensor, group=group)
        return [tensor]

    compare(complex_sum)


def reduction_of_sparse_tensors() -> None:
    def all_reduce(group: Any) -> Tensors:
        rows = torch.tensor([[0, rank + 1, rank + 1, 5]])[:, : 4 * (rank != 1)]  # some twice, and rank 1 has none
        tensor = torch.sparse_coo_tensor(rows, values((rows.shape[1], 3), torch.float32), (7, 3), check_invariants=True)
        dist.all_reduce(tensor, group=group)
        return [tensor.to_dense(), torch.tensor(tensor.is_coalesced())]

    compare(all_reduce)


def movements() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for root in range(ranks):

                def broadcast(group: Any, root: Any = root, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                    tensor = values(shape, dtype)
                    dist.broadcast(tensor, root, group=group)
                    return [tensor]

                compare(broadcast, (root, dtype, shape))

            def gathers(group: Any, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                tensor = values(shape, dtype)
                listed = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
                dist.all_gather(listed, tensor, group=group)
                single = torch.empty((ranks * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_single(single, tensor, group=group)
                rooted = [torch.empty(shape, dtype=dtype) for _ in range(ranks)] if rank == 1 else None
                dist.gather(tensor, rooted, dst=1, group=group)
                chunks = list(torch.empty((ranks, *shape), dtype=dtype)) if rank == 0 else None
                dist.gather(tensor, chunks, dst=0, group=group)  # parts of one tensor need no copies
                return [*listed, single, *(rooted or []), *(chunks or [])]

            compare(gathers, (dtype, shape))

            def scatters(group: Any, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                whole = values((ranks, *shape), dtype)
                apart, chunked = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
                dist.scatter(apart, [part.clone() for part in whole] if rank == 1 else None, src=1, group=group)
                dist.scatter(chunked, list(whole) if rank == 0 else None, src=0, group=group)
                return [apart, chunked]

            compare(scatters, (dtype, shape))

            def exchanges(group: Any, shape: Any = shape, dtype: Any = dtype) -> Tensors:
                whole = values((ranks, *shape), dtype)
                single = torch.empty_like(whole)
                dist.all_to_all_single(single, whole, group=group)
                listed = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
                dist.all_to_all(listed, list(whole), group=group)
                return [single, *listed]

            compare(exchanges, (dtype, shape))


def lengths_that_differ() -> None:
    # Rank s sends s + 2 r rows to rank r.
    sent, received = [rank + 2 * to for to in range(ranks)], [source + 2 * rank for source in range(ranks)]

    def exchanges(group: Any) -> Tensors:
        whole = values((sum(sent), 3), torch.float32)
        single = torch.empty(sum(received), 3)
        dist.all_to_all_single(single, whole, received, sent, group=group)
        return [single]

    compare(exchanges)
    # Gloo refuses lists of these.
    listed = [torch.empty(rows, 3) for rows in received]
    dist.all_to_all(listed, list(values((sum(sent), 3), torch.float32).split(sent)))
    same([torch.cat(listed)], exchanges(gloo))

    def reduce_scatter(group: Any) -> Tensors:
        output = torch.empty(rank + 1)
        dist.reduce_scatter(output, [values((to + 1,), torch.float32) for to in range(ranks)], group=group)
        return [output]

    compare(reduce_scatter)

    outputs = [torch.empty(of, 2) for of in range(ranks)]  # Gloo refuses these
    dist.all_gather(outputs, values((rank, 2), torch.float32))
    same(outputs, [values((of, 2), torch.float32, of) for of in range(ranks)])


def memory_that_is_not_contiguous() -> None:
    """Gloo reads and writes some of these as if they were contiguous; here the elements count."""

    def transposed() -> torch.Tensor:
        return torch.empty(5, 4).t()

    def strided() -> torch.Tensor:
        return torch.empty(4, 10)[:, ::2]

    for odd in (transposed, strided):
        filled = values((4, 5), torch.float32)
        tensor = odd().copy_(filled)
        expected = filled.clone()

        dist.all_reduce(tensor)
        dist.all_reduce(expected, group=gloo)
        same([tensor], [expected])

        dist.broadcast(tensor.copy_(filled), 1)
        dist.broadcast(expected.copy_(filled), 1, group=gloo)
        same([tensor], [expected])

        work = dist.all_reduce(tensor.copy_(filled), async_op=True)
        dist.all_reduce(expected.copy_(filled), group=gloo)
        assert work is not None
        work.wait()
        same([tensor], [expected])

        outputs, expecteds = [odd() for _ in range(ranks)], [torch.empty(4, 5) for _ in range(ranks)]
        dist.all_gather(outputs, tensor.copy_(filled))
        dist.all_gather(expecteds, filled, group=gloo)
        same(outputs, expecteds)

        dist.scatter(odd() if rank else tensor, [odd().fill_(to) for to in range(ranks)] if rank == 0 else None, src=0)
        gathered = [odd() for _ in range(ranks)] if rank == 0 else None
        dist.gather(tensor.copy_(filled), gathered, dst=0)
        if gathered is not None:
            same(gathered, expecteds)

        part = odd()
        dist.reduce_scatter(part, [odd().copy_(filled) for _ in range(ranks)])
        dist.all_reduce(expected.copy_(filled), group=gloo)
        same([part], [expected])

        received = [odd() for _ in range(ranks)]
        dist.all_to_all(received, [odd().fill_(10 * rank + to) for to in range(ranks)])
        same(received, [torch.full((4, 5), 10.0 * source + rank) for source in range(ranks)])

        if rank == 0:
            dist.send(odd().copy_(filled), 1)
        elif rank == 1:
            dist.recv(part, 0)
            same([part], [values((4, 5), torch.float32, 0)])

    # The elements around a view stay as they are.
    frame = torch.zeros(3, 6)
    dist.all_reduce(frame[:, 2:4].fill_(1))
    assert frame.sum() == 6 * ranks


def dtypes_that_are_only_moved() -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64, torch.complex128):
        tensor = values((6,), torch.float32).to(dtype)
        outputs = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(outputs, tensor)
        for of, output in enumerate(outputs):
            same([output], [values((6,), torch.float32, of).to(dtype)], dtype)
    refused("Unsupported", "i16 cannot be reduced", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)))


def coalesced() -> None:
    def together(group: Any) -> Tensors:
        reduced = [values((n,), torch.float32) for n in (3, 0, 5)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still there
            dist.all_reduce_coalesced(reduced, group=group)
            lists = [[torch.empty(n) for n in (3, 5)] for _ in range(ranks)]
            dist.all_gather_coalesced(lists, [values((n,), torch.float32) for n in (3, 5)], group=group)
        gathered, scattered = [torch.empty(4 * ranks) for _ in range(3)], [torch.empty(4) for _ in range(3)]
        with dist._coalescing_manager(group):
            for n, output in enumerate(gathered):
                dist.all_gather_single(output, values((4,), torch.float32) + n, group=group)
        with dist._coalescing_manager(group, async_ops=True) as coalescing:
            for n, output in enumerate(scattered):
                dist.reduce_scatter_single(output, values((4 * ranks,), torch.float32) + n, group=group)
        coalescing.wait()
        return [*reduced, *(tensor for of in lists for tensor in of), *gathered, *scattered]

    compare(together)


def asynchronous() -> None:
    tensors = [values((50_000,), torch.float32) + n for n in range(8)]
    expected = [tensor.clone() for tensor in tensors]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor in expected:
        dist.all_reduce(tensor, group=gloo)
    deadline = time.monotonic() + patience(20)
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline
    same(tensors, expected)  # before any wait
    assert works[0].wait(timedelta(seconds=5))
    (value,) = works[0].get_future().wait()
    assert value.data_ptr() == tensors[0].data_ptr()
    same([value], expected[:1])
    assert works[0].get_future().done()

    # Callbacks may chain, and wait for another collective; what is dropped is done all the same.
    tensor = torch.ones(1000)

    def again(future: Any) -> torch.Tensor:
        (once,) = future.value()
        work = dist.all_reduce(once, async_op=True)
        return work.get_future().wait()[0]

    future = dist.all_reduce(tensor, async_op=True).get_future().then(again).then(lambda value: value.value() + 1)
    assert future.wait().tolist() == [ranks**2 + 1] * 1000
    dropped = torch.ones(100)
    dist.all_reduce(dropped, async_op=True)
    listed = torch.empty(10, 2)[:, 0].fill_(1)
    dist.all_reduce(listed, async_op=True)
    dist.barrier()
    assert dropped.tolist() == [ranks] * 100
    deadline = time.monotonic() + patience(20)
    while listed[0] != ranks:  # copied back by another thread
        assert time.monotonic() < deadline
    parts = [torch.empty(3) for _ in range(ranks)]
    work = dist.all_gather(parts, torch.full((3,), float(rank)), async_op=True)
    assert [part.tolist() for part in work.get_future().wait()] == [[float(of)] * 3 for of in range(ranks)]
    barrier = dist.barrier(async_op=True)
    assert barrier is not None
    barrier.wait()


def sends_and_receives() -> None:
    following, former = (rank + 1) % ranks, (rank - 1) % ranks
    # All receive first, and a collective comes between: transfers and collectives do not wait for each other.
    received, reduced = torch.empty(70_001), torch.ones(3)
    receive = dist.irecv(received, former)
    dist.all_reduce(reduced)
    send = dist.isend(values((70_001,), torch.float32), following)
    assert receive is not None
    assert send is not None
    send.wait()
    receive.wait()
    deadline = time.monotonic() + patience(20)
    while not (send.is_completed() and receive.is_completed()):
        assert time.monotonic() < deadline
    same([received], [values((70_001,), torch.float32, former)])
    assert reduced.tolist() == [ranks] * 3

    # Tags are received in another order than they were sent.
    sends = [dist.isend(torch.full((2,), float(tag)), following, tag=tag) for tag in (5, 6)]
    for tag in (6, 5):
        dist.recv(received[:2], former, tag=tag)
        assert received[:2].tolist() == [tag, tag]
    for work in sends:
        assert work is not None
        work.wait()

    outgoing, incoming = torch.full((3,), float(rank)), torch.empty(3)
    operations = [dist.P2POp(dist.irecv, incoming, former), dist.P2POp(dist.isend, outgoing, following)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert incoming.tolist() == [float(former)] * 3
    refused("Unsupported", "src=rank", lambda: dist.recv(torch.empty(1)))
    refused("InvalidArgument", "its own peer", lambda: dist.isend(torch.empty(1), rank))
    empty = torch.empty(0)
    if rank == 0:
        dist.send(empty, 1)
    elif rank == 1:
        dist.recv(empty, 0)


def objects() -> None:
    own = {"rank": rank, "text": "größer" * (rank + 1)}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, own)
    assert [one["rank"] for one in everyone] == list(range(ranks))
    told: list[Any] = [own if rank == 1 else None, rank]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"rank": 1, "text": "größer" * 2}, 1]
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(own, gathered, dst=0)
    assert gathered is None or gathered == everyone
    given: list[Any] = [None]
    dist.scatter_object_list(given, everyone if rank == 0 else [None] * ranks, src=0)
    assert given == [own]
    passed: list[Any] = [own]
    if rank == 0:
        dist.send_object_list(passed, 1)
    elif rank == 1:
        dist.recv_object_list(passed, 0)
        assert passed == everyone[:1]


def groups() -> None:
    """Several at once, with ranks in other orders; each has its own order of operations."""
    pair = dist.new_group([0, 1], backend="tessera")
    backwards = dist.new_group(list(reversed(range(ranks))), backend="tessera", sort_ranks=False) if ranks > 1 else None
    alone = [dist.new_group([one]) for one in range(ranks)]
    assert dist.get_backend(alone[rank]) == "tessera"
    tensor, other = torch.ones(3), torch.full((2,), float(rank))
    works = [dist.all_reduce(tensor, async_op=True)]
    if rank < 2:
        works.append(dist.all_reduce(other, group=pair, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    assert tensor.tolist() == [ranks] * 3
    assert other.tolist() == ([1.0, 1.0] if rank < 2 else [float(rank)] * 2)
    dist.all_reduce(tensor, group=alone[rank])
    assert tensor.tolist() == [ranks] * 3
    order = torch.empty(ranks)
    dist.all_gather_single(order, torch.tensor([float(rank)]), group=backwards)
    assert order.tolist() == [float(one) for one in reversed(range(ranks))]
    dist.broadcast(tensor.fill_(rank), src=ranks - 1, group=backwards)
    assert tensor.tolist() == [ranks - 1.0] * 3
    if rank < 2:
        dist.destroy_process_group(pair)

    dist.set_debug_level(dist.DebugLevel.DETAIL)  # PyTorch wraps a backend, and compares calls by itself
    wrapped = dist.new_group(backend="tessera")
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.all_reduce(tensor.fill_(1), group=wrapped)
    assert tensor.tolist() == [ranks] * 3
    dist.destroy_process_group(wrapped)

    split = dist.split_group(split_ranks=[[1, 0], list(range(2, ranks))][: ranks - 1], group_desc="two")
    order = torch.empty(dist.get_world_size(split))
    dist.all_gather_single(order, torch.tensor([float(rank)]), group=split)
    assert order.tolist() == ([1, 0] if rank < 2 else [2])
    if rank < 2:
        dist.split_group(split_ranks=[[0, 1]])
    else:
        refused("Unsupported", "new_group", lambda: dist.split_group(split_ranks=[[0, 1]]))
    dist.barrier()


def what_is_refused() -> None:
    refused("Unsupported", "PREMUL_SUM", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.PREMUL_SUM(2.0)))
    sparse = torch.ones(3).to_sparse()
    refused("Unsupported", "MAX of torch.sparse_coo", lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX))
    refused("Unsupported", "BAND of torch.float32", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
    refused("Unsupported", "AVG", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG))
    backend = dist.get_backend_impl(None, torch.device("cpu"))
    meta = torch.empty(2, device="meta")
    refused("Unsupported", "on meta", lambda: backend.allreduce([meta], dist.AllreduceOptions()))
    wrong = [1] * ranks
    refused(
        "InvalidArgument", "split sizes", lambda: dist.all_to_all_single(torch.ones(9), torch.ones(9), wrong, wrong)
    )
    refused("Unsupported", "is longer than", lambda: dist.set_timeout(timedelta(hours=2)))
    dist.barrier()  # none of this went to the peers


def disagreements() -> None:
    """The ranks differ: each is told how, before data moves."""
    cases: list[tuple[str, Callable[[Any], object]]] = [
        ("elements", lambda group: dist.all_reduce(torch.ones(3 + rank % 2), group=group)),
        (
            "dtype",
            lambda group: dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank % 2]), group=group),
        ),
        (
            "operation",
            lambda group: dist.barrier(group=group) if rank % 2 else dist.broadcast(torch.ones(4), 0, group=group),
        ),
        ("root", lambda group: dist.broadcast(torch.ones(4), rank % 2, group=group)),
    ]
    for name, operation in cases:
        group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(20)))
        error = refused("TesseraError", "rank", lambda operation=operation, group=group: operation(group))
        kinds = [cls.__name__ for cls in type(error).__mro__]
        assert {"Mismatch", "Aborted"} & set(kinds), f"{name}: {kinds} {error}"
        refused("Aborted", "", lambda group=group: dist.barrier(group=group))
        dist.barrier(group=gloo)
        dist.destroy_process_group(group)


def timeouts() -> None:
    group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(30)))
    begin = time.monotonic()
    if rank == 0:
        refused(
            "TesseraTimeout",
            "Rank" + "s" * (ranks > 2) + " " + ", ".join(map(str, range(1, ranks))) + " failed to pass",
            lambda: dist.monitored_barrier(group, timeout=timedelta(seconds=1), wait_all_ranks=True),
        )
        refused("TesseraTimeout", "Rank 0 timed out", lambda: group.monitored_barrier(timedelta(0)))
        assert time.monotonic() - begin < patience(20)
    dist.barrier(group=gloo)
    if rank != 0:  # the group has survived, and who comes late finds the others' traces
        for _ in range(2):
            dist.monitored_barrier(group, timeout=timedelta(seconds=patience(20)))
    for _ in range(4):
        dist.monitored_barrier(group, timeout=timedelta(seconds=patience(20)))
    dist.all_reduce(torch.ones(1), group=group)

    dist.set_timeout(timedelta(seconds=1), group)
    begin = time.monotonic()
    if rank == 0:
        refused("TesseraTimeout", "0:00:01", lambda: dist.all_reduce(torch.ones(1), group=group))
        assert time.monotonic() - begin < patience(20)
    dist.barrier(group=gloo)

    short = dist.new_group(backend="tessera", timeout=timedelta(seconds=3))
    if rank != ranks - 1:
        error = refused("TesseraTimeout", f"rank {ranks - 1}", lambda: dist.barrier(group=short))
        assert error.peer == ranks - 1
    dist.barrier(group=gloo)
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    if work is not None:
        refused("NotReady", "", lambda: work.wait(timedelta(milliseconds=50)))
    dist.barrier(group=gloo)
    (work or dist.all_reduce(torch.ones(1), async_op=True)).wait()


def aborted() -> None:
    group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(60)))
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True) if rank else None
    if rank == 0:
        group.abort()
    else:
        refused("Aborted", "", work.wait)
        refused("RuntimeError", "Aborted", work.get_future().wait)
    dist.barrier(group=gloo)


def again() -> None:
    """A program may begin anew, over another rendezvous or the same one."""
    for number in range(2):
        dist.destroy_process_group()
        bound = {"device_id": torch.device("cpu", 0)} if number else {}
        dist.init_process_group("cpu:tessera", timeout=timedelta(seconds=patience(60)), **bound)
        dist.new_group([0])
        tensor = torch.full((3,), float(number))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(number * ranks)] * 3
        assert dist.get_backend_config() == "cpu:tessera"


CHECKS: list[Check] = [
    reductions,
    reduction_of_real_numbers,
    reduction_of_sparse_tensors,
    movements,
    lengths_that_differ,
    memory_that_is_not_contiguous,
    dtypes_that_are_only_moved,
    coalesced,
    asynchronous,
    sends_and_receives,
    objects,
    groups,
    what_is_refused,
    disagreements,
    timeouts,
    aborted,
    again,
]


# Enough for two ranks, after three have run all.
SHORT = [reductions, movements, lengths_that_differ, sends_and_receives, groups]


def begin() -> None:
    """Our group is the default one, and nobody has imported tessera; Gloo's is beside it."""
    global gloo
    assert "tessera" not in sys.modules or ranks == 4
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(60)))
    assert dist.get_backend() == "tessera"
    assert "tessera.torch.checkpoint" not in sys.modules
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience(60)))


def collectives(*names: str) -> None:
    begin()
    run_checks(CHECKS if names or ranks > 2 else SHORT, names, rank)
    dist.destroy_process_group()


# ---------------------------------------------------------------- training


class Net(nn.Module):
    """Sizes that 3 and 4 ranks do not divide, and a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.down = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(torch.relu(self.norm(self.up(x)))))


def trained(wrapped: Callable[[Net], tuple[nn.Module, bool]], steps: int = 3) -> Tensors:
    """The parameters, whole, after some steps. Ranks see data of their own if `wrapped` says so."""
    torch.manual_seed(5)
    model, apart = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank if apart else 0)
    for _ in range(steps):
        loss = model(torch.randn(8, 6, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = [
        getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)() for parameter in model.parameters()
    ]
    return [parameter.detach() for parameter in whole]


def ddp(model: nn.Module, **options: Any) -> tuple[nn.Module, bool]:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005, **options), True


class Sometimes(nn.Module):
    """One layer that rank 0 alone uses, unless the graph is static, and one that nobody does."""

    def __init__(self, rest: nn.Module, static: bool) -> None:
        super().__init__()
        self.rest, self.first, self.never = rest, nn.Linear(6, 6), nn.Linear(6, 6)
        self.static = static

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.static and rank == 0:
            x = x + self.first(x)
        return torch.as_tensor(self.rest(x))


class Recomputed(nn.Module):
    """The first part is computed again in backward; `often`: it is also used twice, which wants a static graph."""

    def __init__(self, rest: nn.Module, reentrant: bool, often: bool) -> None:
        super().__init__()
        self.rest, self.first = rest, nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.reentrant, self.often = reentrant, often

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x.requires_grad_()
        for _ in range(2 if self.often else 1):
            x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return torch.as_tensor(self.rest(x))


class Image(nn.Module):
    """Weights whose memory is in another order than their dimensions."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.rest, self.image = rest, nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.rest(self.image(x.view(8, 2, 1, 3)).flatten(1)))


def ddp_with_unused_parameters(model: Net) -> tuple[nn.Module, bool]:
    return ddp(Sometimes(model, static=False), find_unused_parameters=True)


def ddp_of_a_static_graph(model: Net) -> tuple[nn.Module, bool]:
    return ddp(Sometimes(model, static=True), static_graph=True)


def ddp_that_computes_again(model: Net) -> tuple[nn.Module, bool]:
    return ddp(Recomputed(model, reentrant=False, often=False))


def ddp_that_computes_again_and_often(model: Net) -> tuple[nn.Module, bool]:
    return ddp(Recomputed(model, reentrant=True, often=True), static_graph=True)


def ddp_of_other_layouts(model: Net) -> tuple[nn.Module, bool]:
    return ddp(Image(model), gradient_as_bucket_view=True)


def several_passes(count: int, block: Callable[[Any, int], AbstractContextManager[Any]]) -> Tensors:
    """Parameters and buffers after three steps of DDP of so many backward passes, each in its `block`."""
    torch.manual_seed(5)
    model, _ = ddp(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for turn in range(count):
            with block(model, turn):
                model(torch.randn(8, 6, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach() for one in (*model.parameters(), *model.buffers())]


def ddp_without_synchronisation() -> Tensors:
    return several_passes(3, lambda model, turn: model.no_sync() if turn < 2 else nullcontext())


def ddp_with_uneven_inputs() -> Tensors:
    """Each rank has a batch more than the one before it; the last one's parameters count at the end."""
    torch.manual_seed(5)
    model, _ = ddp(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    results = []
    for divides in (True, False):
        with model.join(divide_by_initial_world_size=divides):
            for _ in range(2 + rank):
                model(torch.randn(8, 6, generator=data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results += [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
    return results


class Words(nn.Module):
    """An embedding whose gradients are sparse, before the rest."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, sparse=True)
        self.rest = rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.rest(x + self.words(torch.arange(8) % (rank + 2))))


def ddp_of_sparse_gradients(model: Net) -> tuple[nn.Module, bool]:
    return nn.parallel.DistributedDataParallel(Words(model)), True


def ddp_with_a_hook_that_waits(model: Net) -> tuple[nn.Module, bool]:
    """PowerSGD's callbacks wait for further collectives: of one bucket, since those of several race with each other."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model, apart = nn.parallel.DistributedDataParallel(model), True
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, power.powerSGD_hook)
    return model, apart


def ddp_in_half(model: Net) -> tuple[nn.Module, bool]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model, apart = ddp(model, gradient_as_bucket_view=True)
    model.register_comm_hook(None, bf16_compress_hook)
    return model, apart


def with_our_hook(model: Net) -> tuple[nn.Module, bool]:
    import tessera.torch

    model, apart = ddp(model)
    tessera.torch.register_allreduce_hook(model)
    return model, apart


def fsdp(model: Net) -> tuple[nn.Module, bool]:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.up, model.down):
        fully_shard(layer)
    return fully_shard(model), True


def fsdp_in_half(model: Net) -> tuple[nn.Module, bool]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.norm = nn.Identity()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mp_policy=policy), True


def hybrid(model: Net) -> tuple[nn.Module, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "part"))), True


def two_dimensions(model: Net) -> tuple[nn.Module, bool]:
    """Tensor parallel inside, FSDP outside."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    model.norm = nn.Identity()
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=grid["dp"]), False


def tensors_of_many_ranks() -> Tensors:
    """DTensor: every change of placement, and a product of matrices that are cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    whole = values((7, 6), torch.float32, 0)
    results = []
    for first in (Shard(0), Shard(1), Replicate()):
        for second in (Shard(0), Shard(1), Replicate()):
            cut = distribute_tensor(whole, grid, [first, second])
            results.append(cut.full_tensor())
            for other in (Shard(0), Shard(1), Replicate()):
                results.append(cut.redistribute(placements=[other, first]).full_tensor())
    left = distribute_tensor(whole, grid["b"], [Shard(1)])
    right = distribute_tensor(whole.t().contiguous(), grid["b"], [Shard(0)])
    product = left @ right
    assert product.placements == (Partial(),)
    results += [product.full_tensor(), product.redistribute(placements=[Shard(0)]).full_tensor()]
    return results


def training(directory: str) -> None:
    """The same on our backend and on Gloo, each with a rendezvous of its own; equal but for the order of summation."""
    kinds = [
        ddp,
        ddp_with_unused_parameters,
        ddp_of_a_static_graph,
        ddp_that_computes_again,
        ddp_that_computes_again_and_often,
        ddp_of_other_layouts,
        ddp_of_sparse_gradients,
        ddp_with_a_hook_that_waits,
        ddp_in_half,
        fsdp,
        fsdp_in_half,
        hybrid,
        two_dimensions,
    ]
    others = [ddp_without_synchronisation, ddp_with_uneven_inputs, tensors_of_many_ranks]
    results: dict[str, list[Tensors]] = {}
    for backend in ("tessera", "gloo"):
        dist.init_process_group(
            backend,
            init_method=f"file://{directory}/{backend}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=patience(60)),
        )
        dist.monitored_barrier()
        results[backend] = [trained(kind) for kind in kinds] + [other() for other in others]
        if backend == "gloo":
            results["hook"] = [trained(with_our_hook)]
        dist.destroy_process_group()
    for kind, ours, theirs in zip([*kinds, *others], results["tessera"], results["gloo"], strict=True):
        differ = kind in (ddp_in_half, fsdp_in_half)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                one,
                other,
                msg=lambda text, kind=kind: f"{kind.__name__}: {text}",
                **({"rtol": 1e-2, "atol": 1e-3} if differ else {}),
            )
    for one, other in zip(results["hook"][0], results["gloo"][0], strict=True):
        torch.testing.assert_close(one, other)
    begin()
    functional()
    dist.destroy_process_group()


def functional() -> None:
    """What compiled programs and DTensor call, from C++."""
    import torch.distributed._functional_collectives as funcol

    def results(group: Any) -> Tensors:
        group = group or dist.group.WORLD
        pair = [values((n,), torch.float32) for n in (2, 3)]
        asked = [
            funcol.all_reduce(values((6,), torch.float32), "sum", group),
            funcol.all_reduce(values((6,), torch.float32), "max", group),
            funcol.all_gather_single(values((3, 2), torch.float32), 1, group),
            funcol.reduce_scatter_single(values((4 * ranks,), torch.float32), "avg", 0, group),
            funcol.all_to_all_single(values((ranks, 2), torch.int64), None, None, group),
            funcol.broadcast(values((5,), torch.float32), 1, group),
            *funcol.all_reduce_coalesced(pair, "sum", group),
            *funcol.all_gather_single_coalesced(pair, group),
            *funcol.reduce_scatter_single_coalesced([tensor.repeat(ranks) for tensor in pair], "sum", [0, 0], group),
        ]
        return [funcol.wait_tensor(tensor) for tensor in asked]

    compare(results)


# ---------------------------------------------------------------- how processes end


def dies() -> None:
    """The last rank is killed in the middle of DDP's backward pass; the others are told whom they lost."""
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(120)))
    group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(120)))
    model, _ = ddp(Net())
    dist.barrier(group=group)
    last = ranks - 1
    if rank == last:
        next(iter(model.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    since = time.monotonic()
    loss = model(torch.randn(8, 6)).square().mean()
    refused("RuntimeError", f"rank {last}", loss.backward)
    refused("PeerLost", f"rank {last}", lambda: dist.all_reduce(torch.ones(3), group=group))
    refused("PeerLost", f"rank {last}", lambda: dist.recv(torch.ones(3), last))
    assert time.monotonic() - since < NOTICED_S


def leaves() -> None:
    """Nothing is destroyed, some work is in flight, and one rank has less to do than the others."""
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(120)))
    kept = [dist.new_group(backend="tessera") for _ in range(3)]
    for group in kept:
        dist.all_reduce(torch.ones(100_000), group=group)
    works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(3)]
    works[0].get_future().then(lambda _: None)
    dist.barrier(group=kept[0])  # before, a rank that leaves would end what another has yet to begin
    if rank != 2:
        works.append(dist.all_reduce(torch.ones(3), group=kept[1], async_op=True))  # for ever in flight
    if rank == 0:
        dist.send(torch.arange(5.0), 1)
    else:
        dist.barrier(group=dist.new_group([1, 2], backend="tessera", use_local_synchronization=True))
        if rank == 1:
            received = torch.empty(5)
            dist.recv(received, 0)  # what is sent arrives, though its sender has gone
            assert received.tolist() == [0, 1, 2, 3, 4]


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
