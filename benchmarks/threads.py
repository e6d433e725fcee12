"""A step of DDP, whose ranks are processes, beside the same replicas as threads of one process.

The second is what `torch.nn.DataParallel` does on GPUs; on CPUs it would only call the model. Both have as many
replicas as ranks, a core each, and take their steps in turn.
"""

from __future__ import annotations

import results
from rank_processes import Ranks

TITLES = {"transformer": "transformer, large operations", "deep": "64 small layers, many small operations"}


def bench(rounds: int, count: int) -> list[results.Case]:
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in TITLES}
    with (
        Ranks("threads_rank.py", ["0"], count, {}) as processes,
        Ranks("threads_rank.py", [str(count)], 1, {}) as threads,
    ):
        sides = [processes, threads]
        for number in range(rounds + 1):  # the first warms up
            for kind in TITLES:
                order = sides if number % 2 == 0 else sides[::-1]
                slowest = {id(side): max(reply["ms"] for reply in side.tell("step", kind)) for side in order}
                if number > 0:
                    times[kind].append((slowest[id(processes)], slowest[id(threads)]))
    return [
        results.case(
            f"step of {count} replicas: {title}",
            "ms",
            "threads of one process",
            times[kind],
            None,
            smaller_is_better=True,
        )
        for kind, title in TITLES.items()
    ]
