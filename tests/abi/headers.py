"""Reads the public headers: functions with their doc blocks, structs and enums. Shared by the ABI gates.

The headers are hand written in one style (docs/ABI.md), so a few regular expressions read them; what they do not
understand is an error, never skipped.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "capi" / "include"
FUNCTION = re.compile(
    r"(?:/\*\*(?P<doc>(?:(?!\*/).)*)\*/\s*)?"
    r"TSR_API\s+(?:TSR_MUST_USE\s+)?(?P<type>[\w\s]+?[\s*]+?)(?P<name>tsr_\w+)\s*\((?P<params>[^;]*)\)\s*;",
    re.DOTALL,
)


@dataclass
class Function:
    header: str
    name: str
    returns: str
    params: list
    doc: str


def headers():
    return sorted((INCLUDE / "tessera").glob("*.h"))


def parameter_name(text):
    function_pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)", text)
    return function_pointer.group(1) if function_pointer else re.search(r"(\w+)(?:\[\w*\])?\s*$", text).group(1)


def functions():
    found = []
    for path in headers():
        text = path.read_text()
        here = []
        for match in FUNCTION.finditer(text):
            params = [p.strip() for p in match["params"].split(",")]
            names = [] if params == ["void"] else [parameter_name(p) for p in params]
            doc = re.sub(r"^\s*\*", "", match["doc"] or "", flags=re.MULTILINE)
            here.append(Function(path.name, match["name"], " ".join(match["type"].split()), names, doc))
        declared = len(re.findall(r"^TSR_API\b", text, flags=re.MULTILINE))
        if declared != len(here):
            raise SystemExit(f"{path.name}: {declared} lines begin with TSR_API, {len(here)} functions were understood")
        found += here
    return found


STRUCT = re.compile(r"typedef struct (?P<name>tsr_\w+) \{(?P<body>.*?)\n\} (?P=name);", re.DOTALL)


def structs():
    """Public structs with their field names, in order: {name: [field, ...]}."""
    found = {}
    for path in headers():
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for match in STRUCT.finditer(text):
            fields = [f.strip() for f in match["body"].split(";") if f.strip()]
            found[match["name"]] = [parameter_name(f) for f in fields]
        opened = len(re.findall(r"struct\s+\w+\s*\{", text))
        if opened != len(STRUCT.findall(text)):
            raise SystemExit(f"{path.name}: {opened} structs are defined, {len(STRUCT.findall(text))} were understood")
    return found


ENUM = re.compile(r"\benum\s*\{(?P<body>.*?)\}", re.DOTALL)


def constants():
    """Enumerators in order of the headers: [name, ...]. Each must have an explicit number."""
    found = []
    for path in headers():
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        for match in ENUM.finditer(text):
            for entry in filter(None, (e.strip() for e in match["body"].split(","))):
                name, equals, _ = entry.partition("=")
                if not equals:
                    raise SystemExit(f"{path.name}: the enumerator {name} has no explicit number")
                found.append(name.strip())
    return found
