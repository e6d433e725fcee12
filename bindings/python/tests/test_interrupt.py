"""Ctrl-C ends any wait, promptly and with KeyboardInterrupt; other signal handlers run during waits too."""

import signal
import subprocess
import time

import pytest
from patience import patience

WAITS = {
    "barrier": "comm.barrier()",
    "all_reduce": "comm.all_reduce(np.ones(4))",
    "work": "comm.barrier(async_op=True).wait()",
    "finalize": "comm.finalize()",
    "recv": "comm.recv(np.ones(1), 1)",
    "ddp": "ts.DDP(comm, {'w': np.ones(3)})",
    "fsdp": "ts.FSDP(comm, {'u': {'w': np.ones(3)}})",
    "pipeline": "ts.Pipeline(comm, [0], print, print, microbatches=2)",
    "store": "store.wait('never')",
}

PROGRAM = """
    import signal, sys, threading
    import numpy as np
    import tessera as ts

    {setup}
    token = "5a" * 32
    ready = threading.Event()

    def other():
        with ts.Store(server.uri, token=token) as store:
            global peer
            peer = ts.Comm.create(store, 1, 2, timeout=60)

    with ts.StoreServer(token=token) as server, ts.Store(server.uri, token=token, timeout=60) as store:
        thread = threading.Thread(target=other)
        thread.start()
        comm = ts.Comm.create(store, 0, 2, timeout=60)
        thread.join()
        try:
            print("waiting", flush=True)
            {wait}
        except BaseException as error:
            print(type(error).__name__, type(error.__cause__).__name__, flush=True)
        else:
            print("returned", flush=True)
        comm.close()
        peer.close()
"""


def interrupted(program, wait: str, setup: str = "") -> tuple[str, float]:
    process = subprocess.Popen(
        program(PROGRAM.format(wait=wait, setup=setup)).command(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waiting\n"
        # The line is printed just before the wait: the signal may come before it or within, and must end both.
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        outcome = process.stdout.readline().strip()
        seconds = time.monotonic() - begin
        assert process.wait(patience(60)) == 0
        return outcome, seconds
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_ends_a_wait(program, wait):
    outcome, seconds = interrupted(program, wait)
    assert outcome.startswith("KeyboardInterrupt"), outcome
    assert seconds < patience(10)


def test_what_a_signal_handler_raises_comes_out_of_the_wait(program):
    setup = """
    def handler(number, frame):
        raise LookupError("from the handler")
    signal.signal(signal.SIGINT, handler)
    """
    outcome, seconds = interrupted(program, "comm.barrier()", setup)
    assert outcome.startswith("LookupError"), outcome
    assert seconds < patience(10)


def test_a_handler_may_abort_the_communicator(program):
    setup = """
    signal.signal(signal.SIGINT, lambda number, frame: comm.abort("asked to stop"))
    """
    outcome, seconds = interrupted(program, "comm.barrier()", setup)
    assert outcome.startswith("Aborted"), outcome
    assert seconds < patience(10)


def test_ctrl_c_ends_a_job_that_waits_for_a_rank_that_never_comes(program):
    text = """
        import tessera as ts
        token = "5a" * 32
        with ts.StoreServer(token=token) as server, ts.Store(server.uri, token=token, timeout=60) as store:
            try:
                print("waiting", flush=True)
                ts.Comm.create(store, 0, 2, timeout=60)
            except KeyboardInterrupt:
                print("KeyboardInterrupt", flush=True)
    """
    process = subprocess.Popen(program(text).command(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=patience(20))[0] == "KeyboardInterrupt\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
