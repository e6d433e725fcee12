"""Runs tests of PyTorch's own suite of `torch.distributed` on ranks that stay from one test to the next, by a backend:
"gloo", or "tessera" with Tessera's DistributedDataParallel. The suite is the installed wheel's.

    torch_suite_jobs.py BACKEND SECONDS TEST...
    torch_suite_jobs.py names

The second form prints the names of the tests that Gloo is meant to pass here; those that want a GPU or more ranks say
so when they run.

Each rank prints a line of JSON per test: its name, what became of it, why. A rank whose test failed or did not end
within SECONDS ends, and with it the others, since nothing is known of where they are: the tests that are left want new
ranks. Files go into the working directory, which is the ranks' own and empty.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch.distributed as dist

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BACKEND = sys.argv[1]
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 60
NAMES = sys.argv[3:]


def suite() -> Any:
    """The suite as it is for Gloo, so that it leaves out no test for a backend's name, then told of ours."""
    os.environ["BACKEND"] = "gloo"
    os.environ["INIT_METHOD"] = "file://"  # of each test's own directory, below
    from torch.testing._internal.distributed import distributed_test

    if BACKEND == "tessera":
        import tessera.torch
        import torch.nn.parallel

        ours: Any = tessera.torch.DistributedDataParallel
        torch.nn.parallel.DistributedDataParallel = distributed_test.DistributedDataParallel = ours  # type: ignore[misc]
        os.environ["BACKEND"] = distributed_test.BACKEND = BACKEND
    return distributed_test


def names(distributed_test: Any) -> list[str]:
    tests = vars(distributed_test.DistributedTest._DistTestBase)
    return [name for name in tests if name.startswith("test_") and not hasattr(tests[name], "__unittest_skip__")]


class Meeting:
    """Where the ranks meet between and in tests, beside the groups that these make and break."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.barriers = 0

    def barrier(self, wait_for: int = RANKS, timeout: float = SECONDS) -> None:
        self.barriers += 1
        key = f"barrier {self.barriers}"
        if self.store.add(key, 1) == wait_for:
            self.store.set(f"{key} is full", "")
        self.store.wait([f"{key} is full"], timedelta(seconds=timeout))


def tell(name: str, became: str, why: str = "") -> None:
    os.write(1, f"{json.dumps([name, RANK, became, why])}\n".encode())


def end(name: str, why: str) -> NoReturn:
    tell(name, "failed", why)
    os._exit(0)


class Deadline:
    """Ends the rank if the test does not, and tells where it was."""

    def __init__(self, name: str) -> None:
        self.timer = threading.Timer(SECONDS, self.over)
        self.timer.daemon = True
        self.name = name

    def over(self) -> None:
        with tempfile.TemporaryFile(mode="w+") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            end(self.name, f"did not end within {SECONDS:g} s\n{stacks.read()}")

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *raised: object) -> None:
        self.timer.cancel()


def run(distributed_test: Any, name: str, meeting: Meeting, store: dist.Store, directory: Path) -> None:
    from torch.testing._internal.common_utils import set_rng_seed

    class Test(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def _barrier(self, wait_for: int = RANKS, timeout: float = SECONDS) -> None:
            meeting.barrier(wait_for, timeout)

        def _test_accumulate_gradients_no_sync(self, *arguments: Any, **more: Any) -> None:
            with patch.object(distributed_test, "BACKEND", "gloo"):  # those of a CPU's backend, by whose name it asks
                super()._test_accumulate_gradients_no_sync(*arguments, **more)

    for part in ("barrier", "test_dir", "init_dir"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(directory)
    distributed_test.INIT_METHOD = f"file://{directory}/shared_init_file"
    test = Test(name)
    test.rank, test.file_name = RANK, str(directory / "store")
    timeout = timedelta(seconds=min(SECONDS, distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)))
    dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=RANKS, timeout=timeout)
    meeting.barrier()
    set_rng_seed()
    why = ""
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        why = str(skip) or "skipped"
    except SystemExit as left:
        why = next((skip.message for skip in distributed_test.TEST_SKIPS.values() if skip.exit_code == left.code), "")
        if not why:
            raise
    meeting.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    tell(name, "skipped" if why else "passed", why)


def main() -> None:
    distributed_test = suite()
    if BACKEND == "names":
        print("\n".join(names(distributed_test)), flush=True)
        os._exit(0)
    port = int(os.environ["MASTER_PORT"])
    control = dist.TCPStore(os.environ["MASTER_ADDR"], port, RANKS, RANK == 0, timedelta(seconds=SECONDS))
    meeting = Meeting(dist.PrefixStore("meeting", control))
    for i, name in enumerate(NAMES):
        since = time.monotonic()
        with Deadline(name):
            try:
                run(distributed_test, name, meeting, dist.PrefixStore(str(i), control), Path.cwd() / str(i))
            except BaseException:
                end(name, traceback.format_exc())
        if RANK == 0 and (took := time.monotonic() - since) > 0.5:
            print(f"{name} {took:.2f} s", file=sys.stderr, flush=True)
    control.set(f"{RANK} is done", "")
    if RANK == 0:  # has the store, and so leaves last
        control.wait([f"{rank} is done" for rank in range(RANKS)], timedelta(seconds=SECONDS))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


main()
