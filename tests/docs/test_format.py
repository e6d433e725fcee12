"""docs/FORMAT.md and docs/manifest.schema.json describe the manifests that savers write."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tessera as ts

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEMA = json.loads((DOCS / "manifest.schema.json").read_text(encoding="utf-8"))
PAGE = (DOCS / "FORMAT.md").read_text(encoding="utf-8")


def state(comm: ts.Comm) -> ts.State:
    """Whatever a manifest can hold: tensors in every kind of layout, tied ones, values of every kind."""
    shape = (6, 4)
    rows = ts.Layout(shape, [1], [ts.Shard(0)])
    pieces = [ts.Box((0, 0), (2, 4)), ts.Box((2, 0), (4, 4))]
    boxes = ts.Layout.from_boxes(shape, [pieces])
    tied = np.ones(5, np.float32)
    return ts.State(
        replicated=np.ones((3, 2)),
        scalar=np.array(7, np.int64),
        empty=np.zeros((0, 3), np.float16),
        tied=tied,
        also=tied,
        sharded=ts.Sharded(rows, [np.ones(shape, np.float32)], 0),
        boxed=ts.Sharded(boxes, [np.ones(box.sizes, np.float32) for box in pieces], 0),
        nothing=None,
        flag=True,
        number=-(2**63),
        large=2**80,
        real=0.1,
        nan=math.nan,
        text='"µ',
        raw=b"\0\xff",
        both=(1, [2, {"a": {3: 4}}]),
        mine=ts.PerRank(comm, {"position": 3}),
    )


def manifest(root: Path, **options: Any) -> Any:
    with ts.init() as comm, ts.Saver(comm, root, **options) as saver:
        saver.save(42, state(comm), metrics={"loss": 0.5, "worst": math.inf})
    (path,) = root.glob("step-*/manifest.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("format", ["tessera", "torch_dcp"])
def test_a_manifest_keeps_to_its_schema(tmp_path: Path, format: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    written = manifest(tmp_path, format=format)
    assert [error.message for error in validator.iter_errors(written)] == []
    written["step"] = -1
    assert not validator.is_valid(written), "the schema sees what is wrong"


def test_every_key_is_in_the_page(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`[a-z_0-9`, ]+) \|", PAGE.split("## manifest.json")[1].split("### ")[0], re.M)
    told = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    written = manifest(tmp_path)
    assert sorted(told) == sorted(SCHEMA["properties"])
    assert list(written) == [key for key in told if key in written], "in another order than the page tells them"
    kinds = set(re.findall(r'\{"~":"(\w+)"', PAGE))
    assert kinds == set(re.findall(r'"~": "(\w+)"', json.dumps(written["values"]))), "not every kind was tried"
