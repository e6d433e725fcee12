"""Programs under `tessera run`: joining, errors in the summary, preemption, a lost rank, a missing token."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import tessera as ts
from patience import patience


def test_processes_join_by_their_environment(program):
    text = """
        import numpy as np
        import tessera as ts
        with ts.init(timeout=60) as comm:
            x = np.full(3, comm.rank, np.float32)
            comm.all_reduce(x)
            shared = comm.empty(1000)
            shared[:] = comm.rank
            comm.all_reduce(shared, "max")
            assert (shared == comm.world_size - 1).all()
            print(comm.rank, comm.world_size, comm.transport, x[0])
    """
    result = program(text).launch(3)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(3):
        assert f"{rank} 3 shm 3.0" in result.stdout


def test_record_tells_the_launcher_why(program):
    text = """
        import tessera as ts
        @ts.record
        def main():
            with ts.init(timeout=60) as comm:
                if comm.rank == 1:
                    raise LookupError("there is no such sample")
                comm.barrier()
        main()
    """
    result = program(text).launch(2)
    assert result.returncode == 1
    headline = next(line for line in result.stderr.splitlines() if "the job failed" in line)
    assert "the job failed: rank 1 " in headline
    assert headline.endswith(": LookupError: there is no such sample")


def test_ranks_that_never_join_are_the_cause(program):
    """In the program's own code before `init`, or gone before; several at once."""
    text = """
        import os
        import signal
        import sys
        import tessera as ts
        if os.environ["RANK"] in sys.argv[2]:
            signal.pause() if sys.argv[1] == "hang" else sys.exit()
        ts.init()
    """
    soon = ("--timeout-s", str(patience(2)))
    for way, ranks, cause, told in (
        (
            "hang",
            "0",
            "rank 0 was late and other ranks timed out waiting for it: TesseraTimeout: ",
            "rank 0 did not join",
        ),
        (
            "hang",
            "12",
            "rank 1 was late and other ranks timed out waiting for it: TesseraTimeout: ",
            "ranks 1 and 2 did not join",
        ),
        ("leave", "12", "rank 1 ended with exit code 0 (its peers still needed it", "before it joined"),
    ):
        result = program(text).launch(4, way, ranks, flags=soon)
        assert result.returncode == 1
        assert f"the job failed: {cause}" in result.stderr and told in result.stderr, result.stderr


def test_a_hook_of_the_program_gets_what_nothing_catches(program):
    text = """
        import sys
        import numpy as np
        import tessera as ts
        sys.excepthook = lambda kind, error, trace: print("the tracker got", kind.__name__, flush=True)
        comm = ts.init(timeout=60)
        comm.all_reduce(np.ones((2, 2), np.float32)[:, :1])
    """
    result = program(text).launch(2)
    assert result.returncode == 1
    assert result.stdout.count("the tracker got InvalidArgument") == 2
    assert "the job failed: rank " in result.stderr


def test_what_fails_before_the_program_joins_reaches_the_launcher(program, tmp_path):
    text = """
        import sys
        import numpy as np
        import tessera as ts

        def load():
            with ts.Checkpoint(sys.argv[1]) as checkpoint:
                checkpoint.load(ts.State(w=np.zeros(3, np.float32)))

        load()
    """
    with ts.init() as comm, ts.Saver(comm, tmp_path) as saver:
        saver.save(1, ts.State(w=np.zeros(4, np.float32), more=1))
    result = program(text).launch(2, str(tmp_path))
    assert result.returncode == 1
    headline, *rest = result.stderr.split("the job failed: ")[1].splitlines()
    assert re.match(r"rank [01] .*: Mismatch: ", headline), headline
    assert "last stderr line" not in headline
    assert any(line.endswith("in load") for line in rest), result.stderr


@pytest.mark.parametrize("launched", [False, True])
def test_only_under_a_launcher_an_import_changes_the_hook(program, tmp_path, launched):
    text = """
        import sys
        import tessera
        print(sys.excepthook is sys.__excepthook__)
    """
    env = os.environ | ({"TESSERA_ERROR_FILE": str(tmp_path / "error.json")} if launched else {})
    assert program(text).run(env=env).stdout.split() == [str(not launched)]


def test_programs_that_a_rank_runs_and_its_forks_do_not_report_as_the_rank(program, tmp_path):
    text = """
        import os, subprocess, sys
        import tessera

        failing = "import tessera; raise ValueError('of a child')"
        assert subprocess.run([sys.executable, "-c", failing], stderr=subprocess.DEVNULL).returncode == 1
        if os.fork() == 0:
            raise ValueError("of a fork")
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    file = tmp_path / "error.json"
    result = program(text).run(env=os.environ | {"TESSERA_ERROR_FILE": str(file)})
    assert result.stdout.split() == ["1"], result.stderr
    assert not file.exists()


def test_a_hook_set_after_the_import_gets_the_exception_once_and_so_does_the_launcher(program, tmp_path):
    text = """
        import sys
        import tessera as ts

        def track(kind, error, trace, former=sys.excepthook):
            print("the tracker got", kind.__name__, flush=True)
            former(kind, error, trace)

        sys.excepthook = track
        with ts.init():
            pass
        ts.Checkpoint(sys.argv[1])
    """
    file = tmp_path / "error.json"
    result = program(text).run(str(tmp_path / "nothing"), env=os.environ | {"TESSERA_ERROR_FILE": str(file)})
    assert result.stdout.splitlines() == ["the tracker got NotFound"], result.stderr
    assert result.stderr.count("NotFound: ") == 1, result.stderr
    assert json.loads(file.read_text())["message"]["message"].startswith("NotFound: ")


def test_an_exception_that_leaves_the_with_block_reaches_the_launcher_without_a_decorator(program):
    text = """
        import tessera as ts

        def look_up(sample):
            raise LookupError(f"there is no sample {sample}\\nsecond line \\udc80")

        with ts.init(timeout=60) as comm:
            group = comm.split(0)
            with group:
                if comm.rank == 1:
                    look_up(17)
                group.barrier()
    """
    result = program(text).launch(2)
    assert result.returncode == 1
    summary = result.stderr.split("the job failed: ")[1]
    assert summary.startswith("rank 1 ")
    assert ": LookupError: there is no sample 17\n\n  root cause: rank 1 " in summary
    assert "second line" in summary
    assert "rank 1's traceback" in summary
    assert "in look_up" in summary
    assert summary.count("there is no sample 17") == 1, summary


def test_an_error_ends_where_the_program_called_tessera(program, tmp_path):
    """Its own frames tell a user nothing."""
    text = """
        import numpy as np
        import tessera as ts

        def exchange(comm):
            comm.recv(np.ones(3), 0)  # itself

        with ts.init() as comm:
            exchange(comm)
    """
    file = tmp_path / "error.json"
    result = program(text).run(env=os.environ | {"TESSERA_ERROR_FILE": str(file)})
    assert result.returncode == 1
    told = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    for shown, place in ((result.stderr, 0), (told, -1)):  # printed, the sentence is first
        lines = shown.rstrip().splitlines()
        assert sum("in exchange" in line for line in lines) == 1, shown
        assert "InvalidArgument" in lines[place], shown
        assert not any(own in shown for own in (".pxi", "_core", "collectives.py", "comm.py")), shown


def test_who_did_not_come_is_the_cause_of_an_error_that_nothing_catches(program):
    text = """
        import signal
        import tessera as ts

        def step():
            comm.barrier()

        comm = ts.init(timeout=60)
        group = comm.split(0, -comm.rank)  # numbered otherwise than the launcher does
        comm, comm.timeout = group, 0.5
        if comm.rank == 0:
            signal.pause()
        step()
    """
    result = program(text).launch(2)
    assert result.returncode == 1
    printed, report = result.stderr.split("tessera: the job failed: ")
    ours = [line.split("] ", 1)[1] for line in printed.splitlines() if line.startswith("[rank 0 ")]
    assert ours[0].startswith("TesseraTimeout: rank 1: barrier #1 "), printed
    assert ours[1] == "at (most recent call last):"
    assert any(line.endswith("in step") for line in ours), printed
    assert "comm.py" not in printed and "collectives.py" not in printed, printed
    late = "rank 1 was late and other ranks timed out waiting for it"
    assert report.startswith(f"{late}: TesseraTimeout: rank 1: barrier"), report
    assert "root cause: rank 1 " in report
    assert "TIMEOUT because rank 1 was late" in report


def test_frames_of_a_programs_own_callbacks_stay(program, tmp_path):
    text = """
        import sys
        import tessera as ts

        class Odd:
            def state_dict(self):
                raise RuntimeError("no state today")
            def load_state_dict(self, values): ...

        with ts.init() as comm, ts.Saver(comm, sys.argv[1]) as saver:
            saver.save(1, ts.State(odd=Odd()))
    """
    result = program(text).run(str(tmp_path / "checkpoints"))
    assert result.returncode == 1
    assert "in state_dict" in result.stderr
    assert "state.py" not in result.stderr, result.stderr


def test_a_rank_that_leaves_by_sys_exit_while_its_peers_need_it_is_named(program):
    text = """
        import sys
        import tessera as ts
        with ts.init(timeout=60) as comm:
            if comm.rank == 1:
                sys.exit(0)
            comm.barrier()
    """
    result = program(text).launch(2)
    assert result.returncode == 1
    headline = next(line for line in result.stderr.splitlines() if "the job failed" in line)
    assert "the job failed: rank 1 " in headline
    assert headline.endswith(": it left the job with exit status 0 (sys.exit)"), headline
    assert "ABORTED because rank 1" in result.stderr
    assert "(ended)" not in result.stderr


def test_what_fails_at_the_end_of_the_with_block_reaches_the_launcher(program, tmp_path):
    text = """
        import tessera as ts
        with ts.init() as comm:
            comm.finalize()  # and once more at the end of the block
    """
    file = tmp_path / "error.json"
    result = program(text).run(env=os.environ | {"TESSERA_ERROR_FILE": str(file)})
    assert result.returncode == 1
    told = json.loads(file.read_text())["message"]
    assert "InvalidState: rank 0: communicator 'world' is already finalized" in told["message"]
    assert "with ts.init() as comm:" in told["extraInfo"]["py_callstack"]
    assert "comm.py" not in told["extraInfo"]["py_callstack"]


def test_leaving_with_sys_exit_is_no_error(program):
    text = """
        import sys
        import tessera as ts
        with ts.init(timeout=60) as comm:
            sys.exit(0)
    """
    result = program(text).launch(1)
    assert result.returncode == 0, result.stderr
    assert "root cause" not in result.stderr


def test_an_error_that_was_handled_does_not_hide_the_one_that_ends_the_program(program, tmp_path):
    """Outside a launcher nothing counts as told."""
    text = """
        import os, sys
        import tessera as ts
        try:
            with ts.init() as comm:
                raise KeyError("handled")
        except KeyError:
            pass
        os.environ["TESSERA_ERROR_FILE"] = sys.argv[1]
        with ts.init() as comm:
            raise ValueError("the end")
    """
    file = tmp_path / "error.json"
    assert program(text).run(str(file)).returncode == 1
    assert "the end" in file.read_text()


def test_record_writes_the_error_file_once_and_lets_the_exception_go_on(program, tmp_path):
    text = """
        import sys
        import tessera as ts
        @ts.record
        def first(): raise ValueError("line one\\nline two")
        @ts.record
        def second(): raise KeyError("later")
        @ts.record
        def well(number): return number + 1
        @ts.record
        def leaves(): sys.exit(0)
        assert well(1) == 2 and well.__name__ == "well"
        for call in (first, second, leaves):
            try:
                call()
            except (ValueError, KeyError, SystemExit) as error:
                print(type(error).__name__)
    """
    file = tmp_path / "error.json"
    result = program(text).run(env=os.environ | {"TESSERA_ERROR_FILE": str(file)})
    assert result.stdout.split() == ["ValueError", "KeyError", "SystemExit"], result.stderr
    told = json.loads(file.read_text())
    assert "ValueError: line one" in json.dumps(told)
    assert "line two" in json.dumps(told)
    assert "later" not in json.dumps(told)


def test_nobody_asks_to_stop_outside_a_launcher():
    assert ts.preempt_requested() is False


def test_preemption_is_seen_by_the_ranks(program):
    text = """
        import time
        import numpy as np
        import tessera as ts
        with ts.init(timeout=60) as comm:
            print("running", flush=True)
            asked = np.zeros(1, np.int32)
            deadline = time.monotonic() + 60
            while not asked and time.monotonic() < deadline:
                asked[0] = ts.preempt_requested()
                comm.all_reduce(asked, "min")  # all ranks stop at the same step
            print("stopping", comm.rank, ts.preempt_requested(), flush=True)
    """
    from conftest import launcher

    command = [launcher(), "run", "-n", "2", *program(text).command()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen = [process.stdout.readline() for _ in range(2)]
        assert all("running" in line for line in seen)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=patience(60))[0]
    finally:
        process.kill()
        process.wait()
    assert "stopping 0 True" in rest
    assert "stopping 1 True" in rest


PAIR = """
    import os, signal, sys, time
    import numpy as np
    import tessera as ts
    rank, uri, token = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with ts.Store(uri, token=token, timeout=60) as store:
        comm = ts.Comm.create(store, rank, 2, timeout=60)
        comm.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            comm.{call}
        except ts.PeerLost as error:
            print("lost", error.peer, time.monotonic() - begin < 10)
        try:
            comm.barrier()
        except ts.Aborted as error:
            print("then aborted by", type(error.__cause__).__name__)
        comm.close()
"""


@pytest.mark.parametrize("call", ["all_reduce(np.ones(3))", "recv(np.ones(3), 1)", "barrier(async_op=True).wait()"])
def test_a_rank_that_is_killed_is_named_by_the_others(program, call):
    token = "5a" * 32
    pair = program(PAIR.format(call=call))
    with ts.StoreServer(token=token) as server:
        victim = subprocess.Popen(pair.command("1", server.uri, token))
        survivor = pair.run("0", server.uri, token)
        assert victim.wait(patience(60)) == -signal.SIGKILL
    assert survivor.stdout.splitlines() == ["lost 1 True", "then aborted by PeerLost"], survivor.stderr


def test_a_rank_with_another_token_is_refused(program):
    text = """
        import sys
        import tessera as ts
        try:
            ts.Store(sys.argv[1], timeout=20)
        except ts.PermissionDenied as error:
            print("refused:", error.code.name)
    """
    with ts.StoreServer(token="5a" * 32) as server:
        for setting in ({"TESSERA_TOKEN": "00" * 32}, {}):
            # Without a token in the environment a file of the user is made and read: it holds another one.
            home = {"XDG_RUNTIME_DIR": str(program(text).path.parent)}
            result = program(text).run(server.uri, env=os.environ | home | setting)
            assert result.stdout == "refused: PERMISSION\n", result.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("token", [{}, {"TESSERA_TOKEN": "ab" * 32}], ids=["without", "with"])
def test_a_host_that_cannot_be_resolved_is_what_is_told(rank, token):
    job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    others = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    done = subprocess.run(
        [sys.executable, "-c", "import tessera as ts; ts.init(timeout=0.2)"],
        env={**others, **job, **token},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert done.returncode == 1
    assert "cannot resolve host name 'no-such-host.invalid'" in done.stderr.splitlines()[-1]


def test_a_killed_rank_comes_back_and_the_others_stay(program):
    text = """
        import os
        import signal
        import numpy as np
        import tessera as ts

        def train(comm):
            x = np.full(3, comm.rank, np.float32)
            for step in range(100):
                if os.environ["TESSERA_REPLACEMENT"] == "0" and comm.rank == 1 and step == 50:
                    os.kill(os.getpid(), signal.SIGKILL)
                comm.all_reduce(x, "max")
            return int(x[0])

        comm, lost = ts.init(timeout=60), 0
        while True:
            try:
                top = train(comm)
                break
            except (ts.PeerLost, ts.Aborted):
                lost += 1
                grown = comm.grow(name="again")
                comm.close()
                comm = grown
        with comm:
            print("rank", comm.rank, "of", comm.world_size, "lost", lost, "top", top)
    """
    result = program(text).launch(3, flags=("--on-loss", "replace", "--max-restarts", "1"))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank, lost in enumerate((1, 0, 1)):
        assert f"rank {rank} of 3 lost {lost} top 2" in result.stdout
    assert "rank 1 was killed by SIGKILL; another process takes its place, restart 1 of 1" in result.stderr


def test_without_a_launcher_that_replaces_ranks_nothing_grows():
    with ts.init() as comm:
        with pytest.raises(ts.InvalidState, match="tessera run --on-loss replace"):
            comm.grow()
        comm.barrier()
