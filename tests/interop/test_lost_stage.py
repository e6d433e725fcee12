"""One pipeline of four languages loses a rank in the middle of a step: what the others, in each language, say of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import tessera as ts
from conftest import ROOT, digits
from patience import patience

TOKEN = "5a" * 32
# Ranks, and stages: pausing_stage.py, without which nobody can end the step, and the one that is lost meanwhile.
PAUSES, LOST = 1, 2
LATE_S = patience(3)

# Every language is among those who stay.
JOBS = {
    "killed": (["c", "python", "java", "rust"], signal.SIGKILL),
    "stopped": (["rust", "python", "c", "java"], signal.SIGSTOP),
}


def started(rank: int, language: str, store: str, directory: Path) -> subprocess.Popen[str]:
    data = ROOT / "examples" / "data" / "digits.csv"
    arguments = ["--data", str(data), "--checkpoints", str(directory / "root"), "--parallel", "pp"]
    program = [sys.executable, str(Path(__file__).with_name("pausing_stage.py")), *arguments]
    environment = {
        **os.environ,
        **{"TESSERA_RANK": str(rank), "TESSERA_WORLD_SIZE": "4", "TESSERA_STORE": store, "TESSERA_TOKEN": TOKEN},
        "PAUSING_STAGE_TIMEOUT_S": str(LATE_S),
    }
    with (directory / f"{rank}.err").open("w") as said:
        return subprocess.Popen(
            program if rank == PAUSES else digits(language, arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )


@pytest.mark.parametrize(("languages", "how"), JOBS.values(), ids=JOBS)
def test_a_stage_that_is_lost_in_a_step_is_named_in_each_language(
    tmp_path: Path, languages: list[str], how: signal.Signals
) -> None:
    with ExitStack() as ends:
        store = ends.enter_context(ts.StoreServer(token=TOKEN))
        ranks = []
        for rank, language in enumerate(languages):
            ranks.append(ends.enter_context(started(rank, language, store.uri, tmp_path)))
            ends.callback(ranks[-1].kill)

        def told() -> dict[int, str]:
            return {rank: (tmp_path / f"{rank}.err").read_text() for rank in range(4)}

        limit = threading.Timer(patience(60), ranks[PAUSES].kill)
        ends.callback(limit.cancel)
        limit.start()
        pausing = ranks[PAUSES]
        assert pausing.stdout is not None and pausing.stdin is not None
        assert pausing.stdout.readline() == "in the middle of a step\n", told()

        ranks[LOST].send_signal(how)
        if how == signal.SIGKILL:
            ranks[LOST].wait()
        lost = time.monotonic()
        pausing.stdin.write("\n")
        pausing.stdin.flush()
        survivors = [rank for rank in range(4) if rank != LOST]
        deadline = lost + patience(15) + (LATE_S if how == signal.SIGSTOP else 0)
        for rank in survivors:
            assert ranks[rank].wait(max(0, deadline - time.monotonic())) == 1, told()
        assert ranks[LOST].poll() == (-signal.SIGKILL if how == signal.SIGKILL else None)

        where = r"(activation|gradient) of micro-batch \d from stage \d on rank \d"
        why = {
            signal.SIGKILL: r"rank 2 \(pid \d+\) ended",
            signal.SIGSTOP: "stage 1 waited for the gradient of micro-batch [12] from stage 2 on rank 2, in vain for ",
        }[how]
        for rank in survivors:
            for part in (rf"rank {rank}: (stage {rank} waited for|could not send) the {where}", why):
                assert re.search(part, told()[rank]), (languages[rank], told()[rank])
