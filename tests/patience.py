"""How long tests wait for what has to happen, on a machine that may be slow: what tests/patience.hpp is in C++."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("TESSERA_TEST_PATIENCE", "1"))
assert FACTOR >= 1, f"TESSERA_TEST_PATIENCE is {FACTOR}; at least 1"


def patience(seconds: float) -> float:
    """A wait, or the bound of one, stretched; a timeout that is itself under test stays as it is."""
    return round(seconds * FACTOR, 3)
