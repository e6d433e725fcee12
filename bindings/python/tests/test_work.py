"""Asynchronous operations: waiting, asking, callbacks, and what stays alive meanwhile."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest
import tessera as ts
from patience import patience


def test_a_wait_that_expires_leaves_the_work_alive(ranks):
    waited = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            assert waited.wait(patience(20))
            comm.barrier()
            return None
        work = comm.barrier(async_op=True)
        assert not work.done()
        assert "in flight" in repr(work)
        with pytest.raises(ts.NotReady):
            work.error()
        with pytest.raises(ts.NotReady):
            work.wait(0.05)
        with pytest.raises(TimeoutError):
            work.wait(0)
        waited.set()
        work.wait()
        assert work.done()
        return repr(work)

    assert ranks(2, body)[0] == "<tessera.Work done>"


def test_callbacks_run_once_each_when_the_work_is_done(ranks):
    registered = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            assert registered.wait(patience(20))
            comm.barrier()
            return None
        called, done = [], threading.Event()
        work = comm.barrier(async_op=True)
        work.add_done_callback(lambda w: called.append(("first", w is work)))
        work.add_done_callback(lambda w: (called.append(("second", w.error())), done.set()))
        assert called == []
        registered.set()
        work.wait()
        assert done.wait(patience(20))
        work.add_done_callback(lambda w: called.append(("late", w.done())))
        return called

    assert ranks(2, body)[0] == [("first", True), ("second", None), ("late", True)]


def test_a_callback_that_raises_is_logged_and_hurts_nobody(alone: ts.Comm, caplog: pytest.LogCaptureFixture):
    called = threading.Event()
    work = alone.barrier(async_op=True)
    work.wait()

    def fail(work):
        raise ValueError("a mistake of the callback")

    work.add_done_callback(fail)
    work.add_done_callback(lambda _: called.set())
    assert called.wait(patience(20))
    assert "a mistake of the callback" in caplog.text


def test_a_failed_work_raises_and_tells_its_error(ranks):
    def body(comm: ts.Comm):
        work = comm.all_reduce(np.zeros(3 + comm.rank), async_op=True)
        with pytest.raises(ts.Mismatch):
            work.wait()
        assert isinstance(work.error(), ts.Mismatch)
        statuses = []
        work.add_done_callback(lambda w: statuses.append(type(w.error())))
        comm.close()
        return statuses

    assert ranks(2, body) == [[ts.Mismatch]] * 2


def test_a_work_can_be_awaited(ranks):
    def body(comm: ts.Comm):
        async def main():
            x = np.full(3, comm.rank + 1.0)
            await comm.all_reduce(x, async_op=True)
            failing = comm.all_reduce(np.zeros(3 + comm.rank), async_op=True)
            with pytest.raises(ts.Mismatch):
                await failing
            return x[0]

        result = asyncio.run(main())
        comm.close()
        return result

    assert ranks(2, body) == [3, 3]


def test_a_work_may_end_after_the_loop_that_awaited_it(ranks, caplog: pytest.LogCaptureFixture):
    given_up = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            assert given_up.wait(patience(20))
            comm.barrier()
            return
        work = comm.barrier(async_op=True)

        async def main():
            async def wait():
                await work

            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(), 0.05)

        asyncio.run(main())
        called_back = threading.Event()
        work.add_done_callback(lambda _: called_back.set())
        given_up.set()
        work.wait()
        assert called_back.wait(patience(20))

    ranks(2, body)
    assert not caplog.text


def test_a_dropped_work_keeps_its_arrays_until_it_is_done(ranks):
    dropped = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            x = np.full(10_000, 2.0)
            assert dropped.wait(patience(20))
            comm.all_reduce(x)
            return None
        x = np.full(10_000, 1.0)
        gone = weakref.ref(x)
        work = comm.all_reduce(x, async_op=True)
        del x
        gc.collect()
        assert gone() is not None
        del work
        gc.collect()
        alive = gone() is not None
        dropped.set()
        comm.barrier(async_op=True)  # stands behind the first in the queue, on rank 1 there is no second
        return alive

    def body_with_barrier(comm: ts.Comm):
        result = body(comm)
        if comm.rank == 1:
            comm.barrier()
        return result

    assert ranks(2, body_with_barrier)[0] is True


def test_the_arrays_go_once_the_work_is_done_and_dropped(alone: ts.Comm):
    x = np.ones(4)
    gone = weakref.ref(x)
    work = alone.all_reduce(x, async_op=True)
    work.wait()
    del x, work
    gc.collect()
    assert gone() is None
