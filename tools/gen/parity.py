"""Which function of the C library each binding offers under which name, and where it is tested: docs/PARITY.md. What a
binding or its tests lack is a fault, if it is not excused below, and so is an excuse that is no longer needed.

It reads sources only. That each function really runs is proved where the tests run: in Python and Rust by a test that
counts the calls (the proofs below); for Java the way is followed by names, from the JNI function that calls the library
to the Java method above it and to a test that names this method and its class.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from c_api import Api

PYTHON, JAVA, RUST = "bindings/python", "bindings/java/src", "bindings/rust/tessera"

# The tests that fail when a function was not called at run time.
PROOFS = {"Python": f"{PYTHON}/tests/test_parity.py", "Rust": f"{RUST}/tests/every_function.rs"}

# binding -> function -> why it does without
EXCUSES: dict[str, dict[str, str]] = {
    "Python": {
        "tsr_state_add_source": "`State` walks over an object with `state_dict` directly, because it may hold arrays "
        "([why](ARCHITECTURE.md#departures-from-the-design-pages))"
    },
    "Java": {},
    "Rust": {},
}

# Where a definition begins, by suffix; group 1 is its name. A unit of code goes from one definition to the next.
DEFINITIONS = {
    ".py": r"(?:    )?(?:async )?def (\w+)",  # nested ones belong to what they are in
    ".pyx": r"\s*(?:cpdef|cdef|def)\s+(?:[\w ]+[ *])?\*?(\w+)\(",
    ".java": r"\s+(?=\S)(?![?:]|return\b|throw\b|new\b|else\b|assert\b)(?:[\w.<>\[\], ?@]+\s)?(\w+)"
    r"\((?:(?!->)[^;{])*(?:\{.*)?$",
    ".cc": r"(?!return\b|using\b)(?:[\w:<>,*&]+\s+)+[*&]?(\w+)\([^;{]*(?:\{.*)?$",
    ".rs": r"\s*(?:pub(?:\(\w+\))?\s+)?(?:const\s+|unsafe\s+)*(?:extern \"C\"\s+)?fn (\w+)",
}
OWNERS = {
    ".py": r"class (\w+)",
    ".pyx": r"cdef class (\w+)",
    ".rs": r"\s*(?:unsafe\s+)?impl(?:<[^{]*?>)?\s+(?:[\w:<>', ]+\s+for\s+)?(\w+)",
}
DEFINITIONS[".pxi"], OWNERS[".pxi"] = DEFINITIONS[".pyx"], OWNERS[".pyx"]
KEYWORDS = {"if", "for", "while", "switch", "catch", "try", "synchronized", "super", "this"}
CONSTRUCTORS = {"__init__", "__cinit__"}


class Unit(NamedTuple):
    file: str
    owner: str  # class, or "" for a function
    name: str
    text: str

    def spelling(self, joint: str) -> str:
        """The name under which a user knows it."""
        if self.name in CONSTRUCTORS or self.name in ("", self.owner):
            return self.owner or Path(self.file).name
        if self.name == "fmt" or re.match(r"_[a-z]", self.name):  # inside a macro of Rust; a helper
            return Path(self.file).name
        return f"{self.owner}{joint}{self.name}" if self.owner else self.name

    def is_private_java(self) -> bool:
        return self.name != self.owner and "private " in self.text.split("(")[0]


def without_comments(text: str, suffix: str) -> str:
    if suffix in (".py", ".pyx", ".pxi"):
        return re.sub(r"#.*", "", re.sub(r'"""(?:.|\n)*?"""', "", text))
    return re.sub(r"//.*", "", re.sub(r"/\*(?:.|\n)*?\*/", "", text))


def units_of(root: Path, *patterns: str) -> list[Unit]:
    units = []
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            units += file_units(path, path.relative_to(root).as_posix())
    return units


def file_units(path: Path, file: str) -> Iterator[Unit]:
    definition = re.compile(DEFINITIONS[path.suffix])
    new_owner = re.compile(OWNERS.get(path.suffix, r"(?!)"))
    owner = path.stem if path.suffix == ".java" else ""
    name, lines = "", []
    for line in without_comments(path.read_text(encoding="utf-8"), path.suffix).splitlines():
        if found := new_owner.match(line):
            yield Unit(file, owner, name, "\n".join(lines))
            owner, name, lines = found[1], "", []
        elif (found := definition.match(line)) and found[1] not in KEYWORDS:
            yield Unit(file, owner, name, "\n".join(lines))
            if path.suffix != ".java" and not line.startswith(" "):
                owner = ""
            name, lines = found[1], [line]
        else:
            lines.append(line)
    yield Unit(file, owner, name, "\n".join(lines))


def using(units: list[Unit], word: str, pattern: str) -> list[Unit]:
    """The units whose text matches the pattern, which holds the word: looking for that first is ten times faster."""
    compiled = re.compile(pattern.format(word))
    return [unit for unit in units if word in unit.text and compiled.search(unit.text)]


class Place(NamedTuple):
    spelling: str
    test: str


class Python:
    """`tsr_x` is `x` of native/*.pxi, which the typed modules call as `_core.x`."""

    name = "Python"

    def __init__(self, root: Path) -> None:
        self.core = units_of(root, f"{PYTHON}/native/*.pyx", f"{PYTHON}/native/*.pxi")
        self.typed = units_of(root, f"{PYTHON}/src/tessera/[!_]*.py", f"{PYTHON}/src/tessera/_[!o]*.py")

    def place(self, function: str) -> Place | str:
        if not using(self.core, function, r"\b{}\("):
            return "not called"
        above = using(self.typed, function.removeprefix("tsr_"), r"\b_core\.{}\b")
        inside = using(self.core, function.removeprefix("tsr_"), r"^def {}\(")
        spelling = above[0].spelling(".") if above else f"_core.{inside[0].name}" if inside else "within others"
        return Place(spelling, PROOFS[self.name])


class Rust:
    """The safe crate calls `tessera_sys::tsr_x`."""

    name = "Rust"

    def __init__(self, root: Path) -> None:
        self.units = units_of(root, f"{RUST}/src/**/*.rs")

    def place(self, function: str) -> Place | str:
        above = using(self.units, function, r"\b{}\b")
        if not above:
            return "not called"
        named = [unit for unit in above if unit.name]
        return Place(self.public(named) or (named or above)[0].spelling("::"), PROOFS[self.name])

    def public(self, level: list[Unit]) -> str | None:
        """The first public function on the way up from these, within their file; what has none is within others."""
        inner = bool(level) and (level[0].owner.endswith("Inner") or level[0].name == "drop")
        seen: list[Unit] = []
        while level:
            for unit in level:
                if re.match(r"\s*pub\s+(?:const\s+|unsafe\s+)*fn", unit.text) and not unit.owner.endswith("Inner"):
                    return unit.spelling("::")
            seen += level
            level = [
                unit
                for below in level
                if below.name not in ("drop", "fmt")
                for unit in self.units
                if unit.file == below.file and unit not in seen and re.search(rf"\b{below.name}\(", unit.text)
            ]
        return "within others" if inner else None


class Java:
    """A JNI function calls `tsr_x`; a table names it for Java: method<ddp_ready>("ddpReady") is Native.ddpReady."""

    name = "Java"

    def __init__(self, root: Path) -> None:
        self.native = units_of(root, f"{JAVA}/main/native/*.cc")
        header = root / f"{JAVA}/main/native/jni.hpp"
        self.header = header.read_text(encoding="utf-8") if header.is_file() else ""
        self.java = [unit for unit in units_of(root, f"{JAVA}/main/**/*.java") if unit.owner != "Native"]
        self.name_by_user()
        self.names: dict[str, list[str]] = defaultdict(list)
        for unit in self.native:
            for shim, name in re.findall(r'method<(\w+)>\(\s*"(\w+)"', unit.text):
                self.names[shim].append(name)
        self.tests = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(root.glob(f"{JAVA}/test/**/*Test.java"))
        }
        self.words = {file: set(re.findall(r"\w+", text)) for file, text in self.tests.items()}

    def name_by_user(self) -> None:
        """The methods of a class that one other extends are the latter's to who calls them."""
        heirs: dict[str, set[str]] = defaultdict(set)
        for unit in self.java:
            for parent in re.findall(rf"\bclass {unit.owner} extends (\w+)", unit.text):
                heirs[parent].add(unit.owner)
        only = {parent: next(iter(children)) for parent, children in heirs.items() if len(children) == 1}
        self.java = [unit._replace(owner=only.get(unit.owner, unit.owner)) for unit in self.java]

    def place(self, function: str) -> Place | str:
        shims = using(self.native, function, r'\b{}\b(?!")')
        if not shims and not re.search(rf"\b{function}\(", self.header):
            return "not called"
        shims += [caller for shim in shims for caller in using(self.native, shim.name, r"\b{}[(<]") if shim.name]
        if function.endswith("_init"):  # called by the constructors of what has options
            return self.everywhere()
        for name in [name for shim in shims for name in self.names.get(shim.name, ())]:
            seen: list[Unit] = []
            level = using(self.java, name, r"\bNative(?:\.|::){}\b")
            if direct := [file for file, text in self.tests.items() if not level and f"Native.{name}(" in text]:
                return Place(f"Native.{name}", direct[0])
            while level:
                for unit in level:
                    if not unit.is_private_java() and (test := self.test_of(unit)):
                        return Place(self.closing(function, unit) or unit.spelling("."), test)
                seen += level
                level = [
                    unit
                    for below in level
                    if below.name
                    for unit in using(self.java, below.name, r"\b{}\(")
                    if unit not in seen and (unit.owner == below.owner or below.owner in unit.text)
                ]
        # Under every call: errors and the like.
        return "in no test" if shims and any(self.names.get(shim.name) for shim in shims) else self.everywhere()

    def closing(self, function: str, unit: Unit) -> str | None:
        """What destroys an object is given to it where it is made."""
        closes = any(other.owner == unit.owner and other.name == "close" for other in self.java)
        return f"{unit.owner}.close" if function.endswith("_destroy") and closes else None

    def everywhere(self) -> Place | str:
        tests = [file for file in self.tests if "Error" in file or "Comm" in file]
        return Place("within others", tests[0]) if tests else "in no test"

    def test_of(self, unit: Unit) -> str | None:
        name = unit.owner if unit.name in ("", unit.owner) else unit.name
        called = re.compile(rf"\b{name}\(")
        files = [file for file, words in self.words.items() if unit.owner in words and name in words]
        found = [file for file in files if called.search(self.tests[file])]
        return min(found, key=lambda file: (unit.owner not in Path(file).stem, file), default=None)


def exported(api: Api, root: Path) -> dict[str, list[str]]:
    """The exported functions, by header and in its order."""
    names = set((root / "capi/abi/symbols.txt").read_text(encoding="utf-8").split())
    found: dict[str, list[str]] = {}
    for function in api.functions:
        if function.name in names:
            found.setdefault(function.header, []).append(function.name)
    if missing := names - {name for listed in found.values() for name in listed}:
        raise SystemExit(f"exported, but in no header: {', '.join(sorted(missing))}")
    return found


Places = dict[str, dict[str, Place | str]]  # by binding and function; a text says what is wrong


def places(api: Api, root: Path) -> Places:
    return {
        binding.name: {function.name: binding.place(function.name) for function in api.functions}
        for binding in (Python(root), Java(root), Rust(root))
    }


def spellings(of: dict[str, Place | str]) -> dict[str, str]:
    """The names under which a user knows functions."""
    return {
        name: place.spelling for name, place in of.items() if isinstance(place, Place) and " " not in place.spelling
    }


def page(api: Api, root: Path, found: Places) -> tuple[str, list[str]]:
    """The text of docs/PARITY.md, and what is wrong."""
    faults = [f"{name}: {proof} is missing" for name, proof in PROOFS.items() if not (root / proof).is_file()]
    lines = [
        "# Parity of the bindings",
        "",
        "All functions that libtessera exports, with their name in each binding and the test that covers them. In",
        'Python and Rust this test counts the calls of a run, and fails if a function was not called. "within others"',
        "means that the binding only calls it inside other functions.",
        "",
        "`./dev gen` generates this page; a test fails if a binding lacks a function.",
    ]
    for header, functions in exported(api, root).items():
        lines += ["", f"## tessera/{header}", "", "| C | Python | Java | Rust |", "|---|---|---|---|"]
        for function in functions:
            cells = [f"`{function}`"]
            for binding, excuses in EXCUSES.items():
                place, excuse = found[binding][function], excuses.get(function)
                if isinstance(place, Place):
                    if excuse:
                        faults.append(f"{binding}: {function} is there now, its excuse can go")
                    name = place.spelling if " " in place.spelling else f"`{place.spelling}`"
                    cells.append(f"{name} ([test](../{place.test}))")
                elif excuse:
                    cells.append(f"none: {excuse}")
                else:
                    faults.append(f"{binding}: {function} is {place}")
                    cells.append("**missing**")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n", faults
