"""How long tests wait for what has to happen, on a machine that may be slow: what tests/patience.hpp is in C++."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FACTOR = float(os.environ.get("TESSERA_TEST_PATIENCE", "1"))
assert FACTOR >= 1, f"TESSERA_TEST_PATIENCE is {FACTOR}; at least 1"


def patience(seconds: float) -> float:
    """A wait, or the bound of one, stretched; a timeout that is itself under test stays as it is."""
    return round(seconds * FACTOR, 3)


def until(condition: Callable[[], T], seconds: float, what: str | Callable[[], str]) -> T:
    """What `condition` returns once it is true; fails with `what` when the time is over."""
    deadline = time.monotonic() + patience(seconds)
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience(seconds):g} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return found
