"""`./dev bench NAME`: runs ours and the peers alternately, prints a table, writes benchmarks/results/NAME.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import results

ROOT = Path(__file__).resolve().parent.parent


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    commands.add_parser("check", help="recompute the ratios of all result files; print what misses its target")
    comm = commands.add_parser("comm", help="all_reduce beside Gloo and Open MPI")
    comm.add_argument("--rounds", type=int, default=7)
    comm.add_argument("--ranks", type=numbers, default=[2, 4, 8])
    comm.add_argument("--sizes", type=numbers)
    hosts = commands.add_parser("hosts", help="all_reduce between two hosts beside Gloo and the line (needs root)")
    hosts.add_argument("--rounds", type=int, default=7)
    hosts.add_argument("--sizes", type=numbers)
    checkpoint = commands.add_parser("checkpoint", help="save and load beside PyTorch DCP, others and raw O_DIRECT")
    checkpoint.add_argument("--rounds", type=int, default=7)
    checkpoint.add_argument("--only", type=lambda text: text.split(","), default=[], help="scenarios, with commas")
    checkpoint_async = commands.add_parser("checkpoint_async", help="saves in the background beside dcp.async_save")
    checkpoint_async.add_argument("--rounds", type=int, default=7)
    command = commands.add_parser("command", help="tessera ckpt on a checkpoint of 100,000 tensors")
    command.add_argument("--rounds", type=int, default=7)
    torch_backend = commands.add_parser("torch_backend", help="all_reduce through torch.distributed beside its gloo")
    torch_backend.add_argument("--rounds", type=int, default=15)
    torch_backend.add_argument("--ranks", type=numbers, default=[2])
    torch_backend.add_argument("--sizes", type=numbers)
    ddp = commands.add_parser("ddp", help="a step of DDP under PyTorch, ours beside its own on gloo and on our backend")
    ddp.add_argument("--rounds", type=int, default=35)
    ddp.add_argument("--ranks", type=numbers, default=[2])
    ddp.add_argument("--layers", type=int, default=8)
    threads = commands.add_parser("threads", help="a step of DDP beside the same replicas as threads of one process")
    threads.add_argument("--rounds", type=int, default=21)
    threads.add_argument("--ranks", type=int, default=2)
    metrics = commands.add_parser("metrics", help="metrics of distributed scores beside scikit-learn and torchmetrics")
    metrics.add_argument("--rounds", type=int, default=5, help="of torchmetrics; scikit-learn has one")
    metrics.add_argument("--quick", action="store_true", help="a million scores, no targets; writes nothing")
    fsdp = commands.add_parser("fsdp", help="a fully sharded step under PyTorch beside FSDP2 on gloo; memory")
    fsdp.add_argument("--rounds", type=int, default=21)
    fsdp.add_argument("--ranks", type=numbers, default=[2, 4])
    fsdp.add_argument("--layers", type=int, default=8)
    fsdp_memory = commands.add_parser("fsdp_memory", help="the memory of a fully sharded step alone")
    fsdp_memory.add_argument("--ranks", type=numbers, default=[1, 2, 3, 4])
    fsdp_memory.add_argument("--layers", type=int, default=8)
    pipeline = commands.add_parser("pipeline", help="pipelines that wait beside their simulation, and a training step")
    pipeline.add_argument("--rounds", type=int, default=9)
    pipeline.add_argument("--ranks", type=numbers, default=[4, 8])
    tp = commands.add_parser("tp", help="a tensor-parallel step under PyTorch beside its own on gloo")
    tp.add_argument("--rounds", type=int, default=21)
    tp.add_argument("--ranks", type=numbers, default=[2, 4])
    tp.add_argument("--layers", type=int, default=8)
    bindings = commands.add_parser("bindings", help="what a call takes in each language beyond the same call in C")
    bindings.add_argument("--rounds", type=int, default=7)
    optimizer = commands.add_parser("optimizer", help="a step of AdamW beside PyTorch's fused one and memory")
    optimizer.add_argument("--rounds", type=int, default=15)
    ddp_shared = commands.add_parser("ddp_shared", help="one copy of parameters and moments a host beside one a rank")
    ddp_shared.add_argument("--rounds", type=int, default=15)
    ddp_shared.add_argument("--ranks", type=numbers, default=[2, 4])
    scaling = commands.add_parser("scaling", help="how an all_reduce on one host grows with its ranks")
    scaling.add_argument("--rounds", type=int, default=5)
    kernels = commands.add_parser("kernels", help="the reduce kernels of shared memory beside memcpy")
    kernels.add_argument("--rounds", type=int, default=7)
    instructions = commands.add_parser("instructions", help="instructions of the hot paths, beside their baseline")
    instructions.add_argument("--rebase", action="store_true", help="make these the baseline of later runs")
    commands.add_parser("plan", help="what a rank of 1,024 computes for a save and a load of 100,000 tensors")
    read_path = commands.add_parser("read_path", help="a load of a warm checkpoint beside pread and checksums")
    read_path.add_argument("--rounds", type=int, default=11)
    read_path.add_argument("--ranks", type=numbers, default=[1, 2])
    store = commands.add_parser("store", help="operations a second of the TCP store beside PyTorch's TCPStore")
    store.add_argument("--rounds", type=int, default=7)
    recovery = commands.add_parser("recovery", help="from the death of a rank to the next step, beside a restart")
    recovery.add_argument("--rounds", type=int, default=7)
    recovery.add_argument("--ranks", type=numbers, default=[8])
    gpu = commands.add_parser("gpu", help="all_reduce of CUDA tensors beside NCCL alone (needs a GPU)")
    gpu.add_argument("--rounds", type=int, default=7)
    build = commands.add_parser("build", help="cold builds without ccache beside those of another commit")
    build.add_argument("--rounds", type=int, default=1)
    build.add_argument("--beside", default="a5a3189", help="a commit; empty: none")
    for sub in commands.choices.values():
        sub.add_argument("--binaries", type=Path, default=ROOT / "build" / "release" / "benchmarks")
        sub.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()

    if arguments.name == "check":
        import checkpoint as checkpoint_bench

        measured = {case.get("scenario") for case in results.read("checkpoint")}
        for name in checkpoint_bench.SCENARIOS:
            if name not in measured:
                print(f"checkpoint.json: {name} was not measured: ./dev bench checkpoint --only {name}")
        return results.check()
    if arguments.name == "comm":
        import comm as comm_bench

        cases = comm_bench.bench(
            arguments.binaries, arguments.rounds, arguments.ranks, arguments.sizes or comm_bench.SIZES
        )
    elif arguments.name == "checkpoint_async":
        import checkpoint_async as async_bench

        cases = async_bench.bench(arguments.rounds)
    elif arguments.name == "torch_backend":
        import torch_backend as torch_bench

        cases = torch_bench.bench(arguments.rounds, arguments.ranks, arguments.sizes or torch_bench.SIZES)
    elif arguments.name == "ddp":
        import ddp as ddp_bench

        cases = ddp_bench.bench(arguments.rounds, arguments.ranks, arguments.layers)
    elif arguments.name == "threads":
        import threads as threads_bench

        cases = threads_bench.bench(arguments.rounds, arguments.ranks)
    elif arguments.name == "metrics":
        import metrics as metrics_bench

        arguments.no_write |= arguments.quick
        cases = metrics_bench.bench(arguments.rounds, arguments.quick)
    elif arguments.name == "fsdp":
        import fsdp as fsdp_bench

        cases = fsdp_bench.bench(arguments.rounds, arguments.ranks, arguments.layers)
    elif arguments.name == "fsdp_memory":
        import fsdp as fsdp_bench

        cases = fsdp_bench.memory(arguments.ranks, arguments.layers)
    elif arguments.name == "ddp_shared":
        import ddp_shared as shared_bench

        cases = shared_bench.bench(arguments.rounds, arguments.ranks)
    elif arguments.name == "pipeline":
        import pipeline as pipeline_bench

        cases = pipeline_bench.bench(arguments.binaries.parent / "tessera", arguments.rounds, arguments.ranks)
    elif arguments.name == "tp":
        import tp as tp_bench

        cases = tp_bench.bench(arguments.rounds, arguments.ranks, arguments.layers)
    elif arguments.name == "hosts":
        import hosts as hosts_bench

        cases = hosts_bench.bench(arguments.binaries, arguments.rounds, arguments.sizes or hosts_bench.SIZES)
    elif arguments.name == "command":
        import command as command_bench

        cases = command_bench.bench(arguments.binaries.parent / "tessera", arguments.rounds)
    elif arguments.name == "bindings":
        import bindings as bindings_bench

        cases = bindings_bench.bench(arguments.binaries, arguments.rounds)
    elif arguments.name == "optimizer":
        import optimizer as optimizer_bench

        cases = optimizer_bench.bench(arguments.rounds)
    elif arguments.name == "scaling":
        import scaling as scaling_bench

        cases = scaling_bench.bench(arguments.binaries.parent / "tessera", arguments.rounds)
    elif arguments.name == "kernels":
        import kernels as kernels_bench

        cases = kernels_bench.bench(arguments.binaries, arguments.rounds)
    elif arguments.name == "instructions":
        import instructions as instructions_bench

        cases = instructions_bench.bench(arguments.binaries, replace_baseline=arguments.rebase)
    elif arguments.name == "build":
        import build as build_bench

        cases = build_bench.bench(arguments.beside, arguments.rounds)
    elif arguments.name == "read_path":
        import read_path as read_bench

        cases = read_bench.bench(arguments.binaries, arguments.rounds, arguments.ranks)
    elif arguments.name == "store":
        import store as store_bench

        cases = store_bench.bench(arguments.binaries, arguments.rounds)
    elif arguments.name == "recovery":
        import recovery as recovery_bench

        cases = recovery_bench.bench(
            arguments.binaries, arguments.binaries.parent / "tessera", arguments.rounds, arguments.ranks
        )
    elif arguments.name == "gpu":
        import gpu as gpu_bench

        cases = gpu_bench.bench(arguments.binaries, arguments.binaries.parent / "tessera", arguments.rounds)
    elif arguments.name == "plan":
        import plan as plan_bench

        cases = plan_bench.bench(arguments.binaries)
    else:
        import checkpoint as checkpoint_bench

        cases = []
        for of_scenario in checkpoint_bench.bench(arguments.rounds, arguments.only):
            cases += of_scenario
            if not arguments.no_write:
                results.write(arguments.name, of_scenario)
    print(results.machine())
    print(results.table(cases))
    if not arguments.no_write:
        print("written:", results.write(arguments.name, cases).relative_to(ROOT))
        import pages

        pages.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
