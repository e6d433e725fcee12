"""Learning-rate schedules: their values, the optimizers that they set, checkpoints, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from tessera import LRSchedule


def many() -> LRSchedule:
    return LRSchedule.chained([LRSchedule.exponential(1)] * 1000)


def sgd(lr: float, momentum: float = 0.0) -> ts.SGD:
    return ts.SGD({"w": np.ones(2)}, {"w": np.ones(2)}, lr=lr, momentum=momentum)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        (LRSchedule.constant(0.5, 4), 3, 0.5),
        (LRSchedule.linear(0.0, 1.0, total_steps=4), 1, 0.25),
        (LRSchedule.step_decay(2, gamma=0.5), 5, 0.25),
        (LRSchedule.multi_step_decay(range(2, 6, 2), 0.5), 4, 0.25),
        (LRSchedule.exponential(0.5), 3, 0.125),
        (LRSchedule.polynomial(4, power=2), 2, 0.25),
        (LRSchedule.cosine(4, min_lr=0.5), 2, 0.75),
        (LRSchedule.cosine_restarts(2, 2, 0.5), 4, 0.75),
        (LRSchedule.inverse_sqrt(4), 15, 0.5),
        (LRSchedule.wsd(2, 2, 4, "linear", 0.5), 6, 0.75),
        (LRSchedule.wsd(2, 2, 4, "cosine", 0.5), 6, 0.75),
        (LRSchedule.wsd(2, 2, 4, "sqrt", 0.5), 5, 0.75),
        (LRSchedule.warmup(warmup_type="linear", warmup_num_steps=4), 2, 0.25),
        (LRSchedule.warmup_cosine(total_num_steps=8, warmup_num_steps=4, cos_min_ratio=0.5), 6, 0.75),
        (LRSchedule.one_cycle(cycle_min_lr=0.25, cycle_max_lr=0.75, cycle_first_step_size=2), 1, 0.5),
        (LRSchedule.range_test(0.5, 4, 2.0, staircase=True), 7, 1.5),
        (LRSchedule.chained([LRSchedule.constant(0.5, 9), LRSchedule.exponential(0.5)]), 2, 0.125),
    ],
)
def test_every_kind_has_its_values(schedule: LRSchedule, step: int, rate: float):
    assert schedule.lr_at(step, base_lr=1.0) == pytest.approx(rate, rel=1e-12)


def test_parts_of_a_sequence_may_be_closed():
    with LRSchedule.linear(0.0, 1.0, 4) as warmup:
        schedule = LRSchedule.sequential(iter([warmup, LRSchedule.exponential(0.5)]), (4,))
    assert [schedule.lr_at(np.int64(step), 1.0) for step in (0, 2, 4, 6)] == [0.0, 0.5, 1.0, 0.25]


def test_an_optimizer_is_set():
    optimizer, schedule = sgd(0.5), LRSchedule.exponential(0.5)
    schedule.attach(optimizer)
    assert optimizer.lr == 0.5
    schedule.step()
    assert (optimizer.lr, schedule.steps) == (0.25, 1)
    schedule.steps = 3
    assert (optimizer.lr, schedule.steps) == (0.0625, 3)
    optimizer.close()
    del optimizer
    schedule.step()
    assert schedule.steps == 4


def test_momentum_is_set_where_there_is_one():
    schedule = LRSchedule.one_cycle(cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=4)
    assert schedule.momentum_at(4) == pytest.approx(0.8)
    assert LRSchedule.exponential(0.5).momentum_at(4) is None
    schedule.attach(sgd(0.5, momentum=0.9))
    with pytest.raises(ts.InvalidArgument, match="has no momentum"):
        schedule.attach(sgd(0.5))


def test_is_saved_and_loaded_with_a_state(tmp_path: Path):
    def parts(lr: float, total: int) -> tuple[ts.SGD, LRSchedule, ts.State]:
        optimizer, schedule = sgd(lr), LRSchedule.cosine(total, 0.01)
        schedule.attach(optimizer)
        return optimizer, schedule, ts.State(optim=optimizer, schedule=schedule)

    with ts.init() as comm, ts.Saver(comm, tmp_path) as saver:
        optimizer, schedule, state = parts(0.4, 20)
        for _ in range(3):
            schedule.step()
        saver.save(3, state)
        resumed, other, loaded = parts(0.1, 20)
        assert saver.resume(loaded) == 3
        for _ in range(20):
            assert (resumed.lr, other.steps) == (optimizer.lr, schedule.steps)
            schedule.step()
            other.step()
        _, longer, refused = parts(0.1, 21)
        with pytest.raises(ts.Mismatch, match=r"schedule cosine\(total_steps=20, min_lr=0.01\), but this one is"):
            saver.resume(refused)
        assert longer.steps == 0
        unattached = LRSchedule.cosine(20, 0.01)
        with pytest.raises(ts.Mismatch, match="attach the same optimizers before the load"):
            saver.resume(ts.State(optim=sgd(0.1), schedule=unattached))


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[3] / "docs" / "SCHEDULES.md").read_text()
    names: dict[str, object] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    schedule, optimizer = names["schedule"], names["opt"]
    assert isinstance(schedule, LRSchedule) and isinstance(optimizer, ts.SGD)
    assert (schedule.steps, optimizer.steps) == (1000, 1000)
    assert optimizer.lr == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: LRSchedule.constant(-1, 1), ts.InvalidArgument, "factor is -1"),
        (lambda: LRSchedule.linear(0, math.nan, 1), ts.InvalidArgument, "end_factor is nan"),
        (lambda: LRSchedule.linear(0, 1, 0), ts.InvalidArgument, "total_steps is 0"),
        (lambda: LRSchedule.step_decay(1.5, 1), TypeError, "step_size"),
        (lambda: LRSchedule.exponential("0.5"), TypeError, "gamma"),
        (lambda: LRSchedule.cosine(2**64, 0), ts.InvalidArgument, "total_steps"),
        (lambda: LRSchedule.multi_step_decay([], 0.5), ts.InvalidArgument, "the number of milestones is 0"),
        (lambda: LRSchedule.multi_step_decay([3, 2], 0.5), ts.InvalidArgument, "milestone 1 is 2"),
        (lambda: LRSchedule.multi_step_decay([2**63], 0.5), ts.InvalidArgument, "a milestone"),
        (lambda: LRSchedule.multi_step_decay(["3"], 0.5), TypeError, "a milestone is '3'"),
        (lambda: LRSchedule.wsd(1, 1, 1, "log", 0), ts.InvalidArgument, "decay is 'log'; it must be one of 'linear'"),
        (lambda: LRSchedule.wsd(2**63 - 1, 1, 1, "sqrt", 0), ts.InvalidArgument, "have no sum"),
        (lambda: LRSchedule.warmup(warmup_type="exp"), ts.InvalidArgument, "warmup_type is 'exp'"),
        (lambda: LRSchedule.warmup(warmup_steps=3), TypeError, "there is no option 'warmup_steps'"),
        (lambda: LRSchedule.warmup(total_num_steps=9), ts.InvalidArgument, "total_num_steps is 9; it must be at least"),
        (LRSchedule.warmup_cosine, ts.InvalidArgument, "total_num_steps is not given"),
        (LRSchedule.one_cycle, ts.InvalidArgument, "cycle_max_lr is not given"),
        (lambda: LRSchedule.range_test(1, 0, 1, False), ts.InvalidArgument, "step_size is 0"),
        (lambda: LRSchedule.sequential([], []), ts.InvalidArgument, "the number of schedules is 0"),
        (lambda: LRSchedule.sequential([LRSchedule.exponential(1)], [5]), ts.InvalidArgument, "do not separate"),
        (lambda: LRSchedule.chained([sgd(0.1)]), TypeError, "schedule 0 is a SGD"),
        (lambda: LRSchedule.chained([many()]), ts.InvalidArgument, "more than 1000"),
        (lambda: LRSchedule(), TypeError, "use LRSchedule.cosine"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        make()


def test_bad_uses_are_refused():
    schedule, optimizer = LRSchedule.exponential(10), sgd(0.5)
    for call, error, said in (
        (lambda: schedule.lr_at(-1, 1), ts.InvalidArgument, "the step is -1"),
        (lambda: schedule.lr_at(1, math.inf), ts.InvalidArgument, "base_lr is inf"),
        (lambda: schedule.lr_at(400, 1), ts.InvalidArgument, "would be inf at step 400"),
        (lambda: schedule.momentum_at(-1), ts.InvalidArgument, "the step is -1"),
        (lambda: schedule.attach(0.5), TypeError, "optimizer is a float"),
        (lambda: setattr(schedule, "steps", -1), ts.InvalidArgument, "the step is -1"),
    ):
        with pytest.raises(error, match=said):
            call()
    schedule.attach(optimizer)
    with pytest.raises(ts.InvalidState, match="attached already"):
        schedule.attach(optimizer)
    schedule.close()
    for call in (schedule.step, lambda: schedule.lr_at(0, 1), lambda: LRSchedule.chained([schedule])):
        with pytest.raises(ts.InvalidState, match="closed"):
            call()
