"""A rank of a PyTorch program that does not come is named by `tessera trace why-hung`, asked while the others wait."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from conftest import TESSERA
from fork_server import server
from patience import patience
from run_torch import ends_within, reserved_port, wait_for

WAYS = ("ddp", "fully_shard", "fsdp1", "checkpoint", "c10d")
JOBS = Path(__file__).with_name("torch_hang_jobs.py")
ABSENT = Path(__file__).with_name("torch_absent_jobs.py")
FLIGHTS = 4  # where the count of requests is on the agent's page, and behind it the directory: launch/agent_page.hpp


@contextmanager
def agent_page() -> Iterator[tuple[str, mmap.mmap]]:
    """What `tessera run` tells its ranks by: a path to the page, and the page."""
    number = os.memfd_create("page")
    try:
        os.truncate(number, mmap.PAGESIZE)
        with mmap.mmap(number, mmap.PAGESIZE) as page:
            yield f"/proc/{os.getpid()}/fd/{number}", page
    finally:
        os.close(number)


def ask(page: mmap.mmap, directory: Path) -> None:
    (count,) = struct.unpack_from("I", page, FLIGHTS)
    text = os.fsencode(directory) + b"\0"
    page[FLIGHTS + 4 : FLIGHTS + 4 + len(text)] = text
    struct.pack_into("I", page, FLIGHTS, count + 1)


def why_hung(page: mmap.mmap, directory: Path) -> str:
    """Ask until somebody waits."""
    directory.mkdir()
    end = time.monotonic() + patience(30)
    while True:
        ask(page, directory)
        done = subprocess.run([TESSERA, "trace", "why-hung", directory], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < end, done.stdout + done.stderr


def test_a_rank_that_hangs_is_named_in_one_sentence(tmp_path: Path) -> None:
    """With DDP, fully_shard, FSDP1, checkpoints and process groups, over the default group of Gloo."""
    for way in WAYS:
        os.mkfifo(tmp_path / f"{way}.go")
    with agent_page() as (path, page), reserved_port() as port, ExitStack() as running:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        common["TESSERA_PREEMPT_FILE"] = path
        ranks = [
            running.enter_context(
                closing(server().start([JOBS, tmp_path], environment={**common, "RANK": str(r), "LOCAL_RANK": str(r)}))
            )
            for r in range(2)
        ]
        for way in WAYS:
            end = time.monotonic() + patience(60)
            while not (tmp_path / f"{way}.hangs").exists():
                ended = ends_within(ranks[1], 0.01)
                assert time.monotonic() < end and not ended, ranks[0].printed() + ranks[1].printed()
            sentence = why_hung(page, tmp_path / way)
            assert sentence.count("\n") == 1, sentence
            assert "rank 1 never entered" in sentence and "rank 0 waited" in sentence, (way, sentence)
            (tmp_path / f"{way}.go").write_bytes(b"")
        hung = wait_for(ranks, patience(60))
        outputs = [rank.printed() for rank in ranks]
        assert not hung and [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


def test_the_deadline_of_the_environment_holds_over_gloo(tmp_path: Path) -> None:
    """And the error tells the launcher who did not come, and the user where the program waited, in a few lines."""
    os.mkfifo(tmp_path / "ddp.go")
    with reserved_port() as port, ExitStack() as running:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        common["TESSERA_TIMEOUT_MS"] = str(int(patience(2) * 1000))
        ranks = []
        for r in range(2):
            of_rank = {"RANK": str(r), "LOCAL_RANK": str(r), "TESSERA_RANK": str(r)}
            of_rank["TESSERA_ERROR_FILE"] = str(tmp_path / f"error-{r}.json")
            started = server().start([JOBS, tmp_path, "ddp"], environment={**common, **of_rank})
            ranks.append(running.enter_context(closing(started)))
        assert ranks[0].wait(patience(60)) == 1
        printed = ranks[0].printed()
    told = json.loads((tmp_path / "error-0.json").read_text())["message"]
    assert code_and_peer(told["extraInfo"]["tessera"]) == {"code": "TIMEOUT", "peer": 1}, told
    lines = printed.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("TesseraTimeout: rank 0: ")) :]
    assert "rank 1" in lines[0]
    assert any("in step" in line for line in lines) and len(lines) < 12, printed
    assert not any("torch/" in line for line in lines[1:]), printed


def code_and_peer(facts: dict[str, object]) -> dict[str, object]:
    return {name: facts[name] for name in ("code", "peer")}


def facts_of_absence(where: str, ranks: int, directory: Path) -> tuple[list[dict[str, object]], str]:
    """What the ranks of a job tell the launcher, of which the last does not come, and what they print."""
    with reserved_port() as port, ExitStack() as running:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        programs = []
        for r in range(ranks):
            of_rank = {"RANK": str(r), "LOCAL_RANK": str(r), "TESSERA_RANK": str(r)}
            of_rank["TESSERA_ERROR_FILE"] = str(directory / f"error-{r}.json")
            started = server().start([ABSENT, where], environment={**common, **of_rank})
            programs.append(running.enter_context(closing(started)))
        waiting = programs[:-1]
        hung = wait_for(waiting, patience(60))
        printed = "".join(program.printed() for program in waiting)
        assert not hung and [program.returncode for program in waiting] == [1] * len(waiting), printed
    files = [directory / f"error-{r}.json" for r in range(ranks)]
    told = [json.loads(file.read_text())["message"]["extraInfo"] for file in files if file.exists()]
    facts = [extra["tessera"] for extra in told if "tessera" in extra]  # an error of PyTorch's has none
    return [code_and_peer(of_one) for of_one in facts], printed


def test_a_rank_that_does_not_come_to_init_process_group_is_told(tmp_path: Path) -> None:
    """Rank 0 waits for it in PyTorch's store, and so comes to no meeting either; the others do not blame it."""
    facts, printed = facts_of_absence("init", 3, tmp_path)
    assert facts == [{"code": "TIMEOUT", "peer": 2}], printed
    assert "TesseraTimeout: rank 2 did not join process group 0 in time" in printed
    assert "2/3 clients joined" in printed


def test_a_rank_that_does_not_come_to_a_group_is_told(tmp_path: Path) -> None:
    """The launcher by the rank's number in the job, the user by that in the group."""
    facts, printed = facts_of_absence("groups", 4, tmp_path)
    assert facts == [{"code": "TIMEOUT", "peer": 3}] * 3, printed
    assert printed.count("TesseraTimeout: rank 2 did not join process group") == 2, printed
    assert printed.count("TesseraTimeout: rank 1 did not join DistributedDataParallel in time") == 1, printed
