"""A rank on a GPU: every collective, of every dtype, gives on the device what it gives on the CPU."""

from __future__ import annotations

import itertools

import one_gpu  # noqa: F401  first
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
    with ts.init(backend="cpu:auto,cuda:nccl") as comm:
        rank, ranks = comm.rank, comm.world_size
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream()
        checked = 0

        def compare(what: str, cpu: torch.Tensor, gpu: torch.Tensor) -> None:
            nonlocal checked
            checked += 1
            back = gpu.cpu()
            if not torch.equal(back, cpu):
                wrong = (back != cpu).nonzero().flatten()
                first = int(wrong[0])
                difference = f"{len(wrong)} of {cpu.numel()} differ, the first at {first}"
                raise AssertionError(f"{what}: {difference}: {back[first]}, not {cpu[first]}")

        with torch.cuda.stream(stream):
            on = comm.on_stream(stream)
            for dtype, count in itertools.product(MOVED, COUNTS):
                name = f"{dtype} x {count}"
                own = values(count, dtype, rank)
                whole = values(count * ranks, dtype, 100 + rank)
                own_gpu, whole_gpu = own.to(device), whole.to(device)
                if dtype != torch.bool:
                    for op in ("sum", "max", "min", "prod"):
                        a, b = own.clone(), own_gpu.clone()
                        comm.all_reduce(a, op)
                        on.all_reduce(b, op)
                        compare(f"all_reduce {op} {name}", a, b)
                    a, b = own.clone(), own_gpu.clone()
                    comm.reduce_scatter(whole, a)
                    on.reduce_scatter(whole_gpu, b)
                    compare(f"reduce_scatter {name}", a, b)
                if dtype.is_floating_point:
                    a, b = own.clone(), own_gpu.clone()
                    comm.all_reduce(a, "avg")
                    on.all_reduce(b, "avg")
                    compare(f"all_reduce avg {name}", a, b)
                a, b = torch.zeros_like(whole), torch.zeros_like(whole_gpu)
                comm.all_gather(own, a)
                on.all_gather(own_gpu, b)
                compare(f"all_gather {name}", a, b)
                a, b = own.clone(), own_gpu.clone()
                comm.broadcast(a, ranks - 1)
                on.broadcast(b, ranks - 1)
                compare(f"broadcast {name}", a, b)
                a, b = torch.zeros_like(whole), torch.zeros_like(whole_gpu)
                comm.all_to_all(whole, a)
                on.all_to_all(whole_gpu, b)
                compare(f"all_to_all {name}", a, b)
                a, b = torch.zeros_like(own), torch.zeros_like(own_gpu)
                is_root = rank == 0
                comm.scatter(whole if is_root else None, a)
                on.scatter(whole_gpu if is_root else None, b)
                compare(f"scatter {name}", a, b)
                a, b = torch.zeros_like(whole), torch.zeros_like(whole_gpu)
                comm.gather(own, a if is_root else None)
                on.gather(own_gpu, b if is_root else None)
                compare(f"gather {name}", a, b)
                if ranks > 1:
                    a, b = torch.zeros_like(own), torch.zeros_like(own_gpu)
                    if rank == 0:
                        on.send(own_gpu, 1)
                    elif rank == 1:
                        on.recv(b, 0)
                        compare(f"send {name}", values(count, dtype, 0), b)

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

        # A group of its own, with its own communicator of NCCL; and the default stream.
        with comm.split(color=0, key=-rank) as turned:
            z = torch.full((5,), float(turned.rank), device=device)
            turned.broadcast(z, 0)
            torch.cuda.synchronize()
            assert bool((z == 0).all())
        print(f"rank {rank}: {checked} collectives agree with the CPU's", flush=True)


main()
