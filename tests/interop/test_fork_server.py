"""Forked programs behave as `python program.py` does, and none outlives the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fork_server import ONE_THREAD, READ_AT_START, SESSION, Start, ends_within, server
from patience import patience
from run_torch import run_python, run_ranks

HERE = Path(__file__).resolve().parent
STARTS = pytest.mark.parametrize("start", Start)


@STARTS
@pytest.mark.parametrize(
    ("text", "code", "output", "errors"),
    [
        ("print('out')", 0, "out\n", ""),
        ("import sys; sys.exit(7)", 7, "", ""),
        ("import sys; sys.exit('bye')", 1, "", "bye\n"),
        ("import os; os._exit(3)", 3, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
        ("import ctypes; ctypes.CDLL(None).printf(b'in C')", 0, "in C", ""),
        ("import atexit; atexit.register(print, 'at exit'); print('first')", 0, "first\nat exit\n", ""),
        ("import threading as t; t.Thread(target=lambda: print(t.main_thread().is_alive())).start()", 0, "True\n", ""),
    ],
)
def test_a_program_ends_as_in_an_interpreter(start: Start, text: str, code: int, output: str, errors: str) -> None:
    done = run_python("-c", text, start=start)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, errors)


@STARTS
def test_an_uncaught_exception_prints_its_traceback(start: Start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def divide():\n    return 1 / 0\n\ndivide()\n", encoding="utf-8")
    done = run_python(tmp_path / "program.py", start=start)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "    return 1 / 0" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"


WRITES = """
import os
ranks = [os.fork() for _ in range(2)]
for _ in range(2000):
    os.write(1, b"a line\\n")
for rank in ranks:
    if rank:
        os.waitpid(rank, 0)
"""


@STARTS
def test_processes_that_share_an_output_lose_nothing(start: Start) -> None:
    assert run_python("-c", WRITES, start=start).stdout == "a line\n" * 4 * 2000


SEES = """
import json, os, sys, tempfile
import __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "main": [__name__, __main__.__file__, sys.modules["__main__"] is __main__],
    "environment": {name: os.environ.get(name) for name in ("GIVEN", "HOME")}, "cwd": os.getcwd(),
    "temporary": tempfile.gettempdir(), "session": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(),
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3], "tessera": "tessera" in sys.modules,
}))
"""


def test_a_program_sees_what_it_sees_in_an_interpreter(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEES, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    environment = {"GIVEN": "größer", "TMPDIR": str(tmp_path / "sub")}
    forked, executed = (
        run_python(tmp_path / "program.py", "one", 2, cwd=tmp_path / "sub", environment=environment, start=start)
        for start in Start
    )
    assert forked.stdout == executed.stdout
    assert forked.returncode == executed.returncode == 0, forked.stderr + executed.stderr
    assert '"one", "2"' in forked.stdout


def test_a_program_has_only_the_environment_it_is_given() -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_START)}
    command = ["-c", "import os; print(*os.environ)"]
    with closing(server().start(command, environment={**environment, "GIVEN": "1"})) as program:
        assert program.wait(patience(60)) == 0
        assert set(program.printed().split()) == {"GIVEN", SESSION, *environment, *ONE_THREAD}


def test_what_was_read_at_the_start_cannot_differ() -> None:
    with pytest.raises(RuntimeError, match=r"PYTHONHASHSEED: differs from the server's; use Start\.EXECUTE"):
        run_python("-c", "", environment={"PYTHONHASHSEED": "1"})
    done = run_python("-c", "print(hash('x'))", environment={"PYTHONHASHSEED": "1"}, start=Start.EXECUTE)
    assert done.returncode == 0, done.stderr


def test_ranks_draw_different_random_numbers(tmp_path: Path) -> None:
    text = "import random, uuid, numpy; print(random.random(), uuid.uuid4(), numpy.random.rand(), sep='\\n')"
    (tmp_path / "rank.py").write_text(text, encoding="utf-8")
    lines = run_ranks(tmp_path / "rank.py", 2).split()
    assert len(set(lines)) == 6


@STARTS
def test_a_hung_rank_is_named_with_its_stack(tmp_path: Path, start: Start) -> None:
    text = "import os, signal\n\ndef hangs():\n    signal.pause()\n\nif os.environ['RANK'] == '1':\n    hangs()\n"
    (tmp_path / "rank.py").write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"rank 1 did not end within [\d.]+ s(.|\n)*line 4 in hangs"):
        run_ranks(tmp_path / "rank.py", 2, timeout=2, start=start)


@STARTS
def test_what_a_program_started_ends_with_it(start: Start) -> None:
    done = run_python("-c", "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)", start=start)
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


LEAVES = """
import pathlib, signal, subprocess, sys
left = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
pathlib.Path(sys.argv[1]).write_text(f"{left}")
signal.pause()
"""

# Hangs like pytest. Each of its programs leaves a process in a session of its own.
HANGS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import fork_server
programs = [
    fork_server.server().start(["-c", sys.argv[2], sys.argv[3] + start.value], environment=os.environ, how=start)
    for start in fork_server.Start
]
signal.pause()
"""


def test_nothing_outlives_a_session_that_is_killed(tmp_path: Path) -> None:
    told = [tmp_path / f"told-{start.value}" for start in Start]
    for fifo in told:
        os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", HANGS, str(HERE.parent), LEAVES, str(tmp_path / "told-")]) as session:
        left = [int(fifo.read_text()) for fifo in told]
        session.send_signal(signal.SIGKILL)
    assert [pid for pid in left if not ends_within(pid, 60)] == []
