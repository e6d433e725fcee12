"""Arguments of a creation that one rank refuses: the others get its rank and the reason, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera as ts

Make = Callable[[ts.Comm, Any], object]


def params(value: Any) -> dict[str, Any]:
    return {"w": np.zeros(4, np.float32) if value is None else value}


def stage(call: Any) -> Any:
    return call.inputs[0]


def pipeline(comm: ts.Comm, stages: list[Any], edges: Any = ()) -> ts.Pipeline:
    return ts.Pipeline(comm, stages, stage, stage, microbatches=3, edges=edges)


def config() -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}


def test_what_one_rank_refuses_is_refused_on_all(ranks, tmp_path: Path):
    """Of each case rank 1 has the last argument, the others None."""
    cases: list[tuple[str, Make, Any]] = [
        ("is not a tensor", lambda comm, bad: ts.DDP(comm, params(bad)), "no array"),
        ("there is no option", lambda comm, bad: ts.DDP(comm, params(None), **(bad or {})), {"bucket": 1}),
        ("must be str", lambda comm, bad: ts.DDP(comm, {bad or "w": np.zeros(4, np.float32)}), 3),
        ("units is a int", lambda comm, bad: ts.FSDP(comm, bad or {"u": params(None)}), 5),
        (
            "there is no such parameter",
            lambda comm, bad: ts.FSDP(comm, {"u": params(None)}, frozen=bad or []),
            ["bias"],
        ),
        ("is not a tensor", lambda comm, bad: ts.Engine(comm, {"u": params(bad)}, config()), "no array"),
        ("sizes is a list", lambda comm, bad: ts.Mesh(comm, bad or {"dp": 3}), [3]),
        ("the size of a dimension", lambda comm, bad: ts.Mesh(comm, {"dp": bad or 3}), "three"),
        ("(0, 1) must be", lambda comm, bad: pipeline(comm, [comm.rank], bad or []), [(0, 1)]),
        ("a stage", lambda comm, bad: pipeline(comm, [bad or comm.rank]), "first"),
        ("when_busy is 'never'", lambda comm, bad: ts.Saver(comm, tmp_path, when_busy=bad), "never"),
        ("keep_latest", lambda comm, bad: ts.Saver(comm, tmp_path, keep_latest=bad), "all"),
        ("color", lambda comm, bad: comm.split(bad or 0), "red"),
        ("the timeout is", lambda comm, bad: comm.split(0, timeout=bad), "long"),
    ]

    def body(comm: ts.Comm):
        mesh = ts.Mesh(comm, {"tp": 3})
        over_mesh: list[tuple[str, Make, Any]] = [
            ("plan is a list", lambda _, bad: ts.TensorParallel(mesh, params(None), bad or {"w": "column"}), ["w"]),
            (
                "is not a tensor",
                lambda _, bad: ts.TensorParallel(mesh, params(bad), {"w": "column"}, dim="tp"),
                "no array",
            ),
        ]
        for said, make, bad in cases + over_mesh:
            with pytest.raises(Exception) as caught:
                make(comm, bad if comm.rank == 1 else None)
            error = caught.value
            assert said in str(error), (said, error)
            if comm.rank != 1:
                assert isinstance(error, ts.TesseraError) and not isinstance(error, ts.TesseraTimeout), error
                assert (error.rank, error.peer) == (1, 1) and str(error).startswith("rank 1: "), (said, error)
        total = np.ones(2, np.float32)
        comm.all_reduce(total)
        assert (total == 3).all(), "the communicator is as it was"

    ranks(3, body)


def test_a_program_refuses_for_a_reason_of_its_own(ranks):
    reasons: list[tuple[BaseException, type[ts.TesseraError], str]] = [
        (ts.NotFound("no file"), ts.NotFound, "rank 0: no file"),
        (ValueError("two\0files"), ts.InvalidArgument, "rank 0: ValueError: two files"),
        (OSError("a bad disk"), ts.UserError, "rank 0: OSError: a bad disk"),
        (MemoryError(), ts.NoMemory, "rank 0: MemoryError: "),
    ]

    def body(comm: ts.Comm):
        for reason, kind, said in reasons:
            if comm.rank == 0:
                comm.refuse("model", reason)
                continue
            with pytest.raises(kind) as caught:
                ts.DDP(comm, params(None))
            assert str(caught.value) == said
        with pytest.raises(ts.InvalidArgument, match="creation is 'ddp'; it must be one of 'model'"):
            comm.refuse("ddp", ValueError())  # type: ignore[arg-type]

    ranks(2, body)
