"""What a rank of the cluster tests does, whoever started it: a program, `python ranks.py WHAT DIRECTORY ...`, and
functions for launchers that call Python. Each rank leaves DIRECTORY/NAME.RANK.json.

The training is exact: integers that depend on each sample, on the order of steps and on nothing else, summed over the
ranks. A run that was killed, resumed and resized any number of times ends with the bits of an undisturbed one, and a
sample that is lost or taken twice changes all that follows.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tessera as ts

SAMPLES, GLOBAL_BATCH, WIDTH = 1200, 12, 4096  # 12 is divided by every world size up to 4; 1200 by 12


def report(directory: Path, name: str, rank: int, **facts: Any) -> dict[str, Any]:
    """Leaves the facts where the test finds them, whole or not at all."""
    facts = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), **facts}
    path = directory / f"{name}.{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(facts), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    return facts


def total(comm: ts.Comm, directory: Path) -> dict[str, Any]:
    """A sum over the ranks, in the library's memory and in NumPy's, of a size that crosses hosts in several chunks."""
    shared, own = comm.empty(1 << 20), np.full(100_003, comm.rank + 1, np.int64)
    shared[:] = comm.rank + 1
    comm.all_reduce(shared)
    comm.all_reduce(own)
    sums = sorted({float(value) for array in (shared, own) for value in (array.min(), array.max())})
    return report(directory, "total", comm.rank, world=comm.world_size, transport=comm.transport, sums=sums)


def outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What a job returned, or its error."""
    try:
        return {"returned": run()}
    except ts.TesseraError as error:
        return {
            "error": type(error).__name__,
            "peer": error.peer,
            "message": str(error),
            "cause": repr(error.__cause__),
        }


def lose(comm: ts.Comm, directory: Path, victim: int = -1) -> dict[str, Any]:
    """Barriers until a rank is lost: `victim`, which kills itself, or whom somebody else takes away."""
    comm.barrier()
    report(directory, "joined", comm.rank)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    last = time.monotonic()
    try:
        while True:
            comm.barrier()
            last = time.monotonic()
    except ts.TesseraError as error:
        found = {"error": type(error).__name__, "peer": error.peer, "message": str(error)}
    found["seconds"] = time.monotonic() - last
    return report(directory, "lost", comm.rank, **found)


def train(
    comm: ts.Comm,
    root: Path,
    steps: int,
    *,
    save_every: int = 10,
    pace: float = 0,
    told: Callable[[], bool] = lambda: False,
) -> tuple[int, int]:
    """Trains up to `steps` or until asked to stop; returns the step that it resumed after and the last one."""
    weights = np.zeros(WIDTH, np.int64)
    data = ts.Sampler(comm, length=SAMPLES, seed=3)
    state = ts.State(weights=weights, data=data)
    primes = np.arange(1, WIDTH + 1, dtype=np.int64) * 2_654_435_761
    with ts.Saver(comm, root, keep_latest=3) as saver:
        begun = step = saver.resume(state)
        if comm.rank == 0 and begun > 0:
            print(f"{comm.world_size} ranks, resumed after step {begun}", flush=True)
        stop = False
        while step < steps and not stop:
            batch = data.batch(GLOBAL_BATCH // comm.world_size)
            gradient = ((batch[:, None] + 1) * primes ^ weights).sum(axis=0)
            comm.all_reduce(gradient)
            step += 1
            weights[:] = weights * 31 + gradient * step
            stop = saver.should_stop(step, told())
            if stop or step == steps or step % save_every == 0:
                saver.save_async(step, state)
            threading.Event().wait(pace)  # a step that takes as long
        saver.wait()
    return begun, step


def trained(root: Path) -> tuple[int, bytes]:
    """The newest checkpoint of a training: its step and the bits of its weights."""
    with ts.Checkpoint(root) as checkpoint:
        return int(checkpoint.step), checkpoint["weights"].tobytes()


def undisturbed(root: Path, steps: int) -> tuple[int, bytes]:
    """The same for a training of `steps` that one process does alone, in the calling process."""
    with ts.init() as comm:
        train(comm, root, steps, save_every=steps)
    return trained(root)


def main() -> None:
    what, directory, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    comm = ts.init()
    if what == "total":
        total(comm, directory)
        comm.finalize()
    elif what == "lose":
        lose(comm, directory, *map(int, arguments))
    elif what == "train":
        root, asked = directory / "checkpoints", []

        def told() -> bool:
            dies = os.environ.get("RANKS_DIE_ONCE") == str(comm.rank) and (root / "latest").exists()
            if dies and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            return bool(asked)

        if os.environ.get("RANKS_LISTEN") == "1":
            signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        steps, pace, *every = arguments
        more = {"save_every": int(every[0])} if every else {}
        begun, step = train(comm, root, int(steps), pace=float(pace), told=told, **more)
        comm.finalize()
        report(directory, "trained", comm.rank, begun=begun, step=step, world=comm.world_size)
        print(f"rank {comm.rank} of {comm.world_size}: steps {begun} to {step}", flush=True)
    else:
        sys.exit(f"ranks.py: what is {what}?")


if __name__ == "__main__":
    main()
