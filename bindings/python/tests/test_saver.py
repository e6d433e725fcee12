"""What a saver keeps, does while it is busy, tells of its progress, and when the ranks stop together."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from patience import patience

SECONDS = patience(60.0)


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in root.glob("step-*") if (path / "manifest.json").exists())


class Gate:
    """A progress callback that holds the first save in the background until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, phase: ts.Phase, done: int, total: int) -> None:
        if phase is ts.Phase.WRITE and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(SECONDS)


def test_what_stays_is_the_union_of_the_newest_the_best_and_every_nth(tmp_path: Path):
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.9, 5: 0.8, 6: 0.7}
    with ts.Saver(None, tmp_path, keep_latest=1, keep_best=1, best_metric="loss", keep_every=4) as saver:
        state = ts.State(weight=np.zeros(3))
        for step, loss in losses.items():
            saver.save(step, state, metrics={"loss": loss})
    assert steps(tmp_path) == [2, 4, 6]
    with ts.Checkpoint(tmp_path / "best") as best:
        assert (best.step, best.metrics) == (2, {"loss": 0.1})


def test_a_metric_is_of_its_save_alone(tmp_path: Path):
    with ts.Saver(None, tmp_path, keep_latest=1, best_metric="loss") as saver:
        state = ts.State(weight=np.zeros(3))
        saver.save(1, state, metrics={"loss": 0.5})
        saver.save_async(2, state).wait()
        saver.save(3, state, metrics={"accuracy": 0.9})
    assert steps(tmp_path) == [1, 3]
    assert ts.Checkpoint(tmp_path / "best").step == 1
    assert ts.Checkpoint(tmp_path / "latest").metrics == {"accuracy": 0.9}


def test_higher_may_be_better(tmp_path: Path):
    with ts.Saver(None, tmp_path, best_metric="accuracy", best_is_higher=True) as saver:
        for step, accuracy in enumerate([0.3, 0.9, 0.5], 1):
            saver.save(step, ts.State(step=step), metrics={"accuracy": accuracy})
    assert ts.Checkpoint(tmp_path / "best").step == 2


def test_what_is_open_stays(tmp_path: Path):
    with ts.Saver(None, tmp_path, keep_latest=1) as saver:
        state = ts.State(weight=np.full(3, 7.0))
        saver.save(1, state)
        with ts.Checkpoint(tmp_path) as first:
            saver.save(2, state)
            assert steps(tmp_path) == [1, 2]
            assert first["weight"].tolist() == [7, 7, 7]
        saver.save(3, state)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"keep_best": 2}, "best_metric"),
        ({"keep_every": 5}, "keep_latest"),
        ({"keep_every": -5, "keep_latest": 1}, "-5"),
        ({"staging_bytes": 1}, "staging_bytes is 1"),
        ({"write_bytes_per_s": -3}, "write_bytes_per_s is -3"),
        ({"when_busy": "never"}, "'never'"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, options, word):
    with pytest.raises(ts.InvalidArgument, match=word):
        ts.Saver(None, tmp_path, **options)


def test_what_cannot_be_called_is_no_callback(tmp_path: Path):
    with pytest.raises(TypeError, match="callable"):
        ts.Saver(None, tmp_path, progress=7)


def test_a_busy_saver_can_refuse(tmp_path: Path):
    gate = Gate()
    with ts.Saver(None, tmp_path, when_busy="refuse", progress=gate) as saver:
        work = saver.save_async(1, ts.State(step=1))
        assert gate.reached.wait(SECONDS)
        with pytest.raises(ts.NotReady, match="in flight"):
            saver.save_async(2, ts.State(step=2))
        gate.opened.set()
        work.wait()
        saver.save_async(3, ts.State(step=3)).wait()
    assert steps(tmp_path) == [1, 3]


def test_a_newer_save_can_replace_the_one_that_waits(tmp_path: Path):
    gate = Gate()
    with ts.Saver(None, tmp_path, when_busy="replace", progress=gate) as saver:
        works = [saver.save_async(1, ts.State(step=1))]
        assert gate.reached.wait(SECONDS)
        works += [saver.save_async(step, ts.State(step=step)) for step in (2, 3)]
        with pytest.raises(ts.Aborted, match="step 2 was replaced"):
            works[1].wait()
        gate.opened.set()
        works[0].wait()
        works[2].wait()
    assert steps(tmp_path) == [1, 3]


def test_a_state_larger_than_the_staging_memory_goes_through_it_as_a_ring(tmp_path: Path):
    weight = np.random.default_rng(3).standard_normal(6 << 20).astype(np.float32)  # 24 MiB
    with ts.Saver(None, tmp_path, staging_bytes=8 << 20, write_bytes_per_s=1 << 30, low_priority=True) as saver:
        for step in (1, 2):
            expected = weight.copy()
            work = saver.save_async(step, ts.State(weight=weight))
            weight += 1  # the copy is made
            work.wait()
            saver.trim()
            assert (ts.Checkpoint(tmp_path)["weight"] == expected).all()


@pytest.mark.parametrize("low", [False, True])
def test_low_priority_is_that_of_the_threads_that_write(tmp_path: Path, low: bool):
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    told = set()

    def tell(phase: ts.Phase, done: int, total: int) -> None:
        if phase is ts.Phase.WRITE:
            told.add(niceness())

    with ts.Saver(None, tmp_path, low_priority=low, progress=tell) as saver:
        saver.save_async(1, ts.State(weight=np.zeros(1000))).wait()
    assert told == {max(niceness(), 10) if low else niceness()}


def test_what_an_optimizer_owns_is_copied_before_it_is_closed(tmp_path: Path):
    weight = np.ones(3 << 20, np.float32)
    opt = ts.AdamW({"weight": weight}, {"weight": np.zeros_like(weight)})
    state = ts.State(weight=weight, optim=opt)
    gate = Gate()
    with ts.Saver(None, tmp_path, when_busy="replace", copy_on_demand=True, progress=gate) as saver:
        saver.save_async(1, state)
        assert gate.reached.wait(SECONDS)
        saver.save_async(2, state)  # waits for the first one, so that nothing of it is copied in the background
        opt.close()  # the state holds it on; the memory is ours
        weight[:] = -1
        opt.close()
        gate.opened.set()
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 2
        assert (checkpoint["weight"] == 1).all()


def test_what_an_optimizer_owns_is_copied_before_its_next_step_changes_it(tmp_path: Path):
    weight = np.ones(3 << 20, np.float32)
    gradient = np.full(3 << 20, 0.5, np.float32)
    opt = ts.AdamW({"weight": weight}, {"weight": gradient})
    state = ts.State(weight=weight, optim=opt)
    gate = Gate()
    with ts.Saver(None, tmp_path, when_busy="replace", copy_on_demand=True, progress=gate) as saver:
        saver.save_async(1, state)
        assert gate.reached.wait(SECONDS)
        opt.step()
        expected = weight.copy()
        saver.save_async(2, state)  # waits for the first one, so that nothing of it is copied in the background
        opt.step()
        assert not (weight == expected).any()
        gate.opened.set()
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 2
        assert (checkpoint["weight"] == expected).all()
        assert checkpoint["optim.state.weight.step"] == 1


def test_what_is_written_after_the_first_fence_is_not_saved(tmp_path: Path):
    weight = np.ones(3 << 20, np.float32)
    opt = ts.AdamW({"weight": weight}, {"weight": np.zeros_like(weight)})
    state = ts.State(weight=weight, optim=opt)
    gate = Gate()  # holds the save before its first byte
    order: list[str] = []
    with ts.Saver(None, tmp_path, copy_on_demand=True, progress=gate) as saver:
        save = saver.save_async(1, state)
        save.add_done_callback(lambda _work: order.append("durable"))
        save.staged.add_done_callback(lambda _work: order.append("staged"))
        save.staged.wait(SECONDS)
        assert not save.done()
        weight[:] = -1
        gate.opened.set()
        save.wait(SECONDS)
        assert save.staged.error() is None
    assert order == ["staged", "durable"]
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert (checkpoint["weight"] == 1).all()


def test_without_the_option_the_first_fence_is_done_when_the_call_returns(tmp_path: Path):
    with ts.Saver(None, tmp_path) as saver:
        assert saver.save_async(1, ts.State(weight=np.ones(3))).staged.done()


def test_progress_is_told_from_nothing_to_all_in_each_phase(tmp_path: Path):
    told: list[tuple[ts.Phase, int, int]] = []

    def progress(*facts) -> None:
        told.append(facts)

    def phases() -> list[ts.Phase]:
        """Those told since the last call, each from its begin to its end."""
        found = list(dict.fromkeys(phase for phase, _, _ in told))
        for phase in found:
            counts = [(done, total) for at, done, total in told if at is phase]
            assert counts[0] == (0, counts[0][1])
            assert counts == sorted(counts)
            assert counts[-1][0] == counts[-1][1]
            assert (counts[-1][1] == 0) is (phase is ts.Phase.COMMIT)
        told.clear()
        return found

    weight = np.ones(100_000)
    with ts.Saver(None, tmp_path, progress=progress) as saver:
        saver.save(1, ts.State(weight=weight))
        assert phases() == [ts.Phase.WRITE, ts.Phase.COMMIT]
        saver.save_async(2, ts.State(weight=weight)).wait()
        assert phases() == [ts.Phase.STAGE, ts.Phase.WRITE, ts.Phase.COMMIT]
        assert saver.resume(ts.State(weight=weight)) == 2
        assert phases() == [ts.Phase.READ]
    with ts.Checkpoint(tmp_path) as checkpoint:
        checkpoint.load(ts.State(weight=weight), progress=progress)
        assert phases() == [ts.Phase.READ]
        checkpoint.verify(progress=progress)
        assert phases() == [ts.Phase.VERIFY]


class Mine(Exception):
    """What nobody but the test raises."""


@pytest.mark.parametrize("phase", ts.Phase)
def test_what_a_callback_raises_comes_back_and_the_call_has_done_its_work(tmp_path: Path, phase: ts.Phase):
    raised: list[Mine] = []

    def progress(at: ts.Phase, done: int, total: int) -> None:
        if at is phase and not raised:
            raised.append(Mine())
            raise raised[0]

    weight = np.arange(10.0)
    state = ts.State(weight=weight, note="saved")
    with pytest.raises(Mine) as caught:
        with ts.Saver(None, tmp_path, progress=progress) as saver:
            saver.save_async(1, state)
        weight[:] = 0
        state["note"] = "overwritten"
        with ts.Checkpoint(tmp_path) as checkpoint:
            checkpoint.load(state, progress=progress)
            checkpoint.verify(progress=progress)
    assert [caught.value] == raised
    assert steps(tmp_path) == [1]
    assert weight.tolist() == list(range(10))
    assert state["note"] == "saved"


def test_what_a_callback_raises_is_told_once(tmp_path: Path):
    def progress(phase: ts.Phase, done: int, total: int) -> None:
        raise Mine(phase)

    weight = np.arange(10.0)
    with ts.Saver(None, tmp_path, progress=progress) as saver:
        with pytest.raises(Mine, match=str(ts.Phase.WRITE)):
            saver.save(1, ts.State(weight=weight))
        saver.wait()
        weight[:] = 0
        with pytest.raises(Mine, match=str(ts.Phase.READ)):
            saver.resume(ts.State(weight=weight))
        assert weight.tolist() == list(range(10))


def test_what_the_library_says_comes_before_what_a_callback_raises(tmp_path: Path):
    with ts.Saver(None, tmp_path) as saver:
        saver.save(1, ts.State(weight=np.arange(1000.0)))
    (file,) = tmp_path.glob("step-*/rank-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)

    def progress(phase: ts.Phase, done: int, total: int) -> None:
        raise Mine

    with ts.Checkpoint(tmp_path) as checkpoint, pytest.raises(ts.Corrupt, match=file.name):
        checkpoint.verify(progress=progress)


def test_ctrl_c_during_a_callback_is_keyboard_interrupt(tmp_path: Path):
    begun = threading.Event()

    def progress(phase: ts.Phase, done: int, total: int) -> None:
        if not begun.is_set():
            begun.set()
            signal.raise_signal(signal.SIGINT)

    with ts.Saver(None, tmp_path, progress=progress) as saver:
        with pytest.raises(KeyboardInterrupt):
            saver.save(1, ts.State(weight=np.ones(1000)))
        saver.save(2, ts.State(weight=np.ones(1000)))
        assert ts.Checkpoint(tmp_path).step == 2


def test_ranks_that_hold_others_are_told_where_it_is_asked_for(ranks, tmp_path: Path):
    def body(comm: ts.Comm) -> None:
        with ts.Saver(comm, tmp_path, check_replicas=True) as saver:
            w = np.full((3, 2), comm.rank, np.float32)
            state = ts.State(w=w, epoch=1, rng=ts.PerRank(comm, comm.rank))
            for save in (saver.save, saver.save_async):
                with pytest.raises(ts.Mismatch, match=r"tensor 'w' differs.*rank 1 differs from rank 0"):
                    save(1, state)
            w[:] = np.nan
            saver.save(1, state)
            state["epoch"] = comm.rank
            with pytest.raises(ts.Mismatch, match=r"value 'epoch' differs.*PerRank"):
                saver.save(2, state)

    ranks(2, body)
    assert steps(tmp_path) == [1]
    with ts.Saver(None, tmp_path, check_replicas=True) as saver:
        saver.save(2, ts.State(w=np.zeros(3)))


def test_all_ranks_stop_at_the_same_step_when_one_is_told(ranks, tmp_path: Path):
    def body(comm: ts.Comm) -> list[bool]:
        with ts.Saver(comm, tmp_path) as saver:
            return [saver.should_stop(step, told=step == 3 and comm.rank == 1) for step in range(1, 6)]

    assert ranks(3, body) == [[False, False, True, True, True]] * 3


def test_ranks_that_ask_at_different_steps_are_told_so(ranks, tmp_path: Path):
    def body(comm: ts.Comm) -> None:
        with ts.Saver(comm, tmp_path) as saver:
            saver.should_stop(5 + comm.rank)

    for outcome in ranks.outcomes(2, body):
        assert isinstance(outcome, ts.Mismatch)
        assert "5 to 6" in str(outcome)


def test_the_manifest_lists_a_layout_once_however_tensors_take_turns(tmp_path: Path):
    rows, columns = (ts.Layout((2, 2), [1], [ts.Shard(dim)]) for dim in (0, 1))
    array = np.zeros((2, 2), np.float32)
    turns = {"a": rows, "b": columns, "c": rows, "d": columns}
    state = ts.State(**{name: ts.Sharded(layout, [array], 0) for name, layout in turns.items()})
    with ts.Saver(None, tmp_path) as saver:
        saver.save(0, state)
    with ts.Checkpoint(tmp_path) as checkpoint:
        manifest = checkpoint.manifest
    assert [layout["placements"] for layout in manifest["layouts"]] == [["S(0)"], ["S(1)"]]
    assert [manifest["tensors"][name]["layout"] for name in turns] == [0, 1, 0, 1]


def test_a_program_that_restarts_itself_by_exec_keeps_its_root(program, tmp_path: Path):
    restarts = program(
        """
        import os, sys
        import numpy as np
        import tessera as ts

        state = ts.State(w=np.ones(4, np.float32))
        saver = ts.Saver(None, sys.argv[1])
        step = saver.resume(state)
        saver.save(step + 1, state)
        if step < 2:
            os.execv(sys.executable, [sys.executable, *sys.argv])  # neither the pid nor its start time change
        saver.close()
        """
    )
    ended = restarts.run(str(tmp_path / "root"))
    assert ended.returncode == 0, ended.stderr
    assert steps(tmp_path / "root") == [1, 2, 3]
