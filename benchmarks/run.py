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
    checkpoint = commands.add_parser("checkpoint", help="save and load beside PyTorch DCP and raw O_DIRECT")
    checkpoint.add_argument("--rounds", type=int, default=7)
    checkpoint.add_argument("--workloads", type=lambda text: text.split(","), default=["large", "small"])
    command = commands.add_parser("command", help="tessera ckpt on a checkpoint of 100,000 tensors")
    command.add_argument("--rounds", type=int, default=7)
    for sub in (comm, checkpoint, command):
        sub.add_argument("--binaries", type=Path, default=ROOT / "build" / "release" / "benchmarks")
        sub.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()

    if arguments.name == "check":
        return results.check()
    if arguments.name == "comm":
        import comm as comm_bench

        cases = comm_bench.bench(
            arguments.binaries, arguments.rounds, arguments.ranks, arguments.sizes or comm_bench.SIZES
        )
    elif arguments.name == "command":
        import command as command_bench

        cases = command_bench.bench(arguments.binaries.parent / "tessera", arguments.rounds)
    else:
        import checkpoint as checkpoint_bench

        cases = checkpoint_bench.bench(arguments.rounds, arguments.workloads)
    print(results.machine())
    print(results.table(cases))
    if not arguments.no_write:
        print("written:", results.write(arguments.name, cases).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
