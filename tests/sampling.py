"""Samples of exhaustive lists of cases: one sample per commit, everything with `./dev test --long`.

Sample only lists whose cases all show the same behaviour. `tools/dev/test.sh` derives TESSERA_TEST_SEED from the
commit's id unless `--seed` gives it; the default is 0.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

LONG = os.environ.get("TESSERA_TEST_LONG") == "1"
SEED = os.environ.get("TESSERA_TEST_SEED", "0")


def sample(cases: Iterable[Case], n: int, of: str) -> list[Case]:
    """Draw `n` of the cases and keep their order. `of` names the list: different lists get different samples."""
    everything = list(cases)
    if LONG or n >= len(everything):
        return everything
    places = sorted(random.Random(f"{SEED} {of}").sample(range(len(everything)), n))
    return [everything[place] for place in places]


def told() -> str:
    return "samples: everything (--long)" if LONG else f"samples: replay with TESSERA_TEST_SEED={SEED}"
