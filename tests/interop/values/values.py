"""Every kind of value as Python has it, for test_values.py: saves them, or resumes what any language saved and
compares.

usage: values.py save|check ROOT. Under each name rank 0's value, and under "own.<name>" one of every rank.
"""

import math
import sys

import tessera as ts

VALUES = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "minus seven": -7,
    "beyond doubles": 2**53 + 1,
    "most": 2**63 - 1,
    "least": -(2**63),
    "big": 2**63,
    "minus big": -(2**63) - 1,
    "huge": 2**200,
    "whole": 3.0,
    "minus zero": -0.0,
    "sum": 0.1 + 0.2,
    "exact": float(2**53),
    "tricky": 1e23,
    "largest": sys.float_info.max,
    "smallest": 5e-324,
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "text": 'a "quoted" \\ line\n\ttab \x00 NUL \x1f \x7f größe 權重 \u2028 \U0001f600 </',
    "no text": "",
    "größe.權重": "größe",
    "bytes": b'\x00\xff\x80\n"\\',
    "no bytes": b"",
    "list": [None, True, -1, 2.5, "ä", [], [[2**53 + 1]]],
    "no list": [],
    "tuple": (1, "a", (2.0,), [b"\x01"]),
    "no tuple": (),
    "map": {"z": 1, "a": {"none": None, "größe": [1.0, 2, -0.0]}, 'a "key"\n': {"deeper": {"deepest": (2**63,)}}},
    "no map": {},
    "keys": {3: "int", True: "bool", None: "null", (1, 2): "tuple", 2.5: "double", b"k": "bytes", "s": {"~": math.inf}},
    "tag": {"~": "no tag", "v": 1},
}

with ts.init() as comm:
    action, root = sys.argv[1:]
    blank = action == "check"
    state = ts.State()
    for name, value in VALUES.items():
        state[name] = None if blank else value
        state[f"own.{name}"] = ts.PerRank(comm, None if blank else value)
    with ts.Saver(comm, root) as saver:
        if action == "save":
            saver.save(1, state)
        elif saver.resume(state) != 1:
            sys.exit("there is no save")
    # What repr does not tell apart is the same: 1 and 1.0 and True are told apart, so are -0.0 and the order of keys.
    for name, value in VALUES.items():
        for what in (name, f"own.{name}"):
            if repr(state[what]) != repr(value):
                sys.exit(f"Python: {what} is {state[what]!r}, not {value!r}")
