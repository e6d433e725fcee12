"""What a call takes through the Python binding: call.cc, in Python."""

from __future__ import annotations

import json
import time

import numpy as np
import tessera as ts

CALLS, BATCHES = 20_000, 15


def main() -> None:
    planned = plain = 1e9
    with ts.init() as comm:
        values = np.zeros(2, np.float32)
        launch = comm.prepare("all_reduce", outputs=[values]).run
        all_reduce = comm.all_reduce
        calls = range(CALLS)
        for _ in range(BATCHES):
            begin = time.perf_counter_ns()
            for _ in calls:
                launch()
            middle = time.perf_counter_ns()
            for _ in calls:
                all_reduce(values)
            end = time.perf_counter_ns()
            for _ in calls:
                pass
            loop = time.perf_counter_ns() - end
            planned = min(planned, (middle - begin - loop) / CALLS)
            plain = min(plain, (end - middle - loop) / CALLS)
    print(json.dumps({"plan": planned, "all_reduce": plain}))


main()
