"""What DDP offers beyond the average: each option by its use and by its error. docs/DDP.md says what they mean."""

import gc
import inspect
import re
import signal
import subprocess
import weakref

import numpy as np
import pytest
import tessera as ts
from patience import patience


def params():
    return {"a": np.zeros(40, np.float32), "b": np.zeros((20, 30), np.float32), "c": np.zeros(3, np.float64)}


def test_options_are_those_of_the_c_struct():
    taken = inspect.signature(ts.DDP).parameters
    assert list(taken)[:4] == ["comm", "params", "tp", "bucket_bytes"]
    assert all(taken[name].default is None for name in ("op", "find_unused", "hook", "share_params"))
    described = inspect.getdoc(ts.DDP) or ""
    assert "find_unused : bool, optional\n    True: gradients that are not ready at `DDP.wait`" in described
    with ts.init() as comm, pytest.raises(TypeError, match=r"there is no option 'bucket_byte'.*bucket_bytes"):
        ts.DDP(comm, params(), bucket_byte=1)  # type: ignore[call-arg]
    unknown = "hook is 'none'; it must be one of 'all_reduce', 'power_sgd'"
    with ts.init() as comm, pytest.raises(ts.InvalidArgument, match=unknown):
        ts.DDP(comm, params(), hook="none")  # type: ignore[arg-type]


def test_no_sync_adds_up_what_the_next_step_reduces(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())
        with ddp.no_sync():
            for _ in range(3):
                ddp.grads["a"] += comm.rank
                ddp.ready("a")
                ddp.wait()
        assert (ddp.grads["a"] == 3 * comm.rank).all()
        ddp.grads["a"] += comm.rank
        ddp.ready_all()
        with pytest.raises(ts.InvalidState, match="synchronisation cannot be changed"):
            ddp.set_sync(False)
        ddp.wait()
        return float(ddp.grads["a"][0])

    assert ranks(2, body) == [2.0, 2.0]


def test_no_sync_in_no_sync_ends_with_the_outer_one(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())
        ddp.grads["a"][...] = comm.rank
        with ddp.no_sync():
            with ddp.no_sync():
                pass
            ddp.ready_all()
            ddp.wait()
            own = float(ddp.grads["a"][0])
        ddp.ready_all()
        ddp.wait()
        ddp.set_sync(False)
        with ddp.no_sync():
            pass
        ddp.grads["a"][...] = comm.rank
        ddp.ready_all()
        ddp.wait()
        return own, float(ddp.grads["a"][0])

    assert ranks(2, body) == [(0.0, 0.0), (1.0, 1.0)]


def test_unused_parameters_are_found_and_left_alone(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), find_unused=True)
        ddp.grads["c"][...] = 5
        if comm.rank == 0:
            ddp.grads["b"][...] = 4
            ddp.ready("b")
        ddp.ready("a")
        ddp.wait()
        assert (ddp.used("a"), ddp.used("b"), ddp.used(2)) == (True, True, False)
        assert (ddp.grads["b"] == 2).all()
        assert (ddp.grads["c"] == 5).all()

    ranks(2, body)


def test_an_optimizer_steps_once_for_gradients_that_were_reduced(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())
        opt = ts.SGD(ddp, lr=1.0)
        with pytest.raises(ts.InvalidState, match="before any gradients were reduced"):
            opt.step()
        for _ in range(2):
            ddp.grads["a"][...] = comm.rank
            ddp.ready_all()
            with pytest.raises(ts.InvalidState, match=r"twice in one step; end the step"):
                ddp.ready_all()
            ddp.wait()
            opt.step()
            with pytest.raises(ts.InvalidState, match="no gradients were reduced since its last step"):
                opt.step()
        with ddp.no_sync():
            opt.step()  # of this rank's own
        assert (ddp.params["a"] == -1.5).all()

    ranks(2, body)


def test_a_static_graph_stays_as_it_is(alone):
    ddp = ts.DDP(alone, params(), static_graph=True)
    for _ in range(2):
        ddp.ready("a", "c")
        ddp.wait()
    with pytest.raises(ts.InvalidState, match='"b" was marked ready, but not in the first step'):
        ddp.ready("b")


def test_buckets_are_rebuilt_and_statistics_tell_of_each(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), rebuild_buckets=True, bucket_bytes=64, first_bucket_bytes=64)
        views = dict(ddp.grads)
        for _ in range(2):
            for name in ("b", "a", "c"):
                ddp.grads[name][...] = comm.rank
                ddp.ready(name)
            ddp.wait()
        assert all((view == 0.5).all() for view in views.values())
        assert all(view is ddp.grads[name] for name, view in views.items())
        stats = ddp.stats()
        assert [bucket.size_bytes for bucket in stats] == [2432, 192, 64]
        assert [bucket.params for bucket in stats] == [1, 1, 1]
        for bucket in stats:
            assert 0 <= bucket.ready_ns <= bucket.start_ns <= bucket.end_ns
            assert 0 <= bucket.exposed_ns <= bucket.end_ns

    ranks(2, body)


def test_gradients_are_reduced_in_another_dtype(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), reduce_dtype="float16", pre_divide=2.0)
        ddp.grads["a"][...] = 60000 + comm.rank
        ddp.ready_all()
        ddp.wait()
        return float(ddp.grads["a"][0])

    assert ranks(2, body) == [60000.0, 60000.0]


def test_power_sgd_gives_a_matrix_of_its_rank(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), hook="power_sgd", powersgd_rank=1, powersgd_start_step=1)
        matrix = np.outer(np.arange(1, 21), np.arange(30)).astype(np.float32)
        for _ in range(4):
            ddp.grads["b"][...] = matrix * (comm.rank + 1)
            ddp.ready_all()
            ddp.wait()
            np.testing.assert_allclose(ddp.grads["b"], 1.5 * matrix, rtol=1e-4, atol=1e-3)

    ranks(2, body)


def test_noop_leaves_each_rank_its_own(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params(), hook="noop")
        ddp.grads["a"][...] = comm.rank
        ddp.ready_all()
        ddp.wait()
        return float(ddp.grads["a"][0])

    assert ranks(2, body) == [0.0, 1.0]


def test_a_hook_reduces(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())
        seen = []

        def hook(bucket: ts.ddp.Bucket):
            seen.append((bucket.index, *bucket.names))
            for grad in bucket.grads:
                bucket.comm.all_reduce(grad, op="max")
            kept.append(bucket.comm)

        kept: list[ts.Comm] = []
        ddp.set_hook(hook)
        for grad in ddp.grads.values():
            grad[...] = comm.rank
        ddp.ready_all()
        ddp.wait()
        assert all((grad == 1).all() for grad in ddp.grads.values())
        assert seen == [(0, "c"), (1, "b", "a")]
        with pytest.raises(ts.InvalidState, match="closed"):
            kept[0].barrier()
        ddp.set_hook(None)
        ddp.ready_all()
        ddp.wait()
        assert len(seen) == 2

    ranks(2, body)


def test_what_a_hook_raises_fails_the_step_on_every_rank(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())

        def hook(bucket: ts.ddp.Bucket):
            if comm.rank == 1:
                raise KeyError("lost")
            for grad in bucket.grads:
                bucket.comm.all_reduce(grad)

        ddp.set_hook(hook)
        with pytest.raises(ts.TesseraError, match="rank 1: the hook for bucket 0 returned 1") as caught:
            ddp.ready_all()
            ddp.wait()
        errors[comm.rank] = caught.value

    errors: dict[int, BaseException] = {}
    ranks.outcomes(2, body)  # the communicator cannot be finalized any more
    assert isinstance(errors[0], ts.Aborted)
    assert isinstance(errors[1], ts.UserError)
    assert isinstance(errors[1].__cause__, KeyError)


def test_what_cannot_be_called_is_no_hook(alone):
    ddp = ts.DDP(alone, params())
    with pytest.raises(TypeError, match="the hook is 3"):
        ddp.set_hook(3)  # type: ignore[arg-type]
    ddp.ready_all()
    ddp.wait()


def test_a_model_with_a_hook_can_be_collected(alone):
    class Hook:
        def __call__(self, bucket: ts.ddp.Bucket):
            pass

    hook = Hook()
    ddp = ts.DDP(alone, params())
    ddp.set_hook(hook)
    ddp.ready_all()
    ddp.wait()
    model, called = weakref.ref(ddp), weakref.ref(hook)
    del ddp, hook
    gc.collect()
    assert model() is None
    assert called() is None


def test_an_optimizer_steps_in_backward(ranks):
    def body(comm: ts.Comm):
        mine = {"a": np.ones(40, np.float32)}
        ddp = ts.DDP(comm, mine)
        optimizer = ts.SGD(ddp, lr=0.5)
        ddp.step_in_backward(optimizer)
        ddp.grads["a"][...] = comm.rank
        ddp.ready_all()
        ddp.wait()
        assert (mine["a"] == 0.75).all()
        assert optimizer.steps == 1
        with pytest.raises(ts.InvalidState, match="the step is already done"):
            optimizer.step()
        with pytest.raises(ts.InvalidArgument, match="was not created from this model"):
            ts.DDP(comm, params()).step_in_backward(optimizer)

    ranks(2, body)


def test_buffers_come_from_rank_0(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, params())
        with pytest.raises(ts.InvalidState, match="no buffers were registered"):
            ddp.broadcast_buffers()
        buffers = {"mean": np.full(3, comm.rank + 1.0), "batches": np.array([comm.rank])}
        ddp.register_buffers(buffers)
        assert (buffers["mean"] == 1).all()
        buffers["batches"][...] = comm.rank + 7
        ddp.broadcast_buffers()
        assert buffers["batches"][0] == 7

    ranks(2, body)


def test_ranks_with_different_data_join(ranks):
    def body(comm: ts.Comm):
        mine = {"a": np.zeros(40, np.float32)}
        ddp = ts.DDP(comm, mine, join="divide_by_active")
        optimizer = ts.SGD(ddp, lr=1.0)
        for step in range(1 + 2 * comm.rank):
            ddp.grads["a"][...] = -(comm.rank + 1)
            ddp.ready_all()
            ddp.wait()
            assert (ddp.grads["a"] == (-1.5 if step == 0 else -2)).all()
            optimizer.step()
        ddp.join()
        return float(mine["a"][0])

    assert ranks(2, body) == [5.5, 5.5]


def test_ranks_that_joined_count_as_zeros_where_sums_are_divided_by_the_world(ranks):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, {"a": np.zeros(40, np.float32)}, join="divide_by_world")
        for mean in (6, 5, 3)[: comm.rank + 1]:  # of 3, 6 and 9; without 3; without 6
            ddp.grads["a"][...] = 3 * (comm.rank + 1)
            ddp.ready_all()
            ddp.wait()
            assert (ddp.grads["a"] == mean).all()
        ddp.join()

    ranks(3, body)


def test_join_needs_its_option(alone):
    with pytest.raises(ts.InvalidState, match="created without the join option"):
        ts.DDP(alone, params()).join()


def test_the_ranks_of_a_host_share_the_parameters(ranks, tmp_path):
    def body(comm: ts.Comm):
        ddp = ts.DDP(comm, {"w": np.full((5, 3), comm.rank, np.float32), "b": np.ones(2)}, share_params=True)
        with pytest.raises(ts.InvalidState, match="needs an optimizer, which updates the parameters during the step"):
            ddp.ready_all()
        optimizer = ts.SGD(ddp, lr=0.5, momentum=0.9)
        ddp.grads["w"] += comm.rank
        ddp.ready_all()
        ddp.wait()
        assert (ddp.params["w"] == -0.5).all()  # from rank 0's zeros
        assert ddp.shared_step() == 1
        state = ts.State(model=ddp, optim=optimizer)
        with ts.Saver(comm, tmp_path) as saver:
            saver.save(1, state)
        ddp.ready_all()
        ddp.wait()
        assert (ddp.params["w"] != -0.5).all()
        comm.barrier()
        ts.Checkpoint(tmp_path).load(state)
        assert (ddp.params["w"] == -0.5).all()
        assert optimizer.steps == 1
        address = ddp.params["w"].ctypes.data
        comm.barrier()
        return address

    assert len(set(ranks(3, body))) == 1  # these ranks are threads, which map the copy once


def test_sharing_needs_its_option_and_the_same_gradients(alone):
    with pytest.raises(ts.InvalidState, match="no shared parameters; create it with share_params"):
        ts.DDP(alone, params()).shared_step()
    for options in ({"find_unused": True}, {"static_graph": True}, {"join": "divide_by_world"}, {"hook": "noop"}):
        with pytest.raises(ts.Unsupported, match="share_params cannot be combined with"):
            ts.DDP(alone, params(), share_params=True, **options)


SHARED = """
    import os, signal, sys
    import numpy as np
    import tessera as ts

    def proportional():  # of what this process maps of shared memory, each page divided by the processes that map it
        total = 0
        mine = False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                if "-" in line.split()[0]:
                    mine = "memfd:tessera" in line or "[anon" in line or len(line.split()) == 5 or "[heap]" in line
                elif mine and line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
        return total

    rank, uri, token, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    size = 4 << 20
    with ts.Store(uri, token=token, timeout=60) as store:
        comm = ts.Comm.create(store, rank, 2, timeout=60)
        before = proportional()
        ddp = ts.DDP(comm, {"w": np.zeros(size, np.float32), "b": np.zeros(50, np.float32)},
                     share_params=what != "plain", first_bucket_bytes=1)
        optimizer = ts.AdamW(ddp)
        steps = 0

        def hook(bucket):
            if rank == 1 and steps == 1 and bucket.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for grad in bucket.grads:
                bucket.comm.all_reduce(grad, "avg")

        if what == "kill":
            ddp.set_hook(hook)
        try:
            for steps in range(2):
                ddp.ready_all()
                ddp.wait()
                if what == "plain":
                    optimizer.step()
        except ts.PeerLost as error:
            print("lost", error.peer)
            try:
                ddp.shared_step()
            except ts.Corrupt as torn:
                print("torn:", torn)
        else:
            comm.barrier()
            print(proportional() - before)
            comm.barrier()
        comm.close()
"""


def shared_pair(program, what):
    token = "5a" * 32
    pair = program(SHARED)
    with ts.StoreServer(token=token) as server:
        other = subprocess.Popen(pair.command("1", server.uri, token, what), stdout=subprocess.DEVNULL)
        survivor = pair.run("0", server.uri, token, what)
        return other.wait(patience(60)), survivor


def test_a_rank_that_dies_in_a_step_leaves_a_copy_that_is_known_to_be_torn(program):
    ended, survivor = shared_pair(program, "kill")
    assert ended == -signal.SIGKILL
    lost, torn = survivor.stdout.splitlines()
    assert lost == "lost 1", survivor.stderr
    assert "are inconsistent: this rank finished step 1" in torn
    assert "discard the model, create a new one and load the last checkpoint" in torn


def test_parameters_and_moments_are_in_memory_once_a_host(program):
    used = {}
    for what in ("plain", "shared"):
        ended, rank = shared_pair(program, what)
        assert ended == 0, rank.stderr
        used[what] = int(rank.stdout)
    # Of 16 MiB each: gradients, parameters and two moments, against gradients and half of the others.
    tensor = 16 << 20
    assert 3.5 * tensor < used["plain"] < 4.6 * tensor, used
    assert 2.4 * tensor < used["shared"] < 3.0 * tensor, used


def test_a_parameter_that_is_not_contiguous_on_one_rank_is_an_error_of_all(ranks):
    def body(comm: ts.Comm):
        weight = np.zeros((4, 4), np.float32)
        return ts.DDP(comm, {"w": weight[:, :2] if comm.rank == 1 else weight[:, :2].copy()})

    good, bad = ranks.outcomes(2, body)
    for error in (good, bad):
        assert isinstance(error, ts.InvalidArgument)
        assert '"w") is not contiguous: stride 4 of dimension 0, expected 2' in str(error)
    assert "rank 1" in str(good)


def test_bad_options_are_named(alone):
    for options, said in (
        ({"hook": "powersgd"}, "hook is 'powersgd'; it must be one of 'all_reduce'"),
        ({"join": "on"}, "join is 'on'"),
        ({"reduce_dtype": "int32"}, "reduce_dtype is i32"),
        ({"pre_divide": 0.0}, "pre_divide is 0"),
        ({"powersgd_rank": 0}, "powersgd_rank is 0"),
    ):
        with pytest.raises(ts.InvalidArgument, match=said):
            ts.DDP(alone, params(), **options)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.arange(6.0).reshape(2, 3), np.arange(6).reshape(2, 3)),
        (np.arange(3, dtype=np.float32), np.array([[0, 1, 2]] * 2)),
        (7, np.full((2, 3), 7)),
        (np.arange(6, dtype=np.float32), np.arange(6).reshape(2, 3)),
        (np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(6).reshape(3, 2).T),
        (np.arange(6, dtype=np.float32).reshape(1, 2, 3), np.arange(6).reshape(2, 3)),
    ],
    ids=["dtype", "row", "scalar", "flat", "transposed", "nested"],
)
def test_the_advice_for_a_gradient_of_another_shape_or_dtype_works(alone, value, written):
    ddp = ts.DDP(alone, {"w": np.zeros((2, 3), np.float32)})
    with pytest.raises(ts.InvalidArgument, match=r"'w' has shape \(2, 3\) and dtype float32, got shape") as refused:
        ddp.grads["w"] = value
    (advice,) = re.findall(r"grads\['w'\]\[\.\.\.\] = (?:np\.\w+\(.*\)|value)", str(refused.value))
    exec(advice, {"grads": ddp.grads, "value": value, "np": np})
    assert (ddp.grads["w"] == written).all()


def test_a_gradient_that_does_not_fit_is_refused_without_an_assignment_that_fails(alone):
    ddp = ts.DDP(alone, {"w": np.zeros((2, 3), np.float32)})
    with pytest.raises(ts.InvalidArgument, match=r"; compute a gradient of shape \(2, 3\)$"):
        ddp.grads["w"] = np.zeros((3, 3), np.float32)


def test_the_cpu_has_no_streams():
    with ts.init() as comm, ts.DDP(comm, params()) as ddp:
        ddp.set_stream()
        with pytest.raises(ts.InvalidArgument, match="parameters are on the CPU"):
            ddp.set_stream(1)
        with pytest.raises(TypeError, match="must be a CUDA stream"):
            ddp.set_stream("first")
