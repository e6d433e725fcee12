"""What test_torch_c10d.py runs: under torchrun's environment, one process a rank, on the backend "tessera".

usage: torch_c10d_jobs.py [CHECK...]

Each check is a behaviour that PyTorch's tests of its Gloo backend have, as told in docs/TORCH.md; results are known
beforehand. What is compared with Gloo itself is in torch_backend_jobs.py.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tessera as ts
import torch
import torch.distributed as dist
from torch_ranks import patience, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
total = ranks * (ranks + 1) / 2  # of 1 ... ranks


def own(*shape: int, add: float = 0) -> torch.Tensor:
    return torch.full(shape, rank + 1.0 + add)


WRONG = (ValueError, RuntimeError, TypeError, NotImplementedError)


# ---------------------------------------------------------------- arguments


def arguments_of_rooted_collectives() -> None:
    """A root that is no rank, lists on the wrong ranks, of the wrong length, of other shapes or dtypes."""
    tensor = own(3)
    for root in (-1, ranks):
        for act in (dist.broadcast, dist.reduce):
            refused(WRONG, "", lambda act=act, root=root: act(tensor, root))
    some, all_of_them = [torch.empty(3)], [torch.empty(3) for _ in range(ranks)]
    if rank == 0:
        refused(WRONG, "", lambda: dist.gather(tensor, None, dst=0))
        refused(WRONG, "", lambda: dist.gather(tensor, some, dst=0))
        refused(WRONG, "", lambda: dist.gather(tensor, [torch.empty(4) for _ in range(ranks)], dst=0))
        refused(WRONG, "", lambda: dist.gather(tensor, [torch.empty(3).double() for _ in range(ranks)], dst=0))
        refused(WRONG, "", lambda: dist.scatter(tensor, None, src=0))
        refused(WRONG, "", lambda: dist.scatter(tensor, some, src=0))
        refused(WRONG, "", lambda: dist.scatter(tensor, [torch.empty(4) for _ in range(ranks)], src=0))
        refused(WRONG, "", lambda: dist.scatter(tensor, [torch.empty(3).double() for _ in range(ranks)], src=0))
    else:
        refused(WRONG, "", lambda: dist.gather(tensor, all_of_them, dst=0))
        refused(WRONG, "", lambda: dist.scatter(tensor, all_of_them, src=0))
    dist.barrier()  # nothing of this went to the peers


def arguments_of_collectives() -> None:
    """Lists of the wrong length, of several dtypes; what is no dense tensor; sizes that do not divide."""
    tensor = own(3)
    refused(WRONG, "", lambda: dist.all_gather([torch.empty(3)], tensor))
    refused(WRONG, "", lambda: dist.all_gather([torch.empty(3).double() for _ in range(ranks)], tensor))
    refused(WRONG, "", lambda: dist.all_gather_single(torch.empty(3 * ranks + 1), tensor))
    refused(WRONG, "", lambda: dist.all_gather_single(torch.empty(3 * ranks).double(), tensor))
    refused(WRONG, "", lambda: dist.reduce_scatter_single(torch.empty(3), torch.empty(3 * ranks + 1)))
    refused(WRONG, "", lambda: dist.reduce_scatter(torch.empty(3), [torch.empty(3)]))
    refused(WRONG, "", lambda: dist.all_to_all_single(torch.empty(3 * ranks), torch.empty(3 * ranks).double()))
    refused(WRONG, "", lambda: dist.all_to_all([torch.empty(3)], [torch.empty(3)]))
    refused(WRONG, "", lambda: dist.all_reduce([tensor]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(WRONG, "", lambda: dist.all_reduce_coalesced([]))
        refused(WRONG, "", lambda: dist.all_reduce_coalesced([own(2), own(2).double()]))
        refused(WRONG, "", lambda: dist.all_reduce_coalesced([own(2), own(2).to_sparse()]))
    refused(WRONG, "", lambda: dist.broadcast(torch.eye(3).to_sparse(), 0))
    refused(WRONG, "", lambda: dist.send(tensor, ranks))
    refused(WRONG, "", lambda: dist.recv(tensor, ranks))
    dist.barrier()


# ---------------------------------------------------------------- results


def tensors_without_elements() -> None:
    for shape in ((0,), (2, 0), (0, 3)):
        empty, others = torch.empty(shape), [torch.empty(shape) for _ in range(ranks)]
        dist.broadcast(empty, 0)
        dist.all_reduce(empty)
        dist.reduce(empty, 0)
        dist.all_gather(others, empty)
        dist.gather(empty, others if rank == 0 else None, dst=0)
        dist.scatter(empty, others if rank == 0 else None, src=0)
        dist.reduce_scatter(empty, others)
        dist.all_to_all(others, [torch.empty(shape) for _ in range(ranks)])
        assert empty.shape == shape
    assert dist.all_reduce(torch.empty(0), async_op=True).wait()


def tensors_without_dimensions() -> None:
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    assert number.item() == total
    numbers = [torch.empty(()) for _ in range(ranks)]
    dist.all_gather(numbers, torch.tensor(float(rank)))
    assert [n.item() for n in numbers] == list(range(ranks))
    dist.broadcast(number.fill_(rank), 1)
    assert number.item() == 1


def every_root_and_reduction() -> None:
    expected = {
        dist.ReduceOp.SUM: total,
        dist.ReduceOp.PRODUCT: float(torch.arange(1, ranks + 1).prod()),
        dist.ReduceOp.MIN: 1.0,
        dist.ReduceOp.MAX: float(ranks),
        dist.ReduceOp.AVG: total / ranks,
    }
    for op, value in expected.items():
        for root in range(ranks):
            tensor = own(5)
            dist.reduce(tensor, root, op)
            assert tensor.tolist() == [value if rank == root else rank + 1] * 5  # others keep theirs
        tensor = own(2, 2)
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [[value] * 2] * 2
    for op, fold in (
        (dist.ReduceOp.BAND, int.__and__),
        (dist.ReduceOp.BOR, int.__or__),
        (dist.ReduceOp.BXOR, int.__xor__),
    ):
        number = torch.tensor([rank + 5])
        dist.all_reduce(number, op)
        value = 5
        for other in range(1, ranks):
            value = fold(value, other + 5)
        assert number.item() == value


def truth_values_and_complex_numbers() -> None:
    flags = torch.tensor([rank == 0, True, False])
    for op, expected in (
        (dist.ReduceOp.SUM, [True, True, False]),
        (dist.ReduceOp.PRODUCT, [False, True, False]),
        (dist.ReduceOp.BXOR, [True, ranks % 2 == 1, False]),
    ):
        result = flags.clone()
        dist.all_reduce(result, op)
        assert result.tolist() == expected
    everyone = [torch.empty(3, dtype=torch.bool) for _ in range(ranks)]
    dist.all_gather(everyone, flags)
    assert [one[0].item() for one in everyone] == [True] + [False] * (ranks - 1)
    number = torch.tensor([1 + 2j]) * (rank + 1)
    dist.all_reduce(number)
    assert number.item() == (1 + 2j) * total
    dist.broadcast(number.fill_(rank * 1j), ranks - 1)
    assert number.item() == (ranks - 1) * 1j
    outputs = [torch.empty(1, dtype=torch.complex64) for _ in range(ranks)]
    dist.all_gather(outputs, torch.tensor([rank * (1 + 1j)], dtype=torch.complex64))
    assert [one.item() for one in outputs] == [r * (1 + 1j) for r in range(ranks)]


def tensors_of_autograd_and_inference() -> None:
    with torch.inference_mode():
        outputs = [torch.zeros(3) for _ in range(ranks)]
        dist.all_gather(outputs, own(3))
        assert [out[0].item() for out in outputs] == [r + 1 for r in range(ranks)]
        tensor = own(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [total] * 3
    weight = own(3).requires_grad_()
    dist.broadcast(weight.detach(), 0)
    assert weight.tolist() == [1.0] * 3
    assert weight.requires_grad


def many_operations_at_once() -> None:
    """A thousand of all kinds in flight, waited for in another order."""
    sums, from_roots, gathered, works = [], [], [], []
    for i in range(250):
        sums.append(own(1 + i % 17, add=i))
        works.append(dist.all_reduce(sums[-1], async_op=True))
        from_roots.append(own(3, add=i))
        works.append(dist.broadcast(from_roots[-1], i % ranks, async_op=True))
        gathered.append([torch.empty(2) for _ in range(ranks)])
        works.append(dist.all_gather(gathered[-1], own(2, add=i), async_op=True))
        works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work is not None
        assert work.wait()
    for i in range(250):
        assert sums[i].eq(total + ranks * i).all()
        assert from_roots[i].eq(i % ranks + 1 + i).all()
        assert [one[0].item() for one in gathered[i]] == [r + 1 + i for r in range(ranks)]


def sparse_sums() -> None:
    """Gradients of embeddings, with dense parts and without entries."""
    for entries, dense in ((1, ()), (3, (2,)), (0, (2,))):
        places = torch.tensor([list(range(rank, rank + entries))])
        tensor = torch.sparse_coo_tensor(places, own(entries, *dense), (ranks + 3, *dense), check_invariants=True)
        expected = torch.zeros(ranks + 3, *dense)
        for of in range(ranks):
            expected[of : of + entries] += of + 1
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), expected)
    refused(NotImplementedError, "SUM", lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MIN))
    work = dist.all_reduce(torch.eye(2).to_sparse(), async_op=True)
    assert work.wait()


# ---------------------------------------------------------------- waiting


def works_tell_their_state() -> None:
    tensor = own(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.wait(timedelta(seconds=1))  # again
    deadline = time.monotonic() + patience(20)
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.get_future().value()[0] is not None
    assert tensor.tolist() == [total] * 4
    seen: list[float] = []
    future = dist.all_reduce(own(1), async_op=True).get_future().then(lambda done: seen.append(done.value()[0].item()))
    future.wait()
    assert seen == [total]


def a_barrier_implies_what_came_before() -> None:
    tensors = [own(30_000, add=i) for i in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert all(tensor.eq(total + ranks * i).all() for i, tensor in enumerate(tensors))


def sequence_numbers() -> None:
    group = dist.new_group(backend="tessera")
    assert group._get_sequence_number_for_group() == 0
    for _ in range(3):
        dist.all_reduce(own(1), group=group)
    assert group._get_sequence_number_for_group() == 3
    for left_out in range(ranks):
        some = dist.new_group([r for r in range(ranks) if r != left_out], backend="tessera")
        if rank != left_out:
            dist.all_reduce(own(1), group=some)
            assert some._get_sequence_number_for_group() == 1


def deadlines_of_an_operation() -> None:
    """One call's, by Options; the group's; and a wait that gives up leaves the operation in flight."""
    group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(60)))
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=300)
        since = time.monotonic()
        work = backend_of(group).allreduce([own(1)], options)
        refused(TimeoutError, "0:00:00.3", work.wait)
        assert time.monotonic() - since < patience(20)
    dist.barrier()
    group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(60)))
    if rank == 0:
        options.timeout = timedelta(0)  # a deadline, too
        since = time.monotonic()
        refused(TimeoutError, "Rank 1 failed", lambda: dist.monitored_barrier(group, timedelta(0)))
        refused(TimeoutError, "0:00:00", backend_of(group).allreduce([own(1)], options).wait)
        assert time.monotonic() - since < patience(20)
    dist.barrier()
    short = dist.new_group(backend="tessera", timeout=timedelta(seconds=3))
    if rank == 0:
        refused(dist.DistBackendError, "rank", lambda: dist.barrier(group=short))
    dist.barrier()


def deadlines_of_the_environment() -> None:
    """TESSERA_TIMEOUT_MS counts where none is given: here, and for what Tessera makes over another backend's group."""
    from tessera.torch.meeting import communicator_of
    from tessera.torch.ranks import ranks_of

    usual = timedelta(minutes=30)
    os.environ["TESSERA_TIMEOUT_MS"] = "3000"
    try:
        plain = dist.new_group(backend="tessera")
        by_device = dist.new_group(backend="cpu:tessera")
        given = dist.new_group(backend="tessera", timeout=2 * usual)
        gloo = dist.new_group(backend="gloo")
        assert communicator_of(gloo).timeout == 3
        assert ranks_of(gloo, False).comm.timeout == 3
        assert communicator_of(dist.new_group(backend="gloo", timeout=2 * usual)).timeout == 3600
        for number in ("0", "-5", "3 s", "1e3"):
            os.environ["TESSERA_TIMEOUT_MS"] = number
            refused(ValueError, f"TESSERA_TIMEOUT_MS is '{number}'", lambda: dist.new_group(backend="tessera"))
    finally:
        del os.environ["TESSERA_TIMEOUT_MS"]
    for group in (plain, by_device):
        assert backend_of(group).options._timeout == timedelta(seconds=3)
    assert backend_of(given).options._timeout == 2 * usual
    for group in (dist.new_group(backend="tessera"), gloo):
        assert backend_of(group).options._timeout == usual
    since = time.monotonic()
    if rank == 0:
        refused(TimeoutError, "rank", lambda: dist.barrier(group=plain))
        assert time.monotonic() - since < patience(20)
    dist.barrier()


def several_tensors_at_once() -> None:
    """Which `torch.distributed` itself never gives to these: Gloo adds them all up, or sends one into all."""
    group: Any = dist.group.WORLD
    two, lists = [own(2), own(2)], [[own(2) for _ in range(ranks)] for _ in range(2)]
    for name, call in {
        "allreduce": lambda: group.allreduce(two),
        "broadcast": lambda: group.broadcast(two, dist.BroadcastOptions()),
        "reduce": lambda: group.reduce(two, dist.ReduceOptions()),
        "allgather": lambda: group.allgather(lists, two),
        "scatter": lambda: group.scatter(two, lists if rank == 0 else [], dist.ScatterOptions()),
        "reduce_scatter": lambda: group.reduce_scatter(two, lists),
        "send": lambda: group.send(two, (rank + 1) % ranks, 0),
        "recv": lambda: group.recv(two, (rank + 1) % ranks, 0),
    }.items():
        refused(WRONG, name if name == "scatter" else f"{name} got 2 tensors", call)
    options = dist.BroadcastOptions()
    options.rootTensor = 1
    refused(WRONG, "with root tensor 1", lambda: group.broadcast(two, options))
    mixed = [torch.ones(2), torch.ones(2, dtype=torch.bool)]
    coalesced = dist.AllreduceCoalescedOptions()
    refused(WRONG, "one dtype", lambda: group.allreduce_coalesced(mixed, coalesced))
    group.allreduce_coalesced(two, coalesced).wait()
    assert all(torch.equal(one, two[0]) for one in two)


def memory_that_overlaps() -> None:
    """Tensors of one call that share memory: results are those of copies, of outputs the last one's."""
    last = own(4, add=ranks - 1 - rank)
    tensor = own(4)
    with warnings.catch_warnings(action="ignore"):
        dist.all_reduce_coalesced([tensor, tensor])
    assert tensor.tolist() == [total] * 4
    tensor = own(4)
    backend_of(dist.group.WORLD).allreduce_coalesced([tensor[:3], tensor[1:]], dist.AllreduceCoalescedOptions()).wait()
    assert tensor.tolist() == [total] * 4
    tensor, others = own(4), [torch.empty(4) for _ in range(ranks - 1)]
    dist.all_gather([torch.empty(4)] * ranks, tensor)
    dist.all_gather([*others, tensor], tensor)
    assert torch.equal(tensor, last)
    tensor = own(4)
    dist.gather(tensor, [*others, tensor] if rank == 0 else None)
    assert torch.equal(tensor, last) or rank > 0
    for whole in (own(2 * ranks), own(2 * ranks)):
        dist.all_gather_into_tensor(whole, whole[-2:])
        assert whole.tolist() == [1.0 + one // 2 for one in range(2 * ranks)]
    whole = own(2 * ranks)
    dist.reduce_scatter_tensor(whole[-2:], whole)
    assert whole.tolist() == [rank + 1.0] * (2 * ranks - 2) + [total] * 2
    tensor = own(2)
    dist.reduce_scatter(tensor, [tensor] * ranks)
    assert tensor.tolist() == [total] * 2
    for splits in ([], [2] * ranks):
        whole = own(2 * ranks)
        dist.all_to_all_single(whole, whole, splits, splits)
        assert whole.tolist() == [1.0 + one // 2 for one in range(2 * ranks)]
    tensors = [own(2, add=10 * one) for one in range(ranks)]
    dist.all_to_all(tensors, tensors[::-1])
    assert [one.tolist() for one in tensors] == [[1.0 + one + 10 * (ranks - 1 - rank)] * 2 for one in range(ranks)]


def backend_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


def collectives_that_differ() -> None:
    """Sizes, dtypes, kinds of collectives and roots: named on every rank, without TORCH_DISTRIBUTED_DEBUG."""
    last = rank == ranks - 1
    for act, text in (
        (lambda group: dist.all_reduce(own(2 + last), group=group), "all_reduce of 3 f32"),
        (lambda group: dist.all_reduce(own(2).to((torch.float32, torch.int32)[last]), group=group), "i32"),
        (lambda group: dist.all_reduce(own(2), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[last], group=group), "max"),
        (lambda group: dist.barrier(group=group) if last else dist.all_reduce(own(2), group=group), "barrier"),
        (lambda group: dist.broadcast(own(2), int(last), group=group), "root"),
    ):
        group = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(30)))
        refused((ValueError, RuntimeError), text, lambda act=act, group=group: act(group))
        dist.barrier()


def errors_are_pytorchs() -> None:
    """What programs for Gloo and for NCCL catch, and what those for Tessera catch; also in another process."""
    last = rank == ranks - 1

    def caught(act: Callable[[], object], kind: type[BaseException]) -> None:
        try:
            act()
        except dist.DistError as error:
            assert isinstance(error, dist.DistBackendError)
            assert isinstance(error, RuntimeError)
            assert isinstance(error, kind), error
            assert type(pickle.loads(pickle.dumps(error))) is type(error)
            return
        raise AssertionError("nothing was raised")

    differing = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(30)))
    caught(lambda: dist.all_reduce(own(2 + last), group=differing), ts.Mismatch)
    caught(lambda: dist.all_reduce(own(2), group=differing), ts.Aborted)
    refused(RuntimeError, "PREMUL_SUM", lambda: dist.all_reduce(own(2), dist._make_nccl_premul_sum(2.0)))
    late = dist.new_group(backend="tessera", timeout=timedelta(seconds=patience(30)))
    if last:
        caught(lambda: dist.monitored_barrier(late, timedelta(milliseconds=200)), ts.TesseraTimeout)
    dist.barrier()


# ---------------------------------------------------------------- groups


def who_is_in_a_group() -> None:
    group = dist.new_group([0], backend="tessera")
    assert dist.get_rank(group) == (0 if rank == 0 else -1)
    if rank == 0:
        assert dist.get_world_size(group) == 1
        assert dist.get_group_rank(group, 0) == 0
        refused(ValueError, "", lambda: dist.get_group_rank(group, 1))
        tensor = own(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0, 1.0]
    else:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            dist.all_reduce(own(2), group=group)
            dist.barrier(group=group)
        assert any("group" in str(one.message) for one in told)
    dist.barrier()


def groups_without_the_others() -> None:
    """Only the members meet, twice. PyTorch numbers groups by rank: all have to make equally many."""
    members = [0, 1] if rank < 2 else [rank]
    for _ in range(2):
        group = dist.new_group(members, backend="tessera", use_local_synchronization=True)
        tensor = own(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(sum(members) + len(members))] * 3
    twice = [dist.new_group([0, 1], backend="tessera") for _ in range(2)]
    if rank < 2:
        tensors = [own(2), own(2, add=10)]
        works = [dist.all_reduce(tensors[i], group=twice[i], async_op=True) for i in (0, 1)]
        for work in works:
            work.wait()
        assert [tensor[0].item() for tensor in tensors] == [3.0, 23.0]
    refused(ValueError, "", lambda: dist.new_group([0, 0], backend="tessera"))
    refused((ValueError, RuntimeError), "", lambda: dist.new_group([ranks], backend="tessera"))
    dist.barrier()


def several_threads() -> None:
    """Each with a group of its own."""
    groups = [dist.new_group(backend="tessera") for _ in range(3)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                tensor = own(100, add=number + i)
                dist.all_reduce(tensor, group=groups[number])
                assert tensor.eq(total + ranks * (number + i)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures


def groups_come_and_go() -> None:
    for number in range(10):
        group = dist.new_group(backend="tessera")
        tensor = own(1, add=number)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == total + ranks * number
        dist.destroy_process_group(group)
        refused((ValueError, RuntimeError), "", lambda group=group: dist.all_reduce(own(1), group=group))


# ---------------------------------------------------------------- transfers


def everybody_sends_to_everybody() -> None:
    received = {other: torch.empty(other + 1) for other in range(ranks) if other != rank}
    receives = [dist.irecv(tensor, other, tag=7) for other, tensor in received.items()]
    sends = [dist.isend(own(rank + 1), other, tag=7) for other in received]
    for work in [*sends, *receives]:
        assert work is not None
        work.wait()
    assert all(tensor.eq(other + 1).all() for other, tensor in received.items())
    for other in range(ranks):  # blocking ones
        if other == rank:
            for to in range(ranks):
                if to != rank:
                    dist.send(own(2), to)
        else:
            tensor = torch.empty(2)
            assert dist.recv(tensor, other) == other
            assert tensor.tolist() == [other + 1.0] * 2


def ranks_of_a_group_as_sources() -> None:
    """`group_src` and `group_dst` number the group's ranks."""
    backwards = dist.new_group(list(reversed(range(ranks))), backend="tessera", sort_ranks=False)
    tensor = own(2)
    dist.broadcast(tensor, group=backwards, group_src=0)
    assert tensor.tolist() == [float(ranks)] * 2
    tensor = own(2)
    dist.reduce(tensor, group=backwards, group_dst=0)
    assert tensor.tolist() == [total if rank == ranks - 1 else rank + 1.0] * 2
    if rank == ranks - 1:
        dist.send(own(2), group=backwards, group_dst=ranks - 1)
    elif rank == 0:
        dist.recv(tensor, group=backwards, group_src=0)
        assert tensor.tolist() == [float(ranks)] * 2


CHECKS = [
    several_tensors_at_once,
    memory_that_overlaps,
    arguments_of_rooted_collectives,
    arguments_of_collectives,
    tensors_without_elements,
    tensors_without_dimensions,
    every_root_and_reduction,
    truth_values_and_complex_numbers,
    tensors_of_autograd_and_inference,
    many_operations_at_once,
    sparse_sums,
    works_tell_their_state,
    a_barrier_implies_what_came_before,
    sequence_numbers,
    deadlines_of_an_operation,
    deadlines_of_the_environment,
    collectives_that_differ,
    errors_are_pytorchs,
    who_is_in_a_group,
    groups_without_the_others,
    several_threads,
    groups_come_and_go,
    everybody_sends_to_everybody,
    ranks_of_a_group_as_sources,
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(60)))
    run_checks(CHECKS, sys.argv[1:], rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
