"""The driver of the tests of tessera.spark: python spark_run.py DIRECTORY MASTER. Jobs of two ranks, one after another.

Leaves DIRECTORY/ran.json: what each returned, or its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import ranks
import tessera as ts
import tessera.spark
from pyspark.sql import SparkSession


def raises_on_rank_1(comm: ts.Comm) -> None:
    if comm.rank == 1:
        raise ValueError("no such thing")
    comm.barrier()


def dies(comm: ts.Comm) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def partition(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Rank, world size and the sum over all partitions."""
    mine = np.array([sum(numbers)])
    with tessera.spark.from_barrier(timeout=60) as comm:
        comm.all_reduce(mine)
        yield [comm.rank, comm.world_size, int(mine[0])]


def main() -> None:
    at, master = Path(sys.argv[1]), sys.argv[2]
    spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    numbers = spark.sparkContext.parallelize(range(10), 2)
    found = {
        "total": ranks.outcome(lambda: tessera.spark.run(ranks.total, 2, args=(at,), spark=spark, timeout=60)),
        "raises": ranks.outcome(lambda: tessera.spark.run(raises_on_rank_1, 2, timeout=60)),
        "dies": ranks.outcome(lambda: tessera.spark.run(dies, 2, timeout=60)),
        "partitions": ranks.outcome(lambda: numbers.barrier().mapPartitions(partition).collect()),
    }
    spark.stop()
    (at / "ran.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
