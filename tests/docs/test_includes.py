"""The folders of src/ include each other as docs/ARCHITECTURE.md lists it, in one direction."""

import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"


def listed() -> dict[str, list[str]]:
    """Each folder, in the order of the list, with those that it may include."""
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    block = re.search(r"^```includes\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block, "docs/ARCHITECTURE.md has no list of includes"
    return {line.split()[0]: line.split()[1:] for line in block[1].splitlines()}


def folder_of(file: Path, folders: list[str]) -> str:
    """The innermost of `folders` that `file`, relative to src/, lies in."""
    for parent in file.parents:
        if str(parent) in folders:
            return str(parent)
    raise AssertionError(f"src/{file} is in no folder of the list in docs/ARCHITECTURE.md")


def included(folders: list[str]) -> dict[tuple[str, str], str]:
    """Which folder includes which, each with an example."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(SOURCES.rglob("*.[ch]*")):
        file = path.relative_to(SOURCES)
        if "stand_in" in file.parts:  # headers in place of a library's
            continue
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            assert (SOURCES / name).exists(), f"src/{file} includes {name}, which is not in src/"
            pair = (folder_of(file, folders), folder_of(Path(name), folders))
            if pair[0] != pair[1]:
                found.setdefault(pair, f"src/{file} includes {name}")
    return found


def test_every_include_is_listed() -> None:
    allowed = listed()
    for (one, other), example in included(list(allowed)).items():
        patterns = allowed[one]
        assert any(fnmatch.fnmatch(other, pattern) for pattern in patterns), f"{example}; {one} may include {patterns}"


def test_every_entry_of_the_list_is_used() -> None:
    allowed = listed()
    pairs = included(list(allowed))
    for one, patterns in allowed.items():
        used = [other for (includer, other) in pairs if includer == one]
        for pattern in patterns:
            assert fnmatch.filter(used, pattern), f"{one} includes nothing of {pattern}"


def test_the_list_goes_one_way() -> None:
    before: list[str] = []
    for folder, patterns in listed().items():
        for pattern in patterns:
            later = [name for name in listed() if fnmatch.fnmatch(name, pattern) and name not in before]
            assert not later, f"{folder} may include {later}, which come after it"
        before.append(folder)
