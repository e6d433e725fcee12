"""Collectives over threads as ranks: what they compute, what they refuse, and how they fail."""

import datetime
import threading
import time

import numpy as np
import pytest
import tessera as ts
from patience import patience

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]


def test_a_process_alone_is_a_job_of_one(alone: ts.Comm):
    assert (alone.rank, alone.world_size, alone.transport) == (0, 1, "self")
    x = np.arange(4.0)
    alone.all_reduce(x, "avg")
    assert (x == np.arange(4.0)).all()
    assert alone.error is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "result"), [("sum", 10), ("min", 1), ("max", 4), ("prod", 24), ("avg", 2.5)])
def test_all_reduce(ranks, dtype, op, result):
    def body(comm: ts.Comm):
        x = np.full((3, 5), comm.rank + 1, dtype)
        comm.all_reduce(x, op)
        return x

    for x in ranks(4, body):
        assert (x == np.array(result).astype(dtype)).all()


def test_bfloat16_is_reduced_with_and_without_its_numpy_type(ranks):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def body(comm: ts.Comm):
        x = np.full(7, comm.rank + 0.5, ml_dtypes.bfloat16)
        bits = x.copy().view(np.uint16)
        comm.all_reduce(x)
        comm.all_reduce(bits, dtype="bfloat16")
        return x, bits.view(ml_dtypes.bfloat16)

    for x, y in ranks(2, body):
        assert (x == 2).all()
        assert (y == 2).all()


def test_several_arrays_are_reduced_in_place(ranks):
    def body(comm: ts.Comm):
        arrays = [np.full(n, comm.rank, np.float32) for n in (1, 0, 1000)]
        comm.all_reduce(arrays)
        return arrays

    for arrays in ranks(3, body):
        assert all((array == 3).all() for array in arrays)


def test_library_memory_and_foreign_memory_give_the_same(ranks):
    def body(comm: ts.Comm):
        own = comm.empty(50_000, "float32")
        values = np.random.default_rng(comm.rank).random(50_000, np.float32)
        own[:] = values
        comm.all_reduce(own)
        comm.all_reduce(values)
        return own, values

    results = ranks(3, body)
    for own, values in results:
        assert (own == values).all()
        assert (own == results[0][0]).all()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_all_collectives_move_what_they_say(ranks, transport: str):
    def body(comm: ts.Comm):
        r, n = comm.rank, comm.world_size
        part = np.zeros(2, np.int32)
        comm.reduce_scatter(np.arange(2 * n, dtype=np.int32) * (r + 1), part)
        assert (part == np.array([2 * r, 2 * r + 1]) * 6).all()

        whole = np.zeros((n, 2), np.int32)
        comm.all_gather(np.full(2, r, np.int32), whole)
        assert (whole == np.arange(n)[:, None]).all()

        lengths = [3, 0, 5]
        outputs = [np.zeros(length, np.float64) for length in lengths]
        comm.all_gather_v(np.full(lengths[r], r + 0.5), outputs)
        assert all((out == i + 0.5).all() for i, out in enumerate(outputs))

        parts = [np.full(2, r, np.float32), np.full(3, r + 10, np.float32)]
        wholes = [np.zeros(2 * comm.world_size, np.float32), np.zeros(3 * comm.world_size, np.float32)]
        comm.all_gather_coalesced(parts, wholes)
        assert (wholes[1].reshape(-1, 3) == np.arange(10, 10 + comm.world_size)[:, None]).all()
        comm.reduce_scatter_coalesced(wholes, parts)
        assert (parts[0] == comm.world_size * r).all()
        assert comm.all_gather_coalesced(parts, wholes, async_op=True).wait() is None
        with pytest.raises(ts.InvalidArgument, match="one output per input"):
            comm.reduce_scatter_coalesced(wholes, parts[:1])

        x = np.full(4, r, np.float32)
        comm.broadcast([x], root=2)
        assert (x == 2).all()

        total = np.full(3, r + 1, np.int64)
        result = np.zeros(3, np.int64) if r == 1 else None
        comm.reduce(total, result, "prod", root=1)
        assert result is None or (result == 6).all()
        comm.reduce(total, root=0)
        assert (total == (6 if r == 0 else r + 1)).all()

        rows = np.zeros((n, 2), np.uint8) if r == 0 else None
        comm.gather(np.full(2, r, np.uint8), rows, root=0)
        assert rows is None or (rows == np.arange(n)[:, None]).all()

        mine = np.zeros(2, np.float32)
        comm.scatter(np.arange(2.0 * n, dtype=np.float32) if r == 2 else None, mine, root=2)
        assert (mine == [2 * r, 2 * r + 1]).all()

        received = np.zeros(n, np.int32)
        comm.all_to_all(np.arange(n, dtype=np.int32) + 10 * r, received)
        assert (received == 10 * np.arange(n) + r).all()

        if r == 0:
            comm.send(np.array([7.0]), 2, tag=5)
        elif r == 2:
            got = np.zeros(1)
            comm.recv(got, 0, tag=5)
            assert got == 7
        comm.barrier()
        return comm.transport

    assert ranks(3, body, backend=transport) == [transport] * 3


def test_async_operations_overlap_and_finish(ranks):
    def body(comm: ts.Comm):
        arrays = [np.full(1000, comm.rank + i, np.float32) for i in range(8)]
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        for work in works:
            work.wait()
            assert work.done()
            assert work.error() is None
        return [array[0] for array in arrays]

    assert ranks(2, body) == [[1 + 2 * i for i in range(8)]] * 2


def test_every_collective_can_be_async(ranks):
    def body(comm: ts.Comm):
        r, n = comm.rank, comm.world_size
        x, whole = np.full(2, r, np.float32), np.zeros(2 * n, np.float32)
        outs = [np.zeros(2, np.float32) for _ in range(n)]
        works = [
            comm.reduce_scatter(np.ones(2 * n, np.float32), x, async_op=True),
            comm.all_gather(x, whole, async_op=True),
            comm.all_gather_v(x, outs, async_op=True),
            comm.broadcast(x, async_op=True),
            comm.reduce(x, async_op=True),
            comm.gather(x, whole if r == 0 else None, async_op=True),
            comm.scatter(whole if r == 0 else None, x, async_op=True),
            comm.all_to_all(np.zeros(n), np.zeros(n), async_op=True),
            comm.send(x, 1, async_op=True) if r == 0 else comm.recv(x, 0, async_op=True),
            comm.barrier(async_op=True),
        ]
        for work in works:
            assert isinstance(work, ts.Work)
            work.wait(patience(20))

    ranks(2, body)


def test_split_makes_groups(ranks):
    def body(comm: ts.Comm):
        if comm.rank == 3:
            return comm.split(-1)
        group = comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        with group:
            x = np.array([comm.rank], np.int64)
            group.all_reduce(x)
            return group.rank, group.world_size, int(x[0])

    assert ranks(4, body) == [(1, 2, 2), (0, 1, 1), (0, 2, 2), None]


def test_a_group_has_the_options_of_those_it_was_split_from(ranks):
    def body(comm: ts.Comm):
        comm.timeout = 17
        for options, expected in [({}, 17), ({"name": "some"}, 17), ({"timeout": 18}, 18)]:
            with comm.split(0, **options) as group:
                assert (group.timeout, group.transport) == (expected, "gloo")
                with group.split(0, name="of these") as further:
                    assert (further.timeout, further.transport) == (expected, "gloo")

    ranks(2, body, backend="gloo")


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(np.zeros(4 + comm.rank, np.float32)),
        lambda comm: comm.all_reduce(np.zeros(4, ["float32", "float64"][comm.rank])),
        lambda comm: comm.all_reduce(np.zeros(4, np.float32), ["sum", "max"][comm.rank]),
        lambda comm: comm.broadcast(np.zeros(4, np.float32), root=comm.rank),
        lambda comm: comm.barrier() if comm.rank else comm.all_reduce(np.zeros(4, np.float32)),
    ],
    ids=["count", "dtype", "op", "root", "operation"],
)
def test_ranks_that_differ_are_told_before_data_moves(ranks, call):
    for rank, outcome in enumerate(ranks.outcomes(2, call)):
        assert isinstance(outcome, ts.Mismatch), outcome
        assert outcome.rank == rank


def test_counts_that_differ_are_named_and_nothing_is_overwritten(ranks):
    arrays = [np.full(10, 7.0, np.float32), np.full(11, 7.0, np.float32)]
    for error in ranks.outcomes(2, lambda comm: comm.all_reduce(arrays[comm.rank])):
        assert isinstance(error, ts.Mismatch), error
        assert "rank 0 called all_reduce of 10 f32 (sum), rank 1 all_reduce of 11 f32 (sum)" in str(error)
    assert all((array == 7).all() for array in arrays)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(np.zeros(4, np.float32), "median"),
        lambda comm: comm.broadcast(np.zeros(4, np.float32), root=7),
        lambda comm: comm.all_gather(np.zeros(4, np.float32), np.zeros(5, np.float32)),
        lambda comm: comm.all_gather(np.zeros(4, np.float32), np.zeros(4, np.float64)),
        lambda comm: comm.all_gather_v(np.zeros(4, np.float32), []),
        lambda comm: comm.send(np.zeros(4, np.float32), 0),
        lambda comm: comm.send(np.zeros(4, np.float32), 9),
        lambda comm: comm.gather(np.zeros(4, np.float32), None),
        lambda comm: comm.scatter(None, np.zeros(4, np.float32)),
        lambda comm: comm.all_reduce([np.zeros(4, np.float32), np.zeros(4, np.float64)]),
    ],
    ids=["op", "root", "length", "dtypes", "outputs", "self", "peer", "no output", "no input", "mixed"],
)
def test_bad_arguments_are_refused_and_the_communicator_stays_well(alone: ts.Comm, call):
    with pytest.raises(ts.InvalidArgument):
        call(alone)
    assert alone.error is None
    alone.barrier()


def test_a_rank_that_never_comes_is_named():
    token = "5a" * 32
    with (
        ts.StoreServer(token=token) as server,
        ts.Store(server.uri, token=token) as store,
        pytest.raises(ts.TesseraTimeout, match="1"),
    ):
        ts.Comm.create(store, 0, 2, timeout=0.5)


def test_a_rank_that_is_late_is_named_and_the_communicator_is_poisoned(ranks):
    late = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            late.wait(patience(20))
            return None
        with pytest.raises(ts.TesseraTimeout) as caught:
            comm.all_reduce(np.zeros(4, np.float32))
        assert caught.value.operation == "all_reduce"
        assert caught.value.peer == 1
        assert caught.value.sequence is not None
        with pytest.raises(ts.Aborted) as after:
            comm.barrier()
        assert isinstance(after.value.__cause__, ts.TesseraTimeout)
        assert isinstance(comm.error, ts.TesseraError)
        late.set()
        comm.close()
        return "told"

    assert ranks.outcomes(2, body, timeout=1)[0] == "told"


def test_a_timeout_counts_from_when_it_is_set(ranks):
    told = threading.Event()

    def body(comm: ts.Comm):
        before = comm.timeout
        comm.barrier()
        if comm.rank == 1:
            told.wait(patience(20))
            return None
        comm.timeout = datetime.timedelta(seconds=0.25)
        assert comm.timeout == 0.25 < before
        with pytest.raises(ts.TesseraTimeout, match=r"0\.25 s"):
            comm.barrier()
        told.set()
        comm.close()
        return "told"

    assert ranks.outcomes(2, body)[0] == "told"


def test_bad_timeouts_are_refused(alone: ts.Comm):
    for timeout, error in [(0, ts.InvalidArgument), (-1, ts.InvalidArgument), (None, TypeError), ("1", TypeError)]:
        with pytest.raises(error, match="timeout"):
            alone.timeout = timeout  # type: ignore[assignment]
    with pytest.raises(ts.InvalidArgument, match="heartbeat"):
        ts.init(heartbeat_timeout=-1)
    alone.barrier()


def test_abort_reaches_the_peers_with_its_reason(ranks):
    def body(comm: ts.Comm):
        if comm.rank == 0:
            comm.abort("the data set is gone")
            comm.abort("again")
        with pytest.raises(ts.TesseraError) as caught:
            comm.barrier()
        chain, error = [], caught.value
        while error is not None:
            chain.append(str(error))
            error = error.__cause__
        comm.close()
        return "the data set is gone" in " ".join(chain)

    assert ranks(2, body) == [True, True]


def test_an_exception_in_the_with_block_frees_the_peers(ranks):
    def body(comm: ts.Comm):
        if comm.rank == 1:
            raise KeyError("my own mistake")
        begin = time.monotonic()
        try:
            comm.barrier()
        except ts.TesseraError as error:
            assert time.monotonic() - begin < patience(10)
            return str(error)

    told, own = ranks.outcomes(2, body)
    assert isinstance(own, KeyError)
    assert not isinstance(told, BaseException) or isinstance(told, ts.Aborted)
    assert "my own mistake" in str(told)


def test_no_collective_follows_finalize(ranks):
    def body(comm: ts.Comm):
        comm.finalize()
        with pytest.raises(ts.InvalidState):
            comm.barrier()
        comm.close()

    ranks(2, body)


def test_a_closed_communicator_refuses_everything():
    comm = ts.init()
    comm.close()
    comm.close()
    for call in (
        comm.barrier,
        comm.finalize,
        lambda: comm.transport,
        lambda: comm.abort("late"),
        lambda: comm.empty(3),
        lambda: comm.split(0),
        lambda: comm.all_reduce(np.zeros(2)),
    ):
        with pytest.raises(ts.InvalidState, match="closed"):
            call()
    assert comm.closed
    assert "closed" in repr(comm)
    assert (comm.rank, comm.world_size) == (0, 1)


def test_a_communicator_is_not_used_by_two_threads_at_once(ranks):
    refused = threading.Event()

    def body(comm: ts.Comm):
        if comm.rank == 1:
            assert refused.wait(patience(20))
            comm.send(np.ones(1, np.float32), 0)
            return None
        x = np.zeros(1, np.float32)
        receiver = threading.Thread(target=comm.recv, args=(x, 1))
        receiver.start()
        deadline = time.monotonic() + patience(20)
        while time.monotonic() < deadline:
            try:
                comm.send(x, 0)  # to itself: refused at once, whoever else is inside
            except ts.InvalidArgument:
                continue  # the receiver is not inside yet
            except ts.InvalidState as error:
                message = str(error)
                break
        with pytest.raises(ts.InvalidState, match="in use by another thread"):
            comm.close()
        refused.set()
        receiver.join()
        return message, float(x[0])

    (message, received), _ = ranks(2, body)
    assert "in use by another thread" in message
    assert received == 1


def test_options_that_are_none_are_refused(ranks):
    with pytest.raises(TypeError):
        ts.init(timeouts=3)  # type: ignore[call-arg]
    with pytest.raises(ts.InvalidArgument, match="carrier pigeon"):
        ts.init(backend="carrier pigeon").close()
    with pytest.raises(ValueError, match="not a number"):
        ts.init(timeout=float("nan"))
    with pytest.raises(TypeError):
        ts.Comm()


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_for_gpus_is_unsupported_without_a_driver(backend: str):
    with pytest.raises(ts.Unsupported, match="there is no NVIDIA driver"):
        ts.init(backend=backend).close()


def test_a_plan_is_launched_again_and_again(ranks):
    def body(comm: ts.Comm):
        x = np.full(3, comm.rank + 1.0)
        with comm.prepare("all_reduce", outputs=[x]) as plan:
            plan.wait()
            plan.run()
            assert (x == 3).all()
            plan.start()
            plan.wait(patience(30))
            assert (x == 6).all()
            parts, wholes = [np.full(1, comm.rank)], [np.zeros(2, np.int64)]
            with comm.prepare("all_gather", parts, wholes) as gather:
                gather.run()
            assert wholes[0].tolist() == [0, 1]
        with pytest.raises(ts.InvalidState, match="closed"):
            plan.run()
        with pytest.raises(ts.InvalidArgument, match="collective is 'send'; it must be one of barrier, all_reduce"):
            comm.prepare("send", [x])
        with pytest.raises(TypeError, match="prepare"):
            ts.Plan()

    ranks(2, body)


def test_those_that_are_left_go_on(ranks):
    def body(comm: ts.Comm):
        rank = comm.rank
        if rank == 1:
            comm.close()
            return None
        with comm.shrink() as rest:
            x = np.array([rank])
            rest.all_reduce(x)
            with rest.shrink(timeout=patience(20), name="again") as again:
                assert again.world_size == 2
            return rest.rank, int(x[0])

    assert ranks(3, body) == [(0, 2), None, (1, 2)]


def test_one_rank_has_a_turn_while_the_others_wait(ranks):
    def body(comm: ts.Comm):
        made = []
        with comm.turn(1, timeout=patience(20)) as turn:
            assert bool(turn) == (comm.rank == 1)
            if turn:
                for n in range(3):
                    made.append(n)
                    turn.progress(n + 1, 3)
        comm.barrier()
        return made

    assert ranks(3, body) == [[], [0, 1, 2], []]


def test_a_turn_that_fails_fails_everywhere(ranks):
    def body(comm: ts.Comm):
        try:
            with comm.turn(0, timeout=patience(20)) as turn:
                if turn:
                    raise KeyError("no such class")
        except (KeyError, ts.UserError) as error:
            comm.barrier()
            return f"{type(error).__name__}: {error}"
        return "well"

    own, other = ranks(2, body)
    assert own == "KeyError: 'no such class'"
    assert other.startswith("UserError: rank 0 failed in its turn: KeyError: 'no such class'")


def test_a_turn_may_end_inside_its_block(ranks):
    def body(comm: ts.Comm):
        with comm.turn(0, timeout=patience(20)) as turn:
            turn.end()
            turn.end()
        comm.barrier()
        try:
            with comm.turn(0, timeout=patience(20)) as turn:
                turn.end("the data set is gone" if turn else None)
        except ts.UserError as error:
            comm.barrier()
            return str(error)
        comm.barrier()
        return ""

    own, other = ranks(2, body)
    assert own == "" and "the data set is gone" in other


def test_a_turn_is_used_as_it_is_meant_to(alone: ts.Comm):
    with pytest.raises(ts.InvalidArgument, match="ranks are 0 to 0"):
        alone.turn(1, timeout=1)
    with pytest.raises(ts.InvalidArgument, match="must be positive"):
        alone.turn(0, timeout=0)
    with pytest.raises(TypeError):
        alone.turn(0, timeout=None)
    with pytest.raises(TypeError):
        ts.Turn()
    with alone.turn(0, timeout=1) as turn, pytest.raises(ts.InvalidArgument, match="2 of 1"):
        turn.progress(2, 1)
    with alone.turn(0, timeout=1):
        with pytest.raises(ts.InvalidState, match="begins inside the turn of rank 0"):
            alone.turn(0, timeout=1)
        with pytest.raises(ts.InvalidState, match="used inside the turn of rank 0"):
            alone.barrier()
    alone.barrier()
    alone.turn(0, timeout=1).close()
    alone.barrier()
    with pytest.raises(ts.InvalidState):
        turn.end()
