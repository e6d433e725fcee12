"""What the fields of structs are to a program in another language, and how the headers tell it of them.

A struct of options is one that has an `_init` function. Its plain fields become setters of the same name; the others
(callbacks, handles, arrays) are for the bindings to fill.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from c_api import Api, Struct, Variable

# Whoever calls C says these, not the user.
OWN = {("tsr_saver_options", "writer"), ("tsr_saver_options", "writer_version"), ("tsr_fsdp_unit", "name")}
NUMBERS = {"int32_t", "int64_t", "uint64_t", "size_t", "double"}


class Option(NamedTuple):
    name: str  # as in C, without the unit of a time
    field: Variable
    kind: str  # flag, dtype, text, time, one of NUMBERS, or the C type of an enumeration
    offset: int


def kind_of(api: Api, field: Variable) -> str | None:
    """None for what is no plain field."""
    if field.type == "int32_t" and field.name.endswith("_ms"):
        return "time"
    if field.type == "const char *":
        return "text"
    if field.type in ("tsr_flag", "tsr_dtype"):
        return field.type.removeprefix("tsr_")
    if field.type in NUMBERS or any(name == field.type for _, name, _ in api.aliases):
        return field.type
    return None


def structs(api: Api) -> list[Struct]:
    inits = {function.name for function in api.functions}
    return [struct for struct in api.structs if f"{struct.name}_init" in inits]


def options(api: Api, struct: Struct, own: bool = False) -> list[Option]:
    """With what the bindings themselves say, if `own`."""
    offsets = api.layout(struct).offsets
    found = []
    for field in struct.fields:
        kind = kind_of(api, field)
        stem = field.name.removesuffix("_count")
        counts = stem != field.name and {stem, f"{stem}s"} & {each.name for each in struct.fields}
        if not kind or counts or field.name in ("struct_size", "reserved", "n"):
            continue
        if own or (struct.name, field.name) not in OWN:
            found.append(Option(re.sub("_ms$", "", field.name), field, kind, offsets[field.name]))
    return found


def handles_in(api: Api, struct: Struct) -> list[Variable]:
    """Fields that are handles of the library."""
    return [field for field in struct.fields if field.type in {f"{name} *" for _, name in api.handles}]


def plain(api: Api, struct: Struct) -> bool:
    """Whether nothing in it but handles is for the bindings to fill."""
    return all(kind_of(api, field) or field in handles_in(api, struct) for field in struct.fields)


def described(option: Option, constants: dict[str, str], words: tuple[str, str, str]) -> str:
    """The header's words on a field in another language's: how it spells constants, and true, false and nothing."""
    true, false, none = words
    text = option.field.doc
    if option.kind == "flag":
        text = re.sub(r"\b1( \(default\)(?=:)|(?=:| needs| if))", rf"{true}\1", text)
        text = re.sub(r"\b0( \(default\)(?=:)|(?=:))", rf"{false}\1", text)
        text = re.sub(r"\bdefault ([01])\b", lambda found: f"default {true if found[1] == '1' else false}", text)
    if option.kind == "time":
        text = re.sub(r"\bdefault (\d+)000\b", r"default \1 s", text)
    if option.kind == "dtype":
        text = re.sub(r"\b0( \(default\))?(?=:)", rf"{none}\1", text)
    text = text.replace("TSR_DTYPE_ of floating point", "a floating-point type").replace("NULL", none)
    for name, spelling in constants.items():
        text = re.sub(rf"\b{name}\b", spelling, text)
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") or not text else f"{text}."
