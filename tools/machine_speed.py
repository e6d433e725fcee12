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


def count() -> tuple[int, float]:
    """Rounds, and the seconds that they took."""
    rounds = 0
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < SECONDS:
        a_round()
        rounds += 1
    return rounds, passed


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
    return Speed(sum(rounds for rounds, _ in counted) / sum(passed for _, passed in counted))


def main() -> int:
    print(f"{measure().factor:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
