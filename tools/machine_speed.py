"""Measure how much slower than an idle machine of the reference's kind this one is now; the tests wait so much longer.

Each processor counts for a second, all at once as the tests will use them. What counts is how far each comes: a slower
processor, other programs and a limit on the container's time all make it less. The factor is printed, at least 1 and at
most 8; the runner (./dev test, ./dev stress) hands it to all tests in TESSERA_TEST_PATIENCE.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass

SECONDS = 1.0
# Rounds a second of a processor of the reference: an AMD EPYC in the cloud, of which other programs take nothing.
REFERENCE_ROUNDS = 1250.0
LEAST, MOST = 1.0, 8.0


@dataclass(frozen=True)
class Speed:
    rounds: float  # a second, of the mean processor
    share: float  # of the processor's time that the counting got

    @property
    def factor(self) -> float:
        """In steps of a tenth, rounded up."""
        slower = REFERENCE_ROUNDS / self.rounds if self.rounds > 0 else MOST
        return min(MOST, max(LEAST, math.ceil(slower * 10) / 10))


def a_round() -> int:
    total = 0
    for value in range(10_000):
        total = (total * 31 + value) & 0xFFFFFFFF
    return total


def count() -> tuple[int, float, float]:
    """Rounds, and what they took of the wall's time and of the processor's."""
    rounds = 0
    begin, begin_cpu = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - begin) < SECONDS:
        a_round()
        rounds += 1
    return rounds, passed, time.process_time() - begin_cpu


def measure() -> Speed:
    pipes = []
    for _ in os.sched_getaffinity(0):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.write(writer, " ".join(map(str, count())).encode())
            finally:
                os._exit(0)
        os.close(writer)
        pipes.append(reader)
    counted = []
    for reader in pipes:
        with os.fdopen(reader) as pipe:
            counted.append(tuple(float(part) for part in pipe.read().split()))
        os.wait()
    seconds = sum(wall for _, wall, _ in counted)
    return Speed(sum(rounds for rounds, _, _ in counted) / seconds, sum(cpu for _, _, cpu in counted) / seconds)


def main() -> int:
    speed = measure()
    print(f"{speed.factor:.1f}")
    print(f"{speed.rounds:.0f} rounds a second, {speed.share:.0%} of the processors' time", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
