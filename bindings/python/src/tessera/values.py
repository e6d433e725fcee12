"""Python values as the typed JSON of docs/FORMAT.md, so that a checkpoint returns what was saved, in any language.

Supported are None, bool, int of any size, float (including NaN and infinities), str, bytes, list, tuple, and dict with
keys of these types; NumPy scalars become Python's. Nothing is pickled: other types are refused.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import InvalidArgument

__all__ = ["decode", "encode"]

_MAX_DEPTH = 64


def encode(value: object, name: str = "value") -> str:
    """The typed JSON of a Python value; `name` is for messages.

    Raises
    ------
    InvalidArgument
        The type is not listed above, or the value is nested more than 64 levels deep.
    """
    return json.dumps(_encoded(value, name, 0), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode(text: str) -> Any:
    """The Python value of typed JSON."""
    return _decoded(json.loads(text))


def _encoded(value: object, place: str, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise InvalidArgument(f"{place[:60]}... is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**63 else {"~": "int", "v": _decimal(number)}
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"~": "double", "v": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, bytes):
        return {"~": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {"~": "tuple", "v": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and "~" not in value:
            return {str(key): _encoded(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
        pairs = [
            [_encoded(key, f"{place} key {key!r}", depth + 1), _encoded(item, f"{place}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"~": "map", "v": pairs}
    raise InvalidArgument(
        f"{place} is a {type(value).__name__}; a checkpoint holds models, optimizers, samplers, arrays, objects with "
        "state_dict(), and None, bool, int, float, str, bytes, list, tuple or dict of these; nothing is pickled"
    )


def _decimal(number: int) -> str:
    """Like str(), but for numbers of any length."""
    if number < 0:
        return "-" + _decimal(-number)
    if number < 10**4000:
        return str(number)
    half = int(number.bit_length() * 0.30103) // 2
    high, low = divmod(number, _power_of_ten(half))
    return _decimal(high) + _decimal(low).rjust(half, "0")


def _integer(digits: str) -> int:
    if digits.startswith("-"):
        return -_integer(digits[1:])
    if len(digits) <= 4000:
        return int(digits)
    half = len(digits) // 2
    high, low = _integer(digits[:half]), _integer(digits[half:].lstrip("0") or "0")
    return high * _power_of_ten(len(digits) - half) + low


def _power_of_ten(exponent: int) -> int:
    return int(pow(10, exponent))


def _decoded(document: Any) -> Any:
    if isinstance(document, list):
        return [_decoded(item) for item in document]
    if not isinstance(document, dict):
        return document
    kind = document.get("~")
    if kind is None:
        return {key: _decoded(item) for key, item in document.items()}
    content = document["v"]
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "tuple":
        return tuple(_decoded(item) for item in content)
    if kind == "map":
        return {_decoded(key): _decoded(item) for key, item in content}
    if kind == "int":
        return _integer(content)
    if kind == "double":
        return float(content)
    raise InvalidArgument(f"a value has the unknown kind {kind!r}; it was written by a newer version")
