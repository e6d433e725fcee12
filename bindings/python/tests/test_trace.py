"""The flight record of a communicator."""

import json
from pathlib import Path

import numpy as np
import pytest
import tessera as ts


def test_the_record_holds_what_was_done(ranks, tmp_path: Path):
    def body(comm: ts.Comm):
        comm.all_reduce(np.ones(100, np.float32))
        comm.broadcast(np.ones(3), root=1)
        comm.barrier()
        comm.write_trace(tmp_path / f"{comm.rank}.jsonl")
        return comm.rank

    assert ranks(2, body) == [0, 1]
    ids = set()
    for rank in range(2):
        header, *lines = map(json.loads, (tmp_path / f"{rank}.jsonl").read_text().splitlines())
        assert (header["tessera_flight"], header["rank"], header["world_size"]) == (1, rank, 2)
        ids.add(header["id"])
        assert [line["operation"] for line in lines] == ["all_reduce", "broadcast", "barrier"]
        assert all(line["state"] == "finished" for line in lines)
        assert (lines[0]["count"], lines[0]["bytes"], lines[0]["dtype"], lines[0]["op"]) == (100, 400, "f32", "sum")
        assert lines[1]["peer"] == 1
        times = [line[key] for line in lines for key in ("started_us", "ended_us")]
        assert [*times, header["written_us"]] == sorted([*times, header["written_us"]])
    assert len(ids) == 1  # the same communicator


def test_a_record_that_cannot_be_written_is_an_error(alone: ts.Comm, tmp_path: Path):
    with pytest.raises(OSError, match="none/x"):
        alone.write_trace(tmp_path / "none" / "x")
    with pytest.raises(ts.InvalidArgument):
        alone.write_trace("a\0b")
