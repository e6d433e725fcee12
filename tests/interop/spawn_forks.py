"""Runs a program whose `mp.spawn` forks, so that its ranks do not import PyTorch again.

usage: spawn_forks.py PROGRAM [ARGUMENT...]

A rank gets its work by pickle and ends like an interpreter, as a spawned one does. Only for programs that start their
ranks before they have threads or tensors.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import runpy
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress

spawns = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def forks(path: str, command: Sequence[str], descriptors: Iterable[int]) -> int:
    if command[-1] != "--multiprocessing-fork":  # the tracker of resources
        return int(spawns(path, command, descriptors))
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"cannot fork with {len(threads)} threads"
    pid = os.fork()
    if pid == 0:
        code = run(command, {0, 1, 2, *descriptors})
        ctypes.pythonapi.Py_Exit(code)
    return pid


def run(command: Sequence[str], descriptors: set[int]) -> int:
    """What `python -c` does with the command."""
    try:
        for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - descriptors:
            with suppress(OSError):
                os.close(descriptor)
        sys.argv = ["-c", command[-1]]
        exec(command[-2])
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    multiprocessing.util.spawnv_passfds = forks  # type: ignore[attr-defined]
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
