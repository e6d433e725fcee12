"""Jobs under Ray and Spark, as far as neither of them is needed; tests/clusters/ has the rest."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tessera as ts
import tessera.ray
import tessera.spark
from patience import patience
from tessera._engines import failure_of


class Task:
    """A task of a barrier stage whose tasks are threads, with what Spark's BarrierTaskContext has."""

    def __init__(self, partition: int, messages: list[str], meeting: threading.Barrier, address: str) -> None:
        self.partition, self.messages, self.meeting, self.address = partition, messages, meeting, address

    def partitionId(self) -> int:
        return self.partition

    def getTaskInfos(self) -> list["Task"]:
        return [self]

    def allGather(self, message: str) -> list[str]:
        self.messages[self.partition] = message
        self.meeting.wait(patience(20))
        return self.messages


@pytest.mark.parametrize("address", ["127.0.0.1:4711", "localhost:4711"])
def test_tasks_of_a_barrier_stage_join(address: str):
    messages, meeting = [""] * 3, threading.Barrier(3)

    def task(partition: int) -> tuple[int, int, float]:
        with tessera.spark.from_barrier(Task(partition, messages, meeting, address), timeout=patience(20)) as comm:
            total = np.ones(1)
            comm.all_reduce(total)
            return comm.rank, comm.world_size, float(total[0])

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(task, range(3))) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    uri, token = messages[0].split()
    assert len(token) == 64
    assert messages[1:] == ["", ""]
    with pytest.raises(ts.TesseraTimeout):  # it is served no longer
        ts.Store(uri, token=token, timeout=0.05)


def test_a_stranger_cannot_join():
    """The token is the stage's."""
    messages, meeting = [""], threading.Barrier(1)
    with (
        tessera.spark.from_barrier(Task(0, messages, meeting, "127.0.0.1:1"), timeout=patience(20)),
        pytest.raises(ts.PermissionDenied),
    ):
        ts.Store(messages[0].split()[0], token="00" * 32, timeout=patience(5))


def failed(failures: dict[int, BaseException], died: tuple[int, ...] = ()) -> ts.TesseraError:
    return failure_of(failures, died, 4)


def test_the_cause_of_a_failed_job_is_named():
    lost, aborted = ts.PeerLost("rank 2 left"), ts.Aborted("rank 2 left")
    raised = failed({0: lost, 2: ValueError("bad"), 3: aborted})
    assert (type(raised), raised.peer, str(raised)) == (ts.UserError, 2, "rank 2 of 4 raised ValueError: bad")
    assert isinstance(raised.__cause__, ValueError)
    died = failed({0: lost, 1: ValueError("later"), 3: OSError("killed")}, died=(3,))
    assert (type(died), died.peer, str(died)) == (ts.PeerLost, 3, "rank 3 of 4 died: killed")
    only_consequences = failed({3: aborted, 1: lost})
    assert (only_consequences.peer, str(only_consequences)) == (1, "rank 1 of 4 raised PeerLost: rank 2 left")


@pytest.mark.parametrize("run", [tessera.ray.run, tessera.spark.run], ids=["ray", "spark"])
def test_a_missing_package_is_named(run, monkeypatch: pytest.MonkeyPatch):
    for name in ("ray", "pyspark", "py4j.protocol"):
        monkeypatch.setitem(sys.modules, name, None)
    package = "ray" if run is tessera.ray.run else "pyspark"
    with pytest.raises(ImportError, match=f"pip install {package}"):
        run(print, 2)


@pytest.mark.parametrize("run", [tessera.ray.run, tessera.spark.run], ids=["ray", "spark"])
def test_bad_jobs_are_refused_before_anything_starts(run):
    with pytest.raises(ts.InvalidArgument, match="num_workers is 0; it must be 1 to 4096"):
        run(print, 0)
    with pytest.raises(TypeError, match="fn is a int"):
        run(3, 2)
    with pytest.raises(TypeError, match="float"):
        run(print, 2.5)


def test_ranks_of_ray_need_a_resource():
    with pytest.raises(ts.InvalidArgument, match="name at least one resource"):
        tessera.ray.run(print, 2, resources_per_worker={"CPU": 0})
