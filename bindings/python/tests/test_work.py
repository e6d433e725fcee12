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
        with pytest.raises(ts.NotReady):
            work.order(timeout=0.05)  # no stream can wait for the CPU
        waited.set()
        work.order()
        assert work.done()
        work.wait()
        return repr(work)

    assert ranks(2, body)[0] == "<tessera.Work done>"


def ones(n=2000):
    return np.ones(n, np.float32)


def in_flight(comm):
    """Each call that goes on in the background: what it is given, and how it is made."""
    peer = 1 - comm.rank
    n = comm.world_size
    return {
        "all_reduce": lambda: ([ones()], lambda a: comm.all_reduce(a, async_op=True)),
        "all_reduce of a list": lambda: ([ones(), ones()], lambda *a: comm.all_reduce(list(a), async_op=True)),
        "broadcast": lambda: ([ones(), ones()], lambda *a: comm.broadcast(list(a), 1, async_op=True)),
        "reduce": lambda: ([ones(), ones()], lambda a, b: comm.reduce(a, b, async_op=True)),
        "reduce_scatter": lambda: ([ones(), ones(2000 // n)], lambda a, b: comm.reduce_scatter(a, b, async_op=True)),
        "reduce_scatter_coalesced": lambda: (
            [ones(), ones(2000 // n)],
            lambda a, b: comm.reduce_scatter_coalesced([a], [b], async_op=True),
        ),
        "all_gather": lambda: ([ones(), ones(2000 * n)], lambda a, b: comm.all_gather(a, b, async_op=True)),
        "all_gather_coalesced": lambda: (
            [ones(), ones(2000 * n)],
            lambda a, b: comm.all_gather_coalesced([a], [b], async_op=True),
        ),
        "all_gather_v": lambda: ([ones(), ones(), ones()], lambda a, *b: comm.all_gather_v(a, list(b), async_op=True)),
        "gather": lambda: ([ones(), ones(2000 * n)], lambda a, b: comm.gather(a, b, async_op=True)),
        "scatter": lambda: (
            [ones()],
            lambda a: comm.scatter(ones(2000 * n) if comm.rank == 1 else None, a, 1, async_op=True),
        ),
        "all_to_all": lambda: ([ones(), ones()], lambda a, b: comm.all_to_all(a, b, async_op=True)),
        "recv": lambda: ([ones()], lambda a: comm.recv(a, peer, async_op=True)),
        "a plan": lambda: ([ones(), ones()], lambda *a: started(comm.prepare("all_reduce", outputs=list(a)))),
    }


def started(plan):
    plan.start()
    return plan


class Trainer:
    """Refers to itself, as objects do that have a callback, a parent or a bound method."""

    def __init__(self, work):
        self.work, self.itself = work, self


@pytest.mark.parametrize("way", ["dropped", "in a cycle", "in a cycle of its exception", "on another thread"])
def test_what_is_collected_in_flight_keeps_its_arrays(ranks, way):
    """Whatever the collector clears, in whichever order."""
    ready = threading.Barrier(2)

    def collect(given, call):
        if way == "in a cycle":
            Trainer(call(*given))
        elif way == "in a cycle of its exception":
            try:
                raise ValueError(call(*given))
            except ValueError as error:
                kept = error  # its traceback holds this frame, which holds it
                assert kept.__traceback__ is not None
        else:
            call(*given)

    def body(comm: ts.Comm):
        for name in in_flight(comm):
            given, call = in_flight(comm)[name]()
            if comm.rank == 1:
                ready.wait(patience(20))  # the other one has dropped its own, and looked
                if name == "recv":
                    comm.send(given[0], 0)
                else:
                    call(*given).wait()
                ready.wait(patience(20))
                continue
            # The collector does not track plain arrays, so it leaves weak references to them until they are freed.
            watched = [weakref.ref(array) for array in given]
            if way == "on another thread":
                thread = threading.Thread(target=collect, args=(given, call))
                thread.start()
                thread.join()
            else:
                collect(given, call)
            del given, call
            gc.collect()
            assert all(array() is not None for array in watched), name
            ready.wait(patience(20))
            ready.wait(patience(20))

    ranks(2, body)


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
