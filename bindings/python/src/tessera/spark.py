"""Jobs on a Spark cluster, whose ranks are the tasks of a barrier stage.

    import tessera.spark

    def train(comm, root):
        ...
        return loss

    losses = tessera.spark.run(train, 4, args=("/shared/runs/model",))

or, for ranks that read their partitions of a data set:

    def task(rows):
        with tessera.spark.from_barrier() as comm:
            yield train(comm, list(rows))

    data.repartition(4).rdd.barrier().mapPartitions(task).collect()

Needs the package ``pyspark`` and, on every executor, this package.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ._base import Timeout
from ._engines import checked_job, failure_of, join, new_token
from .comm import Comm
from .store import StoreServer

__all__ = ["from_barrier", "run"]

_T = TypeVar("_T")


@contextlib.contextmanager
def from_barrier(context: Any = None, *, timeout: Timeout = None, **options: Any) -> Iterator[Comm]:
    """Connect the tasks of a barrier stage; each is the rank of its partition. Collective, for a ``with`` block.

    Rank 0 serves the store at which they meet until it leaves the block, under a random token that only the tasks of
    this attempt of the stage get. Ranks of one host share memory; which ones those are they find out themselves.

    Parameters
    ----------
    context : pyspark.BarrierTaskContext, optional
        By default that of the running task.
    timeout : float or timedelta, default 600
        Seconds for all ranks to join, and for each collective.
    **options
        Further options of the communicator, as of `init`.

    Raises
    ------
    PySparkRuntimeError
        This is not a task of a barrier stage.
    TesseraTimeout
        A task did not join in time.
    """
    if context is None:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
    rank, told = context.partitionId(), ""
    with contextlib.ExitStack() as stack:
        if rank == 0:
            token = new_token()
            host = context.getTaskInfos()[0].address.rpartition(":")[0].strip("[]")
            told = f"{stack.enter_context(StoreServer(host, token=token)).uri} {token}"
        everywhere = context.allGather(told)
        uri, token = everywhere[0].split()
        with join(uri, token, rank, len(everywhere), {"timeout": timeout, **options}) as comm:
            yield comm


def run(
    fn: Callable[..., _T],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    spark: Any = None,
    timeout: Timeout = None,
    **options: Any,
) -> list[_T]:
    """Call ``fn(comm, *args, **kwargs)`` in the `num_workers` tasks of a barrier stage, which are the ranks of one job.

    Parameters
    ----------
    fn : callable
        Called on every rank, with a `Comm` that is closed in order when it returns.
    num_workers : int
        The number of ranks, 1 to 4096. The cluster must have as many slots; Spark reports if it has not.
    args, kwargs
        Further arguments for `fn`, the same for all ranks.
    spark : pyspark.sql.SparkSession or pyspark.SparkContext, optional
        By default the active one, or a new one from the configuration.
    timeout : float or timedelta, default 600
        Seconds for all ranks to join, and for each collective.
    **options
        Further options of the communicator, as of `init`.

    Returns
    -------
    list
        What `fn` returned, by rank.

    Raises
    ------
    ImportError
        PySpark is not installed.
    PeerLost
        A rank's process or executor died; ``peer`` is the rank. Spark has ended the others.
    UserError
        `fn` raised on a rank: ``peer`` is the rank, ``__cause__`` its exception.
    """
    world_size = checked_job(fn, num_workers)
    try:
        from py4j.protocol import Py4JJavaError
        from pyspark import SparkContext
    except ImportError as error:
        raise ImportError("tessera.spark needs the package pyspark: pip install pyspark") from error
    context = getattr(spark, "sparkContext", spark) or SparkContext.getOrCreate()
    given = dict(kwargs or {})

    def task(_: Iterable[int]) -> Iterator[tuple[bool, Any]]:
        try:
            with from_barrier(timeout=timeout, **options) as comm:
                result = fn(comm, *args, **given)
        except Exception as error:  # a task that fails would hide the others' errors, one of which may be the cause
            yield False, _as_it_travels(error)
        else:
            yield True, result

    try:
        ended = context.parallelize(range(world_size), world_size).barrier().mapPartitions(task).collect()
    except Py4JJavaError as error:
        task_that_failed = re.search(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully", str(error))
        if task_that_failed is None:
            raise
        rank = int(task_that_failed[1])
        raise failure_of({rank: error}, {rank}, world_size) from error
    failures = {rank: value for rank, (worked, value) in enumerate(ended) if not worked}
    if failures:
        raise failure_of(failures, (), world_size)
    return [value for _, value in ended]


def _as_it_travels(error: Exception) -> BaseException:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
