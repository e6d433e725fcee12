"""Typed JSON: Python values there and back."""

import math
import random

import numpy as np
import pytest
import tessera as ts
from tessera.values import decode, encode

VALUES = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    -(7**9999),
    0.0,
    -0.0,
    1.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    "",
    'ünï\U0001f600"\\\n',
    b"",
    b"\0\xff",
    [],
    (),
    {},
    [1, [2.0, ("x", b"y")]],
    {"a": {"b": [None]}},
    {1: "int", None: "none", 2.5: "float", b"k": "bytes", (1, "t"): "tuple", "s": "str"},
    {"~": "a tag of the user's own", "v": 1},
]


def same(a, b):
    return type(a) is type(b) and a == b and repr(a) == repr(b) if not isinstance(a, int) else a == b


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(type(value).__name__))
def test_a_value_comes_back_as_it_was(value):
    back = decode(encode(value))
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)


def test_nan_comes_back():
    assert math.isnan(decode(encode(math.nan)))


def test_very_long_integers_come_back():
    number = random.Random(3).getrandbits(120_000) | 1 << 119_999
    assert decode(encode(number)) == number
    assert decode(encode(-number)) == -number
    power = 10**20_000
    assert decode(encode(power)) == power


def test_numpy_scalars_become_python_ones():
    assert decode(encode([np.float32(0.5), np.int64(7), np.bool_(True)])) == [0.5, 7, True]
    assert decode(encode(np.float64(0.25))) == 0.25


@pytest.mark.parametrize("value", [object(), {1, 2}, [1, {"a": lambda: 0}], 1j, range(3)])
def test_what_is_no_value_is_refused_by_place(value):
    with pytest.raises(ts.InvalidArgument, match="extra"):
        encode(value, "extra")


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ts.InvalidArgument, match="deep"):
        encode(loop)
