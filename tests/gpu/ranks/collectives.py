"""A rank on a GPU: every collective, of every dtype, gives on the device what it gives on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import one_gpu
import tessera as ts
import torch

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip
MOVED = (*DTYPES, torch.bool)
COUNTS = (1, 1000, 300_001)


def values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, of which every dtype holds the sums exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 5, (count,), generator=generator).to(dtype)


def main() -> None:
    one_gpu.share(torch.cuda.device_count())
    with ts.init(backend="cpu:auto,cuda:nccl") as comm:
        rank, ranks = comm.rank, comm.world_size
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        on = comm.on_stream(stream)
        is_root = rank == 0
        checked = 0

        def agree(what: str, call: Callable[..., None], result: torch.Tensor, *inputs: torch.Tensor) -> None:
            """Of a collective of `result`, in place or made of the inputs, on the CPU and on the device."""
            nonlocal checked
            checked += 1
            cpu, gpu = result.clone(), result.to(device)
            call(comm, cpu, *inputs)
            call(on, gpu, *(tensor.to(device) for tensor in inputs))
            back = gpu.cpu()
            if not torch.equal(back, cpu):
                wrong = (back != cpu).nonzero().flatten()
                first = int(wrong[0])
                difference = f"{len(wrong)} of {cpu.numel()} differ, the first at {first}"
                raise AssertionError(f"{what}: {difference}: {back[first]}, not {cpu[first]}")

        def send(ranks_of: ts.collectives.Collectives, out: torch.Tensor, own: torch.Tensor) -> None:
            if rank == 0:
                ranks_of.send(own, 1)
            elif rank == 1:
                ranks_of.recv(out, 0)
                assert torch.equal(out.cpu(), values(out.numel(), out.dtype, 0))

        with torch.cuda.stream(stream):
            for dtype, count in itertools.product(MOVED, COUNTS):
                name = f"{dtype} x {count}"
                own = values(count, dtype, rank)
                whole = values(count * ranks, dtype, 100 + rank)
                none, none_whole = torch.zeros_like(own), torch.zeros_like(whole)
                ops = ["sum", "max", "min", "prod"] if dtype != torch.bool else []
                for op in [*ops, "avg"] if dtype.is_floating_point else ops:
                    agree(f"all_reduce {op} {name}", lambda on, x, op=op: on.all_reduce(x, op), own)
                if ops:
                    agree(f"reduce_scatter {name}", lambda on, out, x: on.reduce_scatter(x, out), own, whole)
                agree(f"all_gather {name}", lambda on, out, x: on.all_gather(x, out), none_whole, own)
                agree(f"broadcast {name}", lambda on, x: on.broadcast(x, ranks - 1), own)
                agree(f"all_to_all {name}", lambda on, out, x: on.all_to_all(x, out), none_whole, whole)
                agree(f"scatter {name}", lambda on, out, x: on.scatter(x if is_root else None, out), none, whole)
                agree(f"gather {name}", lambda on, out, x: on.gather(x, out if is_root else None), none_whole, own)
                if ranks > 1:
                    agree(f"send {name}", send, none, own)

            # The order of the stream, with computation before and after, and not a wait of the host in between.
            x = torch.full((1 << 22,), float(rank + 1), device=device)
            matrix = torch.ones(2048, 2048, device=device)
            stream.synchronize()
            for _ in range(20):
                for _ in range(4):
                    matrix = matrix @ matrix * 1e-4
                x.mul_(2).add_(0 * matrix[0, 0])
                on.all_reduce(x, "avg")
                x.div_(2)
            assert torch.allclose(x, torch.full_like(x, (ranks + 1) / 2)), x[:4]

            # Asynchronous: on a stream of the communicator, after what ours had; ours goes on after order().
            for i in range(20):
                y = torch.full((1 << 20,), float(i + rank), device=device)
                work = on.all_reduce(y, async_op=True)
                work.order(stream)
                y.add_(1)
                expected = sum(i + r for r in range(ranks)) + 1
                assert bool((y == expected).all()), (y[:4], expected)
                work.wait()

            plan_of = torch.full((1000,), float(rank), device=device)
            with on.prepare("all_reduce", outputs=[plan_of]) as plan:
                for _ in range(5):
                    plan_of.fill_(float(rank))
                    plan.run()
                    assert bool((plan_of == sum(range(ranks))).all())

        # Into a graph, beside an operation that is watched; the graph then runs what it has again and again.
        graphed = torch.ones(1000, device=device)
        watched = torch.ones(1 << 24, device=device)
        torch.cuda.synchronize()
        comm.barrier()
        with on.prepare("all_reduce", outputs=[graphed]) as plan:
            graph = torch.cuda.CUDAGraph()
            work = comm.all_reduce(watched, async_op=True)
            with torch.cuda.graph(graph, stream=stream):
                graphed.mul_(2)
                plan.run()
                comm.on_stream(stream).all_reduce(graphed, "max")
            work.wait()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            assert bool((graphed == (2.0 * ranks) ** 5).all()), graphed[:4]
            del graph

        # A group of its own, with its own communicator of NCCL; and the default stream.
        with comm.split(color=0, key=-rank) as turned:
            z = torch.full((5,), float(turned.rank), device=device)
            turned.broadcast(z, 0)
            torch.cuda.synchronize()
            assert bool((z == 0).all())
        print(f"rank {rank}: {checked} collectives agree with the CPU's", flush=True)


main()
