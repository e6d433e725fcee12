"""Who keeps whom alive, what leaks warn, and what a forked child may not do."""

import gc
import multiprocessing
import os
import warnings
import weakref

import numpy as np
import pytest
import tessera as ts


def leak(make) -> list[str]:
    """The ResourceWarnings of an object that is dropped unclosed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        gc.collect()
    return [str(warning.message) for warning in caught if warning.category is ResourceWarning]


def test_what_holds_threads_sockets_or_files_warns_when_it_is_leaked(tmp_path):
    assert any("Comm" in message for message in leak(ts.init))
    assert any("StoreServer" in message for message in leak(lambda: ts.StoreServer(insecure=True)))
    assert any("Saver" in message for message in leak(lambda: ts.Saver(None, tmp_path / "root")))
    with ts.StoreServer(insecure=True) as server:
        assert any("Store" in message for message in leak(lambda: ts.Store(server.uri, insecure=True)))


def test_what_is_only_memory_does_not_warn():
    with ts.init() as comm:
        assert leak(lambda: ts.SGD(ts.DDP(comm, {"w": np.ones(2)}))) == []
        assert leak(lambda: ts.Sampler(comm, 10)) == []
        assert leak(lambda: ts.Layout((2,), [1], [ts.Replicate()])) == []
        assert leak(lambda: comm.empty(3)) == []


def test_a_with_block_closes_what_was_made_from_the_communicator(tmp_path):
    with ts.init() as comm:
        saver = ts.Saver(comm, tmp_path)
        mesh = ts.Mesh(comm, {"dp": 1})
        group = comm.split(0)
        saver.save_async(1, ts.State(epoch=1))
    assert saver.closed
    assert mesh.closed
    assert group is not None
    assert group.closed
    assert ts.Checkpoint(tmp_path).step == 1


def test_gradients_outlive_their_ddp():
    with ts.init() as comm:
        ddp = ts.DDP(comm, {"w": np.ones(1000)})
        grad = ddp.grads["w"]
        ddp.close()
        with pytest.raises(ts.InvalidState, match="closed"):
            ddp.wait()
        del ddp
        gc.collect()
        grad[:] = 3
        assert grad.sum() == 3000


def test_an_optimizer_goes_on_over_a_ddp_that_was_closed():
    with ts.init() as comm:
        w = np.ones(3)
        ddp = ts.DDP(comm, {"w": w})
        opt = ts.SGD(ddp, lr=0.5)
        ddp.grads["w"][:] = 2
        ddp.ready_all()
        ddp.wait()
        ddp.close()
        del ddp
        gc.collect()
        opt.step()
        assert (w == 0).all()
        opt.close()
        with pytest.raises(ts.InvalidState, match="closed"):
            opt.step()


def test_parameters_live_as_long_as_the_optimizer():
    w, g = np.ones(3), np.ones(3)
    gone = weakref.ref(w)
    opt = ts.SGD({"w": w}, {"w": g}, lr=1)
    del w
    gc.collect()
    opt.step()
    left = gone()
    assert left is not None
    assert (left == 0).all()
    del left, opt
    gc.collect()
    assert gone() is None


def test_a_store_outlives_its_close_while_a_communicator_needs_it():
    token = "5a" * 32
    with ts.StoreServer(token=token) as server:
        store = ts.Store(server.uri, token=token)
        with ts.Comm.create(store, 0, 1) as comm:
            store.close()
            with pytest.raises(ts.InvalidState, match="closed"):
                store.get("a")
            group = comm.split(0)
            assert group is not None
            group.close()


def in_child(work) -> str:
    """What `work` returns in a forked child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of a process with threads is the point
        child = os.fork()
    if child == 0:
        try:
            text = repr(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_forked_child_may_not_use_its_parents_handles():
    with ts.init() as comm:
        memory = comm.empty(3)
        sampler = ts.Sampler(comm, 10)
        for call in (
            comm.barrier,
            lambda: comm.all_reduce(np.ones(2)),
            lambda: sampler.batch(2),
            lambda: comm.transport,
        ):
            assert "InvalidState" in in_child(call)
            assert "forked" in in_child(call)

        def drop():
            nonlocal comm, sampler, memory
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                comm.close()
                comm = sampler = memory = None
                gc.collect()
            return [str(warning.message) for warning in caught]

        assert in_child(drop) == "[]"
        comm.barrier()
        comm.all_reduce(memory)


def test_a_forked_child_may_use_no_object_of_its_parent(tmp_path):
    with ts.init() as comm:
        state = ts.State(w=np.ones(2, np.float32))
        saver = ts.Saver(None, tmp_path)
        saver.save(1, state)
        work = saver.save_async(2, state)
        checkpoint = ts.Checkpoint(tmp_path)
        ddp = ts.DDP(comm, {"w": np.ones(2, np.float32)})
        fsdp = ts.FSDP(comm, {"u": {"w": np.ones(2, np.float32)}})
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
        engine = ts.Engine(comm, {"u": {"w": np.ones(2, np.float32)}}, config)
        scale = ts.engine.LossScale()
        optimizer = ts.SGD(ddp)
        scaler = ts.GradScaler()
        schedule = ts.LRSchedule.exponential(0.5)
        plan = comm.prepare("all_reduce", outputs=[np.ones(2, np.float32)])
        mesh = ts.Mesh(comm, {"dp": 1})
        pipeline = ts.Pipeline(comm, [0], lambda call: None, lambda call: None, microbatches=1)
        uses = {
            "save": lambda: saver.save(3, state),
            "save_async": lambda: saver.save_async(3, state),
            "wait": saver.wait,
            "resume": lambda: saver.resume(state),
            "should_stop": lambda: saver.should_stop(3),
            "trim": saver.trim,
            "work": work.wait,
            "read": lambda: checkpoint.read("w", np.ones(2, np.float32)),
            "ready": ddp.ready_all,
            "forward": lambda: fsdp.forward("u").__enter__(),
            "engine": lambda: engine.forward("u").__enter__(),
            "loss scale": lambda: scale.update(False),
            "step": optimizer.step,
            "scaled step": lambda: scaler.step(optimizer),
            "schedule": schedule.step,
            "plan": plan.run,
            "mesh": lambda: mesh["dp"].barrier(),
            "pipeline": pipeline.step,
        }
        told = {name: in_child(use) for name, use in uses.items()}
        assert {name: text for name, text in told.items() if "InvalidState" not in text or "forked" not in text} == {}
        work.wait()
        saver.save(3, state)
        for one in (saver, checkpoint):
            one.close()


def test_a_forked_child_may_leave_its_parents_with_block():
    with ts.init() as comm:

        def leave():
            with comm:
                raise SystemExit

        assert in_child(leave).startswith("SystemExit")
        comm.barrier()


def test_a_forked_child_can_make_its_own():
    def work():
        with ts.init() as comm:
            x = np.ones(2)
            comm.all_reduce(x)
            return x.tolist()

    with ts.init():
        assert in_child(work) == "[1.0, 1.0]"


def test_errors_travel_between_processes():
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool, pytest.raises(ts.Unsupported, match="cannot be reduced") as caught:
        pool.apply(_fail)
    assert caught.value.code == 14


def _fail():
    with ts.init() as comm:
        comm.all_reduce(np.zeros(2, np.complex64))


def test_an_exit_with_everything_open_is_quiet_and_quick(program):
    text = """
        import numpy as np
        import tessera as ts
        ts.log.set_callback(print)
        comm = ts.init()
        ddp = ts.DDP(comm, {"w": np.ones(3)})
        opt = ts.AdamW(ddp)
        grad = ddp.grads["w"]
        work = comm.barrier(async_op=True)
        work.add_done_callback(print)
        memory = comm.empty(5)
    """
    result = program(text).run()
    assert (result.returncode, result.stderr) == (0, "")
