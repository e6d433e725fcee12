"""Pipelines of small tanh stages in NumPy: the same numbers as one process, and what each mistake raises."""

import copy
import gc
import inspect
import re
import signal
import subprocess
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from numpy.testing import assert_allclose
from patience import patience

ROWS = 11  # which 4 micro-batches do not divide


def width(stage: int) -> int:
    return 2 + stage % 3


class Layer:
    def __init__(self, stage: int):
        random = np.random.default_rng(stage)
        self.w = random.normal(size=(width(stage), width(stage + 1)))
        self.dw = np.zeros_like(self.w)

    def forward(self, x):
        return np.tanh(x @ self.w)

    def backward_input(self, y, dy):
        return (dy * (1 - y * y)) @ self.w.T

    def backward_weight(self, x, y, dy):
        self.dw += x.T @ (dy * (1 - y * y))


def loss_of(y, t):
    return float(np.mean(np.sum((y - t) ** 2, axis=1)) / 2)


def loss_grad(call: ts.StageCall):
    """Of the last stage, which has kept its output."""
    (y,), (t,) = call.outputs, call.targets
    return call.weight * (y - t) / len(y)


class Trainer:
    """The stages of one rank."""

    def __init__(self, stages):
        self.layers = {stage: Layer(stage) for stage in stages}
        self.calls: list[str] = []

    def out_grad(self, call: ts.StageCall):
        return loss_grad(call) if call.targets else call.output_grads[0]

    def forward(self, call: ts.StageCall):
        self.calls.append(f"{call.stage}F{call.microbatch}")
        y = self.layers[call.stage].forward(call.inputs[0])
        return (y, loss_of(y, call.targets[0])) if call.targets else y

    def backward(self, call: ts.StageCall):
        self.calls.append(f"{call.stage}B{call.microbatch}" + "!" * call.is_last_backward)
        layer, y, dy = self.layers[call.stage], call.outputs[0], self.out_grad(call)
        layer.backward_weight(call.inputs[0], y, dy)
        return layer.backward_input(y, dy)

    def backward_input(self, call: ts.StageCall):
        self.calls.append(f"{call.stage}I{call.microbatch}")
        if call.stage > 0:
            call.input_grads[0][...] = self.layers[call.stage].backward_input(call.outputs[0], self.out_grad(call))

    def backward_weight(self, call: ts.StageCall):
        self.calls.append(f"{call.stage}W{call.microbatch}" + "!" * call.is_last_backward)
        assert call.input_grads == ()
        self.layers[call.stage].backward_weight(call.inputs[0], call.outputs[0], self.out_grad(call))

    def join(self, comm: ts.Comm, stages, **options) -> ts.Pipeline:
        return ts.Pipeline(
            comm,
            stages,
            self.forward,
            self.backward,
            backward_input=self.backward_input,
            backward_weight=self.backward_weight,
            **options,
        )


def data(stages: int):
    random = np.random.default_rng(99)
    return random.normal(size=(ROWS, width(0))), random.normal(size=(ROWS, width(stages)))


def alone_trained(stages: int):
    """The loss and the gradients of one process."""
    x, t = data(stages)
    layers = [Layer(stage) for stage in range(stages)]
    values = [x]
    for layer in layers:
        values.append(layer.forward(values[-1]))
    grad = (values[-1] - t) / ROWS
    for stage in reversed(range(stages)):
        layers[stage].backward_weight(values[stage], values[stage + 1], grad)
        grad = layers[stage].backward_input(values[stage + 1], grad)
    return loss_of(values[-1], t), [layer.dw for layer in layers]


def placed(schedule: str, rank: int, size: int) -> list[int]:
    if schedule in ("zbv", "dualpipev"):
        return [rank, 2 * size - 1 - rank]
    return [rank] if schedule in ("gpipe", "1f1b", "zb_h2") else [rank + size, rank]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("schedule", ts.pipeline._options.PIPELINE["schedule"].numbers)
def test_each_schedule_trains_like_one_process(ranks, schedule: str, size: int):
    microbatches = 8 if size == 4 else 4
    stages = len(placed(schedule, 0, size)) * size
    expected, grads = alone_trained(stages)
    x, t = data(stages)
    shares = np.array([len(part) for part in np.array_split(x, microbatches)]) / ROWS

    def body(comm: ts.Comm):
        own = placed(schedule, comm.rank, size)
        trainer = Trainer(own)
        with trainer.join(comm, own, schedule=schedule, microbatches=microbatches) as pipe:
            assert pipe.stages == tuple(sorted(own))
            losses = pipe.step(x, t)  # what a rank has no use for is ignored
            assert losses.shape == (microbatches,)
            assert_allclose(losses @ shares, expected)
            for stage, layer in trainer.layers.items():
                assert_allclose(layer.dw, grads[stage], atol=1e-12)
            assert sum(call.endswith("!") for call in trainer.calls) == len(own)
            stats = pipe.stats()
            assert stats.wall_ns >= stats.busy_ns + stats.waited_ns
            assert (stats.longest_stage is None) == (size == 1)
            assert 1 <= stats.peak_activations <= microbatches * len(own)

            trainer.calls.clear()
            assert_allclose(pipe.eval(x, t), losses)
            assert sorted(trainer.calls) == sorted(f"{stage}F{i}" for stage in own for i in range(microbatches))
            pipe.step(x, t)
            for stage, layer in trainer.layers.items():
                assert_allclose(layer.dw, 2 * grads[stage], atol=1e-12)

    ranks(size, body)


def test_facts_and_weights_of_a_call(alone):
    seen: list[ts.StageCall] = []

    def forward(call: ts.StageCall):
        seen.append(call)
        call.loss(call.microbatch)

    with ts.Pipeline(alone, [0], forward, seen.append, microbatches=2, schedule="gpipe") as pipe:
        assert pipe.stats() == (0, 0, 0, 0, None, None, 0, 0)
        assert pipe.step(np.ones((3, 2))).tolist() == [0, 1]
        assert [(c.work, c.microbatch, c.weight, c.training, c.is_last_backward) for c in seen] == [
            ("forward", 0, 0.5, True, False),
            ("forward", 1, 0.5, True, False),
            ("backward", 0, 0.5, True, False),
            ("backward", 1, 0.5, True, True),
        ]
        assert repr(seen[0]) == "<tessera.StageCall stage 0, micro-batch 0, forward (ended)>"
        seen.clear()
        pipe.step(targets=np.ones((3, 2)))
        assert [call.weight for call in seen] == [2 / 3, 1 / 3] * 2
        seen.clear()
        pipe.eval([], weights=[3, np.float32(4)])
        assert [(call.weight, call.training) for call in seen] == [(3, False), (4, False)]
        for mine in (pipe, seen[0]):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                copy.copy(mine)
        assert seen[0].stage == 0
        assert seen[0].microbatches == 2
        with pytest.raises(ts.InvalidState, match="targets of stage 0, micro-batch 0, forward: the call has ended"):
            assert seen[0].targets
        with pytest.raises(ts.InvalidState, match="the call has ended"):
            seen[0].loss(1)
        with pytest.raises(ts.InvalidState, match="the call has ended"):
            seen[0].output(1, "f32")


def test_losses_that_were_not_reported_are_nan(alone):
    with ts.Pipeline(alone, [0], lambda call: None, lambda call: None, microbatches=3) as pipe:
        assert np.isnan(pipe.step()).all()


def test_a_rank_that_has_the_loss_reports_the_mean_of_uneven_parts(ranks):
    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            return call.inputs[0] if call.stage == 0 else np.mean(call.inputs[0])  # a NumPy scalar

        with ts.Pipeline(comm, [comm.rank], forward, lambda call: None, microbatches=2) as pipe:
            losses = pipe.step(np.array([0.0, 2, 7]), np.zeros(3))
            assert losses.tolist() == [1, 7]

    ranks(2, body)


def test_outputs_of_any_number_dtype_and_layout_arrive(ranks):
    made = (
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.array(2.5, np.float16),
        np.zeros((0, 3), np.float32),
        np.arange(4.0)[::-2],
    )

    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if call.stage == 0:
                more = call.output((2, call.microbatch + 1), "float32")
                assert more.flags.aligned
                more[...] = call.microbatch
                writable.append(more)
                return made
            assert not any(array.flags.writeable for array in call.inputs)
            with pytest.raises(ValueError, match="WRITEABLE"):
                call.inputs[0].flags.writeable = True
            assert (call.inputs[0] == np.full((2, call.microbatch + 1), call.microbatch)).all()
            for sent, array in zip(made, call.inputs[1:], strict=True):
                assert (sent.shape, sent.dtype) == (array.shape, array.dtype)
                assert (sent == array).all()
            return 1.5

        def backward(call: ts.StageCall):
            if call.stage == 1:
                assert [grad is None for grad in call.input_grads] == [False, True, False, False, False]
                assert all((grad == 0).all() for grad in call.input_grads if grad is not None)
                call.input_grads[0][...] = 7
                return (call.input_grads[0], None, np.float16(3) * np.ones((), np.float16), None, np.ones(2))
            assert not writable[call.microbatch].flags.writeable
            writable[call.microbatch] = None
            assert [None if grad is None else grad.tolist() for grad in call.output_grads[1:]] == [None, 3, [], [1, 1]]
            assert (call.output_grads[0] == 7).all()
            return "what stage 0 returns is ignored"

        writable: list = []
        with ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=2) as pipe:
            assert pipe.step(np.zeros((2, 1))).tolist() == [1.5, 1.5]

    ranks(2, body)


def test_bfloat16_goes_through(ranks):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            assert call.inputs[0].dtype == (np.float32 if call.stage == 0 else ml_dtypes.bfloat16)
            return call.inputs[0].astype(ml_dtypes.bfloat16) if call.stage == 0 else float(call.inputs[0].sum())

        def backward(call: ts.StageCall):
            if call.stage == 1:
                return np.ones(2, ml_dtypes.bfloat16)
            assert call.output_grads[0].tolist() == [1, 1]
            return None

        with ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=1, schedule="gpipe") as pipe:
            assert pipe.step(np.float32([1, 2])).tolist() == [3]

    ranks(2, body)


def test_an_edge_skips_a_stage_and_carries_the_gradient_back(ranks):
    x = np.arange(1.0, 7).reshape(3, 2)

    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if call.stage == 0:
                return 2 * call.inputs[0], 3 * call.inputs[0]
            if call.stage == 1:
                return call.inputs[0] * 10
            return float(np.sum(call.inputs[0] + call.inputs[1]))

        def backward(call: ts.StageCall):
            if call.stage == 2:
                return np.full(call.inputs[0].shape, 1.0), np.full(call.inputs[1].shape, 5.0)
            if call.stage == 1:
                return call.output_grads[0] * 10
            next_grad, edge_grad = call.output_grads
            grads.append(2 * next_grad.sum() + 3 * edge_grad.sum())
            return None

        grads: list[float] = []
        csv = "0F0,0F1,,,,,0B0,0B1\n,1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"
        with ts.Pipeline(
            comm, [[0], [1, 2]][comm.rank], forward, backward, schedule_csv=csv, edges=[(0, 1, 2)]
        ) as pipe:
            assert pipe.microbatches == 2
            assert pipe.step(x, weights=[1, 1]).tolist() == [23 * x[:2].sum(), 23 * x[2:].sum()]
        assert grads == ([(20 + 15) * 4, (20 + 15) * 2] if comm.rank == 0 else [])

    ranks(2, body)


def test_tied_gradients_become_their_sum(ranks):
    def body(comm: ts.Comm):
        pipe = ts.Pipeline(comm, [comm.rank], lambda call: None, lambda call: None, microbatches=2, schedule="gpipe")
        pipe.step()
        grad = np.full(3, comm.rank + 1.0)
        if comm.rank != 1:
            pipe.sum_tied(grad, [0, 2])
        with pytest.raises(TypeError, match="stages is 0; it must be a sequence of int, such as \\[0\\]"):
            pipe.sum_tied(grad, 0)  # type: ignore[arg-type]
        return float(grad[0])

    assert ranks(3, body) == [4, 2, 4]


def test_replicas_of_a_stage_are_averaged_in_its_last_backward(ranks):
    stages = 2
    expected, grads = alone_trained(stages)
    x, t = data(stages)

    def body(comm: ts.Comm):
        with ts.Mesh(comm, {"dp": 2, "pp": 2}) as mesh:
            train(mesh["pp"], mesh["dp"])

    def train(pp: ts.Comm, dp: ts.Comm):
        trainer = Trainer([pp.rank])
        layer = trainer.layers[pp.rank]
        ddp = ts.DDP(dp, {"w": layer.w})
        layer.dw = ddp.grads["w"]

        def backward(call: ts.StageCall):
            made = trainer.backward(call)
            if call.is_last_backward:
                ddp.ready_all()
            return made

        with ts.Pipeline(pp, [pp.rank], trainer.forward, backward, microbatches=2) as pipe:
            for _ in range(2):
                ddp.zero_grad()
                losses = pipe.step(x, t)
                ddp.wait()
                assert_allclose(losses @ [6 / ROWS, 5 / ROWS], expected)
                assert_allclose(layer.dw, grads[pp.rank], atol=1e-12)

    ranks(4, body)


def test_what_a_callback_raises_is_raised_here_and_fails_every_rank(ranks):
    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if call.stage == 1 and call.microbatch == 1:
                try:
                    raise OSError("no disk")
                except OSError as error:
                    raise KeyError("the tokens are wrong") from error
            return call.inputs[0] if call.stage == 0 else 0.0

        pipe = ts.Pipeline(comm, [comm.rank], forward, lambda call: None, microbatches=2)
        where = "stage 1, micro-batch 1, forward: the callback failed: KeyError: 'the tokens are wrong'"
        with pytest.raises((KeyError, ts.Aborted)) as caught:
            pipe.step(np.ones((2, 1)))
        if comm.rank == 1:
            assert caught.value.args == ("the tokens are wrong",)
            assert isinstance(caught.value.__cause__, OSError)
            told = caught.value.__cause__.__cause__
            assert isinstance(told, ts.UserError)
            assert where in str(told)
        else:
            assert where in str(caught.value)
        with pytest.raises(ts.Aborted, match="unusable after an earlier error") as later:
            pipe.eval(np.ones((2, 1)))
        assert where in str(later.value)
        comm.barrier()  # which is unharmed
        pipe.close()

    ranks(2, body)


def test_a_late_callback_is_named_on_every_rank(ranks):
    """The other ranks wait for nobody but the late one, which goes on when they have failed."""
    failed = [threading.Event() for _ in range(3)]

    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if call.stage == 1:
                assert all(failed[other].wait(patience(20)) for other in (0, 2))
            return call.inputs[0] if call.stage < 2 else None

        with ts.Pipeline(comm, [comm.rank], forward, nothing, microbatches=3) as pipe:
            if comm.rank != 1:
                comm.timeout = 0.3
            try:
                pipe.step(np.ones(3))
            finally:
                failed[comm.rank].set()

    failures = ranks.outcomes(3, body)
    where = (
        r"stage [02] waited for the (activation|gradient) of micro-batch 0 from stage 1 on rank 1, in vain for 0.3 s"
    )
    for failure in failures:
        with pytest.raises((ts.TesseraTimeout, ts.Aborted), match=where):
            raise failure
    late = [failure for failure in failures if isinstance(failure, ts.TesseraTimeout)]
    assert late
    assert {failure.peer for failure in late} == {1}
    assert failures[1] not in late


def test_a_shape_that_a_stage_does_not_expect_is_named_on_every_rank(ranks):
    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if call.stage == 1 and call.inputs[0].shape != (2, 3):
                raise ValueError(f"the input is {call.inputs[0].shape}, expected was (2, 3)")
            return call.inputs[0] if call.stage < 2 else None

        with ts.Pipeline(comm, [comm.rank], forward, nothing, microbatches=3) as pipe:
            pipe.step(np.ones((5, 3)))  # in parts of 2, 2 and 1 rows

    failures = ranks.outcomes(3, body)
    assert [type(failure) for failure in failures] == [ts.Aborted, ValueError, ts.Aborted]
    says = "micro-batch 2, forward: the callback failed: ValueError: the input is (1, 3), expected was (2, 3)"
    for failure in (failures[0], failures[1].__cause__, failures[2]):
        assert f"stage 1, {says}" in str(failure)


def test_an_interrupt_in_a_callback_is_raised_as_itself(alone):
    def forward(call: ts.StageCall):
        raise KeyboardInterrupt

    with ts.Pipeline(alone, [0], forward, forward, microbatches=1) as pipe:
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe.step()
        assert isinstance(caught.value.__cause__, ts.Interrupted)


def test_ctrl_c_ends_a_step_that_waits(program):
    text = """
        import threading
        import numpy as np
        import tessera as ts

        def other():
            with ts.Store(server.uri, token=token) as store:
                with ts.Comm.create(store, 1, 2, timeout=60) as comm:
                    pipe = ts.Pipeline(comm, [1], print, print, microbatches=2, schedule="gpipe")
                    try:
                        ended.wait()
                        pipe.step()
                    except ts.Aborted as error:
                        print("stage 0" in str(error) or str(error), flush=True)

        def forward(call):
            print("waiting", flush=True)  # when it returns, for a gradient
            return call.inputs[0]

        token, ended = "5a" * 32, threading.Event()
        with ts.StoreServer(token=token) as server, ts.Store(server.uri, token=token, timeout=60) as store:
            thread = threading.Thread(target=other)
            thread.start()
            with ts.Comm.create(store, 0, 2, timeout=60) as comm:
                pipe = ts.Pipeline(comm, [0], forward, lambda call: None, microbatches=2, schedule="gpipe")
                try:
                    pipe.step(np.ones(2))
                except KeyboardInterrupt:
                    print("KeyboardInterrupt", flush=True)
                ended.set()
            thread.join()
    """
    process = subprocess.Popen(program(text).command(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["waiting\n"] * 2
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=patience(20))[0] == "KeyboardInterrupt\nTrue\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


WRONG_RETURNS = {
    "a list": ("forward", lambda call: [1.0], TypeError, "stage 0, micro-batch 0, forward returned an output that"),
    "a loss too early": ("forward", lambda call: 1.0, ts.InvalidState, "loss was reported outside"),
    "complex": ("forward", lambda call: np.ones(2, ">f4"), ts.InvalidArgument, "opposite byte order"),
    "too large": ("forward", lambda call: np.ones(100), ts.InvalidArgument, "max_message_bytes is 64"),
    "a negative size": ("forward", lambda call: call.output(-1, "f32"), ts.InvalidArgument, "negative size"),
    "ten dimensions": ("forward", lambda call: call.output([1] * 10, "f32"), ts.InvalidArgument, "10 dimensions"),
    "no dtype": ("forward", lambda call: call.output(1, "f33"), ts.InvalidArgument, "dtype 'f33'|f33 is not supp"),
    "two gradients": ("backward", lambda call: (None, None), ts.InvalidArgument, "returned 2 gradients; .* 1 inputs"),
    "a transposed gradient": (
        "backward",
        lambda call: np.ones((1, 2)),
        ts.InvalidArgument,
        r"shape \(2, 1\) and dtype f",
    ),
    "another dtype": ("backward", lambda call: np.ones((2, 1), "f"), ts.InvalidArgument, "got .* dtype float32"),
    "an output": ("backward", lambda call: call.output(1, "f32"), ts.InvalidState, "outside of a forward"),
    "a number": ("backward", lambda call: 2.0, TypeError, "returned the gradient of input 0 that cannot be used"),
}


@pytest.mark.parametrize("work, returns, kind, match", WRONG_RETURNS.values(), ids=WRONG_RETURNS)
def test_what_cannot_be_returned(ranks, work, returns, kind, match):
    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            if work == "forward" and call.stage == 0:
                return returns(call)
            return np.ones((2, 1)) if call.stage == 0 else None

        def backward(call: ts.StageCall):
            return returns(call) if call.stage == 1 else None

        with ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=2, max_message_bytes=64) as pipe:
            pipe.step()

    failures = ranks.outcomes(2, body)
    own = 0 if work == "forward" else 1
    with pytest.raises(kind, match=match):
        raise failures[own]
    assert isinstance(failures[1 - own], ts.Aborted)


def test_the_cpu_has_no_streams(alone):
    def forward(_: ts.StageCall):
        with pytest.raises(ts.InvalidState, match="runs a callback"):
            pipe.set_stream()

    with ts.Pipeline(alone, [0], forward, forward, microbatches=1, on_device=False) as pipe:
        pipe.set_stream()
        with pytest.raises(ts.InvalidArgument, match="on the CPU, which has none"):
            pipe.set_stream(1)
        with pytest.raises(TypeError, match="must be a CUDA stream"):
            pipe.set_stream("first")
        pipe.step()
    with pytest.raises(ts.Unsupported, match="cpu:auto,cuda:nccl"):
        ts.Pipeline(alone, [0], forward, microbatches=1, on_device=True)


def test_weights_have_no_gradients_to_return(alone):
    nothing = lambda call: None  # noqa: E731
    pipe = ts.Pipeline(
        alone,
        [0],
        nothing,
        backward_input=nothing,
        backward_weight=lambda call: np.ones(1),
        microbatches=1,
        schedule="zb_h2",
    )
    with pytest.raises(TypeError, match=r"backward_weight returned a ndarray.*returns None"):
        pipe.step()


HELD = {
    "an input": (lambda call, kept: kept.append(call.inputs[0]), "eval", "1 of its arrays .* evaluation"),
    "a slice of an input": (lambda call, kept: kept.append(call.inputs[0][1:]), "step", "1 of its arrays .* backward"),
    "an output": (lambda call, kept: kept.append(call.output(2, "f32")), "step", "1 of its arrays .* backward"),
    "an input gradient": (
        lambda call, kept: kept.extend(call.input_grads),
        "step",
        "1 of its input gradients are still held after the call",
    ),
}


@pytest.mark.parametrize("hold, run, match", HELD.values(), ids=HELD)
def test_an_array_held_past_its_time_fails_the_step(ranks, hold, run, match):
    def body(comm: ts.Comm):
        kept: list = []

        def forward(call: ts.StageCall):
            if call.stage == 1:
                hold(call, kept)
                return None
            return np.ones((2, 1))

        def backward(call: ts.StageCall):
            if call.stage == 1:
                hold(call, kept) if not kept else None

        pipe = ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=2)
        try:
            getattr(pipe, run)()
        except ts.TesseraError as error:
            pipe.close()
            assert pipe.closed
            assert [array.sum() is not None for array in kept] == [True] * len(kept)  # memory that is still there
            return error
        return None

    failures = ranks.outcomes(2, body)
    with pytest.raises(ts.InvalidState, match=f"stage 1, micro-batch 0: {match}"):
        raise failures[1]
    assert isinstance(failures[0], ts.Aborted)


def test_arrays_may_be_kept_until_the_backward_and_those_of_the_batch_for_good(ranks):
    x = np.arange(8.0)
    x.flags.writeable = False  # as of a mapped file

    def body(comm: ts.Comm):
        kept: dict = {}
        rows: list = []

        def forward(call: ts.StageCall):
            kept[call.microbatch] = call.inputs[0]
            if call.stage == 0:
                rows.append(call.inputs[0])
                cycle: list = [call.inputs[0]]  # what only garbage refers to does not count
                cycle.append(cycle)
                return call.inputs[0]
            cycle = [call.inputs[0]]
            cycle.append(cycle)
            return call.inputs[0].sum()

        def backward(call: ts.StageCall):
            assert (kept.pop(call.microbatch) == x[2 * call.microbatch :][:2]).all()

        with ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=4) as pipe:
            pipe.step(x)
            pipe.step(x)
        assert [row.tolist() for row in rows] == ([[0, 1], [2, 3], [4, 5], [6, 7]] * 2 if comm.rank == 0 else [])
        assert not any(row.flags.writeable for row in rows)

    ranks(2, body)


WRONG_BATCHES = {
    "a number": (1.0, (), None, TypeError, "batch: a float is not a tensor"),
    "numbers": ([1.0, 2.0], (), None, TypeError, r"batch\[0\]: a float is not a tensor"),
    "columns": (np.ones((4, 4))[:, ::2], (), None, ts.InvalidArgument, "contiguous"),
    "few rows": (np.ones(1), (), None, ts.InvalidArgument, "rows"),
    "few targets": (np.ones(4), np.ones(1), None, ts.InvalidArgument, "targets"),
    "other rows": ([np.ones(4), np.ones(3)], (), None, ts.InvalidArgument, "rows"),
    "weights": (np.ones(4), (), [1, 2, 3], ts.InvalidArgument, "there are 3 weights for 2 micro-batches"),
    "no weights": (np.ones(4), (), [], ts.InvalidArgument, "there are 0 weights for 2 micro-batches"),
    "a table of weights": (np.ones(4), (), [[1, 2]], ts.InvalidArgument, r"weights has shape \(1, 2\)"),
    "words": (np.ones(4), (), ["heavy", "light"], ValueError, "heavy"),
}


@pytest.mark.parametrize("batch, targets, weights, kind, match", WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_a_batch_that_cannot_be_used_fails_on_every_rank(ranks, batch, targets, weights, kind, match):
    def body(comm: ts.Comm):
        def forward(call: ts.StageCall):
            return np.ones(1) if call.stage == 0 else None

        with ts.Pipeline(comm, [comm.rank], forward, lambda call: None, microbatches=2, schedule="gpipe") as pipe:
            pipe.step(batch, targets, weights)

    failures = ranks.outcomes(2, body)
    own = 1 if len(targets) or weights is not None else 0
    with pytest.raises(kind, match=match):
        raise failures[own]
    assert isinstance(failures[1 - own], ts.Aborted)


def nothing(call: ts.StageCall):
    return None


WRONG_PIPELINES = {
    "a missing stage": (
        lambda c: ts.Pipeline(c, [7 * c.rank], nothing, nothing, microbatches=2),
        "stage 1 is missing; it belongs to rank 1; stage 7 of rank 1 does not exist",
    ),
    "a doubled stage": (
        lambda c: ts.Pipeline(c, [0], nothing, nothing, microbatches=2),
        "stage 1 is missing; it belongs to rank 1; stage 0 is on rank 0 and on rank 1",
    ),
    "no stage": (lambda c: ts.Pipeline(c, [], nothing, nothing, microbatches=2), "this rank has no stage"),
    "the wrong rank": (
        lambda c: ts.Pipeline(c, [1 - c.rank], nothing, nothing, microbatches=2),
        "stage 0 is on rank 1; it belongs to rank 0; stage 1 is on rank 0; it belongs to rank 1",
    ),
    "no micro-batches": (lambda c: ts.Pipeline(c, [c.rank], nothing, nothing), "microbatches is 0"),
    "few": (
        lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, microbatches=1),
        "cannot run 1 micro-batches on 2 ranks; the next number that works is 2",
    ),
    "no backward": (lambda c: ts.Pipeline(c, [c.rank], nothing, microbatches=2), "1f1b needs the callback backward"),
    "no split": (
        lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, microbatches=2, schedule="zb_h2"),
        "needs the callback backward_input",
    ),
    "an edge back": (
        lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, microbatches=2, edges=[(1, 0, 0)]),
        "edge",
    ),
    "a pair": (
        lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, microbatches=2, edges=[(0, 1)]),
        r"the edge \(0, 1\) must be \(from_stage, output, to_stage\)",
    ),
    "a schedule": (
        lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, microbatches=2, schedule="2f2b"),
        "schedule is '2f2b'; it must be one of 'gpipe', '1f1b'",
    ),
    "a csv": (lambda c: ts.Pipeline(c, [c.rank], nothing, nothing, schedule_csv="0X0\n1F0"), "unknown action"),
}


@pytest.mark.parametrize("make, match", WRONG_PIPELINES.values(), ids=WRONG_PIPELINES)
def test_a_pipeline_that_cannot_work_is_refused_on_every_rank(ranks, make, match):
    for failure in ranks.outcomes(2, make):
        with pytest.raises(ts.InvalidArgument, match=match):
            raise failure


def test_a_csv_that_is_too_large_is_refused(alone):
    with pytest.raises(ts.InvalidArgument, match="a schedule of 268435457 bytes; at most 268435456 are allowed"):
        ts.Pipeline(alone, [0], nothing, nothing, schedule_csv="," * ((256 << 20) + 1))


def test_ranks_must_agree(ranks):
    for failure in ranks.outcomes(
        2, lambda comm: ts.Pipeline(comm, [comm.rank], nothing, nothing, microbatches=2 + comm.rank)
    ):
        with pytest.raises(ts.Mismatch, match="micro-batches"):
            raise failure


def test_arguments_of_the_wrong_type(alone):
    for make, match in (
        (lambda: ts.Pipeline([0], alone, nothing), "comm is a list; .* swapped"),  # type: ignore[arg-type]
        (lambda: ts.Pipeline(alone, 0, nothing), "stages is 0; it must be a sequence of int"),  # type: ignore[arg-type]
        (lambda: ts.Pipeline(alone, [0.5], nothing), "a stage is 0.5"),  # type: ignore[list-item]
        (lambda: ts.Pipeline(alone, [0], None), "forward is None; it must be a function"),  # type: ignore[arg-type]
        (lambda: ts.Pipeline(alone, [0], nothing, 3), "backward is 3; it must be a function"),  # type: ignore[arg-type]
        (lambda: ts.Pipeline(alone, [0], nothing, micro=2), "no option 'micro'"),  # type: ignore[call-arg]
        (ts.StageCall, "a Pipeline makes the StageCall"),
    ):
        with pytest.raises(TypeError, match=match):
            make()
    assert list(inspect.signature(ts.Pipeline).parameters)[:4] == ["comm", "stages", "forward", "backward"]


def test_a_callback_may_not_use_its_pipeline(alone):
    refused: list[str] = []

    def forward(call: ts.StageCall):
        for use in (pipe.step, pipe.eval, pipe.stats, pipe.close, lambda: pipe.sum_tied(np.ones(1), [0])):
            with pytest.raises(ts.InvalidState, match="the pipeline runs a callback") as caught:
                use()
            refused.append(str(caught.value))
        return 1.0

    pipe = ts.Pipeline(alone, [0], forward, nothing, microbatches=1)
    assert pipe.step().tolist() == [1]
    assert len(refused) == 5
    for use in (
        lambda: ts._core.pipeline_output(pipe._handle, 3, (1,)),
        lambda: ts._core.pipeline_loss(pipe._handle, 1),
    ):
        with pytest.raises(ts.InvalidState, match="runs no callback"):
            use()
    pipe.close()
    pipe.close()
    assert repr(pipe) == "<tessera.Pipeline with stages 0 here (closed)>"
    for use in (pipe.step, pipe.eval, pipe.stats, lambda: pipe.sum_tied(np.ones(1), [0])):
        with pytest.raises(ts.InvalidState, match="closed"):
            use()


def test_a_pipeline_goes_with_its_last_reference_and_with_its_communicator():
    class Net:
        def __init__(self, comm: ts.Comm):
            self.pipe = ts.Pipeline(comm, [0], self.forward, nothing, microbatches=1)

        def forward(self, call: ts.StageCall):
            return 1.0

    with ts.init() as comm:
        pipe = ts.Pipeline(comm, [0], nothing, nothing, microbatches=1)
        gone = weakref.ref(pipe._handle)
        pipe.step()
        del pipe
        assert gone() is None
        net = Net(comm)  # in a cycle: its callbacks hold it
        net.pipe.step()
        gone = weakref.ref(net.pipe._handle)
        del net
        gc.collect()
        assert gone() is None
        last = ts.Pipeline(comm, [0], nothing, nothing, microbatches=1)
    assert last.closed


def test_states_and_optimizers_of_ranks_with_different_parameters_are_joined(ranks, alone, tmp_path):
    def job(comm: ts.Comm):
        name = ("first", "second")[comm.rank]
        weight = np.full(2, comm.rank + 1.0)
        with ts.Mesh(comm, {"pp": 2, "dp": 1}) as mesh, ts.Saver(comm, tmp_path) as saver:
            ddp = ts.DDP(mesh["dp"], {name: weight})
            ddp.grads[name][...] = 3 + comm.rank
            optimizer = ts.SGD(ddp)
            assert optimizer.clip_grad_norm(100) == pytest.approx(np.sqrt(2) * (3 + comm.rank))
            optimizer.join(comm)
            assert optimizer.clip_grad_norm(100) == pytest.approx(np.sqrt(50))
            with pytest.raises(ts.InvalidState, match="joined already"):
                optimizer.join(comm)
            state = ts.State(model=ddp, epoch=1)
            with pytest.raises(ts.Mismatch, match=r"model\.second"):
                saver.save(1, state)
            assert state.join(comm) is state
            saver.save(1, state)
            state["more"] = np.ones(2)  # joined again by the next save
            saver.save(2, state)
            weight[...] = 0
            assert saver.resume(state) == 2
            np.testing.assert_array_equal(weight, comm.rank + 1.0)
            assert sorted(name for name, _ in state.gather(comm)) == ["model.first", "model.second", "more"]
            with pytest.raises(ts.Mismatch, match=r"tensor 'x' is f64 \[1\] on rank 0, but f64 \[2\] on rank 1"):
                ts.State(x=np.zeros(1 + comm.rank)).join(comm)

    ranks(2, job)
    whole = ts.State(model={"first": np.zeros(2), "second": np.zeros(2)}, more=np.zeros(2), epoch=0)
    with ts.Saver(alone, tmp_path) as saver:
        assert saver.resume(whole) == 2
    np.testing.assert_array_equal(whole["model"]["second"], [2, 2])


def test_the_pages_example_runs(program):
    example, *_ = re.findall(  # the others are PyTorch's: tests/interop/test_torch_pages.py
        r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs/PIPELINE.md").read_text(), re.DOTALL
    )
    run = program(example).launch(2)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


def test_elements_are_copied_between_tensors_of_one_kind_only():
    source, target = np.arange(3), np.zeros(3, int)
    ts._core.copy_elements(ts._core.Tensor(source), ts._core.Tensor(target))
    assert target.tolist() == [0, 1, 2]
    with pytest.raises(ts.InvalidArgument, match="cannot be copied"):
        ts._core.copy_elements(ts._core.Tensor(source), ts._core.Tensor(np.zeros(4, int)))
