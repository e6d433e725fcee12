"""The one reader of the public headers: functions with their blocks, structs, constants and typedefs, all with types.

The headers are written by hand in one style (docs/ABI.md), so a few regular expressions read them, comments included,
which parsers of C drop. What they do not understand is an error, never skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "capi" / "include"

FUNCTION = re.compile(
    r"(?:/\*\*(?P<doc>(?:(?!\*/).)*)\*/\s*)?"
    r"TSR_API\s+(?:TSR_MUST_USE\s+)?(?P<type>[\w\s]+?[\s*]+?)(?P<name>tsr_\w+)\s*\((?P<params>[^;]*)\)\s*;",
    re.DOTALL,
)
STRUCT = re.compile(r"typedef struct (?P<name>tsr_\w+) \{\n(?P<body>.*?)\n\} (?P=name);", re.DOTALL)
ENUM = re.compile(r"\benum\s*\{(?P<body>.*?)\}\s*;", re.DOTALL)
NUMBER = re.compile(r"#define (?P<name>TSR_\w+) (?P<value>\d+)\n")
HANDLE = re.compile(r"typedef struct (tsr_\w+) \1;")
ALIAS = re.compile(r"typedef (\w+) (tsr_\w+);")
CALLBACK = re.compile(r"typedef (?P<type>\w+) \(\*(?P<name>tsr_\w+)\)\((?P<params>[^;]*)\);")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Variable(NamedTuple):
    """A parameter or a field. `type` is spelled as in C, with one space before the first of several stars."""

    name: str
    type: str
    length: str = ""  # of an array: "TSR_MAX_NDIM"
    doc: str = ""


@dataclass
class Function:
    header: str
    name: str
    returns: str
    params: list[Variable]
    doc: str

    def tag(self, name: str) -> str:
        """What follows @name in the doc block, up to the next tag or the line's end."""
        found = re.search(rf"@{name}\s+((?:(?!  @).)*)", self.doc)
        return found[1].strip() if found else ""


class Layout(NamedTuple):
    size: int
    align: int
    offsets: dict[str, int]


@dataclass
class Struct:
    header: str
    name: str
    fields: list[Variable]


class Constant(NamedTuple):
    name: str
    value: int
    header: str
    enumerator: bool  # or a macro


@dataclass
class Callback:
    header: str
    name: str
    returns: str
    params: list[Variable]


@dataclass
class Api:
    """Everything that the headers declare: types.h first, then the umbrella's order of headers."""

    headers: list[str] = field(default_factory=list)  # "types.h"
    handles: list[tuple[str, str]] = field(default_factory=list)  # header, name
    aliases: list[tuple[str, str, str]] = field(default_factory=list)  # header, name, type
    constants: list[Constant] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    structs: list[Struct] = field(default_factory=list)
    enums: dict[str, list[Constant]] = field(default_factory=dict)  # of those that a typedef names
    functions: list[Function] = field(default_factory=list)

    def value(self, name: str) -> int:
        return next(constant.value for constant in self.constants if constant.name == name)

    def length(self, field: Variable) -> int:
        """Of an array; 0 if it is none."""
        return self.value(field.length) if field.length.startswith("TSR_") else int(field.length or 0)

    def layout(self, struct: Struct) -> Layout:
        """As C lays it out where pointers have 64 bits; tests compare it with what a compiler says."""
        size, align = 0, 1
        offsets = {}
        for each in struct.fields:
            width, need = self.size_of(each.type)
            size = -(-size // need) * need
            offsets[each.name] = size
            size += width * (self.length(each) or 1)
            align = max(align, need)
        return Layout(-(-size // align) * align, align, offsets)

    def size_of(self, name: str) -> tuple[int, int]:
        """Size and alignment of a type."""
        if inner := next((struct for struct in self.structs if struct.name == name), None):
            layout = self.layout(inner)
            return layout.size, layout.align
        width = {"int32_t": 4, "uint32_t": 4, "uint16_t": 2}.get(self.plain(name), 8)
        return width, width

    def plain(self, name: str) -> str:
        """The type that a typedef of a number stands for."""
        return next((of for _, alias, of in self.aliases if alias == name), name)

    def names_of(self, enum: str) -> dict[str, Constant]:
        """Its constants by what tells them apart, in small letters; none for what is no enumeration."""
        constants = self.enums.get(enum, [])
        words = [constant.name.split("_") for constant in constants]
        shared = next((i for i, same in enumerate(zip(*words, strict=False)) if len(set(same)) > 1), 0)
        return {"_".join(word[shared:]).lower(): constant for word, constant in zip(words, constants, strict=True)}


def headers(include: Path = INCLUDE) -> list[Path]:
    return sorted((include / "tessera").glob("*.h"))


def variable(text: str, doc: str = "") -> Variable:
    """`const char *const *names`, `int64_t sizes[8]`, `void (*destroy)(void *)`."""
    text = " ".join(text.split())
    if pointer := re.search(r"\(\s*\*\s*(\w+)\s*\)", text):
        return Variable(pointer[1], text, "", doc)
    found = re.fullmatch(r"(.*?[\s*])(\w+)(?:\[(\w*)\])?", text)
    if not found:
        raise SystemExit(f"a declaration was not understood: {text}")
    return Variable(found[2], spelled(found[1]), found[3] or "", doc)


def spelled(text: str) -> str:
    return re.sub(r" *\* *", "*", " ".join(text.split())).replace("*", " *", 1).replace("*const", "*const ").strip()


def parameters(text: str) -> list[Variable]:
    parts = [part.strip() for part in without_comments(text).split(",")]
    return [] if parts == ["void"] else [variable(part) for part in parts]


def without_comments(text: str) -> str:
    return COMMENT.sub("", text)


def prose(comment: str) -> str:
    """The words of a comment, as one line."""
    return " ".join(re.sub(r"^\s*\*(?!/)", "", comment.strip("/*"), flags=re.MULTILINE).strip("*/ \n").split())


def fields_of(body: str, where: str) -> list[Variable]:
    """A comment belongs to the field before it on its line, else to the next one."""
    found: list[Variable] = []
    above = ""
    for token in re.finditer(r"(?P<comment>/\*.*?\*/)|(?P<field>[^;/]+);|(?P<space>\s+)", body, re.DOTALL):
        if token["comment"] is not None:
            if found and "\n" not in body[: token.start()].rpartition(";")[2]:
                found[-1] = found[-1]._replace(doc=prose(token["comment"]))
            else:
                above = prose(token["comment"])
        elif token["field"] is not None:
            found.append(variable(token["field"], above))
            above = ""
    if len(found) != without_comments(body).count(";"):
        raise SystemExit(f"{where}: {len(found)} fields were understood of {without_comments(body).count(';')}")
    return found


def counted(name: str, what: str, there: int, understood: int) -> None:
    if there != understood:
        raise SystemExit(f"{name}: {there} {what} are there, {understood} were understood")


def read_into(api: Api, path: Path) -> None:
    header, text = path.name, path.read_text(encoding="utf-8")
    # What only C++ sees declares nothing.
    bare = without_comments(re.sub(r"#ifdef __cplusplus\n\}\n.*?\n#endif\n", "", text, flags=re.DOTALL))
    api.headers.append(header)
    api.handles += [(header, found[1]) for found in HANDLE.finditer(bare)]
    api.aliases += [(header, found[2], found[1]) for found in ALIAS.finditer(bare) if found[1] != "struct"]
    api.callbacks += [
        Callback(header, found["name"], found["type"], parameters(found["params"])) for found in CALLBACK.finditer(bare)
    ]
    counted(
        header,
        "typedefs",
        len(re.findall(r"^typedef\b", bare, re.MULTILINE)),
        sum(len(pattern.findall(bare)) for pattern in (HANDLE, ALIAS, CALLBACK, STRUCT)),
    )
    for found in re.finditer(rf"{ENUM.pattern}|{NUMBER.pattern}", bare, re.DOTALL):
        if found["name"]:
            api.constants.append(Constant(found["name"], int(found["value"]), header, False))
            continue
        first = len(api.constants)
        for entry in filter(None, (entry.strip() for entry in found["body"].split(","))):
            name, equals, value = entry.partition("=")
            if not equals:
                raise SystemExit(f"{header}: the enumerator {name} has no explicit number")
            api.constants.append(Constant(name.strip(), int(value, 0), header, True))
        if typedef := ALIAS.match(bare, found.end() + 1):
            api.enums[typedef[2]] = api.constants[first:]
    structs = [Struct(header, found["name"], fields_of(found["body"], header)) for found in STRUCT.finditer(text)]
    counted(header, "structs", len(re.findall(r"struct\s+\w+\s*\{", bare)), len(structs))
    api.structs += structs
    functions = [
        Function(
            header,
            found["name"],
            spelled(found["type"]),
            parameters(found["params"]),
            re.sub(r"^\s*\*", "", found["doc"] or "", flags=re.MULTILINE),
        )
        for found in FUNCTION.finditer(text)
    ]
    counted(header, "functions", len(re.findall(r"^TSR_API\b", text, re.MULTILINE)), len(functions))
    api.functions += functions


@cache
def read(root: Path = ROOT) -> Api:
    folder = root / "capi/include/tessera"
    umbrella = (folder / "tessera.h").read_text(encoding="utf-8")
    order = sorted(re.findall(r'#include "(\w+\.h)"', umbrella), key=lambda header: header != "types.h")
    if missing := {path.name for path in folder.glob("*.h")} - {*order, "tessera.h"}:
        raise SystemExit(f"tessera.h does not include {', '.join(sorted(missing))}")
    api = Api()
    for header in order:
        read_into(api, folder / header)
    return api
