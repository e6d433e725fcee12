"""The driver of the Ray tests: python ray_job.py WHAT DIRECTORY PORT [VICTIM]. Four actors on two nodes are the ranks.

Which rank an actor is, and where the ranks meet, it hears from the driver; it sets torchrun's variables from that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ranks
import ray
import tessera as ts

NODES = ["n1", "n1", "n2", "n2"]


@ray.remote(num_cpus=1)
class Rank:
    def join(self, variables: dict[str, str]) -> int:
        os.environ.update(variables)
        self.comm = ts.init()
        return self.comm.rank

    def leave(self) -> None:
        self.comm.close()

    def total(self, directory: Path) -> dict[str, Any]:
        return ranks.total(self.comm, directory)

    def train(self, root: Path, steps: int, pace: float) -> tuple[int, int]:
        return ranks.train(self.comm, root, steps, pace=pace)


def actor(rank: int) -> Any:
    return Rank.options(resources={NODES[rank]: 1}).remote()


def join(actors: list[Any], port: int, epoch: int) -> None:
    common = {"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": NODES[0], "MASTER_PORT": str(port)}
    common["TORCHELASTIC_RESTART_COUNT"] = str(epoch)
    joined = [actor.join.remote({**common, "RANK": str(rank)}) for rank, actor in enumerate(actors)]
    assert ray.get(joined) == list(range(len(actors)))


def total(actors: list[Any], directory: Path, port: int) -> None:
    join(actors, port, 0)
    ray.get([actor.total.remote(directory) for actor in actors])


def kill(actors: list[Any], directory: Path, port: int, victim: int) -> None:
    """An actor is killed while all train; the others say whom they lost, and train on with a new one in its place."""
    root = directory / "checkpoints"
    join(actors, port, 0)
    running = [actor.train.remote(root, 1_000_000, 0.01) for actor in actors]
    while not (root / "latest").exists():
        ended, _ = ray.wait(running, timeout=0.05)
        assert not ended, ray.get(ended)
    ray.kill(actors[victim])
    killed = time.monotonic()
    told = {}
    for rank, work in enumerate(running):
        try:
            ray.get(work)
        except ray.exceptions.RayActorError as error:
            told[rank] = {"error": type(error).__name__, "message": str(error)}
        except ts.TesseraError as error:
            told[rank] = {"error": error.code.name, "peer": error.peer, "message": str(error)}
    (directory / "told.json").write_text(json.dumps({"told": told, "seconds": time.monotonic() - killed}))

    ray.get([actor.leave.remote() for rank, actor in enumerate(actors) if rank != victim])
    actors[victim] = actor(victim)
    join(actors, port + 20, 1)
    with ts.Checkpoint(root) as checkpoint:
        begun = int(checkpoint.step)
    ended = ray.get([actor.train.remote(root, begun + 20, 0) for actor in actors])
    assert ended == [(begun, begun + 20)] * len(actors), ended


def main() -> None:
    what, directory, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    ray.init(address="auto")
    actors = [actor(rank) for rank in range(len(NODES))]
    {"total": total, "kill": kill}[what](actors, directory, port, *map(int, sys.argv[4:]))


if __name__ == "__main__":
    main()
