"""A rank on a GPU, for test_gpu.py: what goes wrong, and that the process goes on.

usage: faults.py DIRECTORY late|killed|assert|refused
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import one_gpu
import tessera as ts
import torch
from patience import until

DIRECTORY, MODE = Path(sys.argv[1]), sys.argv[2]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fails(kind: type[ts.errors.TesseraError], call: Callable[[], object]) -> ts.errors.TesseraError:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def goes_on_with_the_cpu(store: ts.Store, ranks: int = RANKS) -> None:
    with ts.Comm.create(store, RANK, ranks, name="afterwards", backend="auto") as comm:
        x = torch.full((1000,), RANK + 1.0)
        comm.all_reduce(x)
        assert bool((x == ranks * (ranks + 1) / 2).all())


def late(comm: ts.Comm, x: torch.Tensor) -> None:
    """Rank 1 does not take part: the operation ends at its deadline, and with it what waits on the stream."""
    if RANK == 1:
        until(lambda: comm.error, 60, "the failure of rank 0")
        return
    comm.timeout = 3.0
    begin = time.monotonic()
    stream = torch.cuda.Stream()
    work = comm.on_stream(stream).all_reduce(x, async_op=True)
    work.order(stream)
    with torch.cuda.stream(stream):
        after = torch.ones(10, device=x.device) * 2
    print("late:", fails(ts.errors.TesseraTimeout, work.wait))
    stream.synchronize()  # the aborted kernel is gone
    assert bool((after == 2).all())
    assert time.monotonic() - begin < 30
    fails(ts.errors.TesseraError, lambda: comm.all_reduce(x))


def killed(comm: ts.Comm, x: torch.Tensor) -> None:
    if RANK == 1:
        until(lambda: (DIRECTORY / "launched").exists(), 60, "the operation of rank 0")
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.all_reduce(x, async_op=True)
    (DIRECTORY / "launched").touch()
    print("killed:", fails(ts.errors.PeerLost, work.wait))
    torch.cuda.synchronize()
    assert bool((torch.ones(10, device=x.device) * 2 == 2).all())


def assert_in_a_kernel(comm: ts.Comm, x: torch.Tensor) -> None:
    """A kernel of rank 1 fails for good: no rank waits for ever, and both go on with the CPU."""
    if RANK == 1:
        with contextlib.suppress(RuntimeError):  # some call of PyTorch's may notice it first
            torch.zeros(10, device=x.device)[torch.tensor([1 << 30], device=x.device)] += 1
    error = fails(ts.errors.TesseraError, lambda: comm.all_reduce(x, async_op=True).wait())
    if RANK == 1:
        assert isinstance(error, ts.errors.CudaError | ts.errors.NcclError), error
    print(f"assert on rank {RANK}: {type(error).__name__}: {error}")


def refused(comm: ts.Comm, x: torch.Tensor) -> None:
    invalid = ts.errors.InvalidArgument
    stream = torch.cuda.Stream()
    print("refused:", fails(invalid, lambda: comm.on_stream(stream).all_reduce(torch.ones(4))))
    print("refused:", fails(invalid, lambda: comm.all_reduce([x, torch.ones(4)])))
    print(
        "refused:", fails(ts.errors.TesseraError, lambda: comm.all_reduce(torch.ones(4, dtype=torch.complex64).cuda()))
    )
    managed = torch.ones(4).pin_memory()
    comm.all_reduce(managed)  # pinned memory is the host's
    assert bool((managed == RANKS).all())
    comm.all_reduce(x)
    assert bool((x == RANKS).all())


def main() -> None:
    faulthandler.dump_traceback_later(60)
    one_gpu.share(torch.cuda.device_count())
    DIRECTORY.mkdir(exist_ok=True)
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with ts.Store(f"file://{DIRECTORY}", insecure=True) as store:
        comm = ts.Comm.create(store, RANK, RANKS, timeout=60, backend="cpu:auto,cuda:nccl")
        comm.all_reduce(torch.ones(1, device="cuda"))  # NCCL is connected
        torch.cuda.synchronize()
        {"late": late, "killed": killed, "assert": assert_in_a_kernel, "refused": refused}[MODE](comm, x)
        comm.close()
        goes_on_with_the_cpu(store, 1 if MODE == "killed" else RANKS)
    print(f"rank {RANK} is well", flush=True)
    os._exit(0)  # after a fault of the device, PyTorch's own end may fail


main()
