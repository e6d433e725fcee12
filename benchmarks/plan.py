"""What one of 1,024 ranks computes for a save and for a load of 100,000 tensors, and the schedule of a pipeline
of 512 ranks with 4,096 micro-batches, made, checked and simulated; against the targets.

`plan.cc` plays one rank, without the others: a plan takes no message. Its times are of the processor, not of a clock.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import results

MILLISECONDS = {
    "save, first": 50.0,
    "save, again": 1.0,
    "load": 15.0,
    "manifest, parsed": None,
    "pipeline, 1f1b": 1000.0,
    "pipeline, zbv": 1000.0,
}


def bench(binaries: Path) -> list[results.Case]:
    cases = []
    output = subprocess.run([binaries / "plan"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in map(json.loads, output.splitlines()):
        bound = MILLISECONDS[line["case"].split(", rank ")[0]]
        measured = [(ms, bound or ms) for ms in line["ms"]]
        cases.append(
            results.case(
                line["case"], "processor ms", "bound" if bound else "none", measured,
                None if bound is None else 1.0, smaller_is_better=True,
            )
        )  # fmt: skip
    return cases
