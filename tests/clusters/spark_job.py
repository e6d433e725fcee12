"""The driver of the Spark tests: python spark_job.py WHAT DIRECTORY MASTER. The tasks of a barrier stage are ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ranks
import tessera as ts
from pyspark import BarrierTaskContext, SparkConf, SparkContext

RANKS = 4


def join(context: BarrierTaskContext) -> ts.Comm:
    """The task's partition is its rank. Rank 0 says where all meet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = f"{socket.gethostname()}:{probe.getsockname()[1]}"
    host, port = context.allGather(mine)[0].split(":")
    os.environ.update(RANK=str(context.partitionId()), WORLD_SIZE=str(RANKS), MASTER_ADDR=host, MASTER_PORT=port)
    return ts.init()


def total(directory: Path) -> Any:
    def task(_: Iterable[int]) -> Iterator[dict[str, Any]]:
        with join(BarrierTaskContext.get()) as comm:
            yield ranks.total(comm, directory)

    return task


def train(directory: Path) -> Any:
    """Rank 2 kills itself after the first save; Spark starts all of the stage again."""

    def task(_: Iterable[int]) -> Iterator[tuple[int, int]]:
        root = directory / "checkpoints"
        with join(BarrierTaskContext.get()) as comm:
            begins = not (root / "latest").exists()
            comm.barrier()

            def die_after_a_save() -> bool:
                if begins and comm.rank == 2 and (root / "latest").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                return False

            try:
                yield ranks.train(comm, root, 1000 if begins else 200, told=die_after_a_save)
            except ts.TesseraError as error:
                ranks.report(directory, "lost", comm.rank, message=str(error))
                raise

    return task


def main() -> None:
    what, directory, master = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    configuration = SparkConf().setMaster(master).set("spark.executor.memory", "600m").set("spark.ui.enabled", "false")
    with SparkContext(conf=configuration) as context:
        for task in {"total": [total, total], "train": [train]}[what]:  # workers are used again by the second stage
            stage = context.parallelize(range(RANKS), RANKS).barrier()
            # Spark starts a barrier stage again only where another stage follows, such as this shuffle's.
            print(stage.mapPartitions(task(directory)).repartition(1).collect(), flush=True)


if __name__ == "__main__":
    main()
