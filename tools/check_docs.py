"""Check the pages: every relative link in every tracked *.md leads to a file (and to a heading, if it names one), every
`./dev` and `tessera` command that a page shows exists, and the pages that the project promises are there. Prints each
fault as `page:line: what` and exits 1 if there is one."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PROMISED = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "docs/ARCHITECTURE.md",
    "docs/FORMAT.md",
    "docs/PARITY.md",
    "examples/data/README.md",
]
LINK = re.compile(
    r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\s*\[[^\]]+\]:\s+(\S+)|(?:src|href)=\"([^\"]+)\""
)


DEV_COMMAND = re.compile(r"(?:^|[\s(;&|])\./dev ([a-z]\w*)")
TESSERA_COMMAND = re.compile(r"^\s*(?:\$ )?tessera ([a-z]\w*)(?: ([a-z][a-z|-]*))?(?=\s|$)")


def lines_outside_code(page: Path) -> list[tuple[int, str]]:
    kept, fenced = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            is_whole = "](" in line or line.startswith("#")
            kept.append((number, line if is_whole else re.sub(r"`[^`]*`", "", line)))
    return kept


@cache
def anchors(page: Path) -> set[str]:
    """Headings as renderers name them: lower case, punctuation dropped, spaces to hyphens, -1 for a double."""
    names: dict[str, int] = {}
    found = set()
    for _, line in lines_outside_code(page):
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.add(slug if slug not in names else f"{slug}-{names[slug]}")
            names[slug] = names.get(slug, 0) + 1
        found.update(re.findall(r"(?:id|name)=\"([^\"]+)\"", line))
    return found


def faults_of(page: Path) -> list[str]:
    faults = []
    for number, line in lines_outside_code(page):
        for match in LINK.finditer(line):
            target = unquote(next(group for group in match.groups() if group))
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(ROOT)}:{number}"
            if not file.exists():
                faults.append(f"{where}: there is no {target}")
            elif ROOT not in file.parents and file != ROOT:
                faults.append(f"{where}: {target} leads out of the project")
            elif anchor and file.suffix == ".md" and anchor.lower() not in anchors(file):
                faults.append(f"{where}: {path or page.name} has no heading #{anchor}")
    return faults


@cache
def known_commands() -> dict[str, set[str]]:
    """What there is after `./dev`, `tessera` and `tessera ckpt`, as the sources say."""
    alternatives = re.search(r"^  ((?:\w+ \| )+\w+)\)$", (ROOT / "dev").read_text(encoding="utf-8"), re.M)
    known = {"./dev": {*alternatives[1].split(" | "), "help"} if alternatives else set(), "tessera": set()}
    for source in (ROOT / "cli").rglob("*.cc"):
        text = source.read_text(encoding="utf-8")
        known["tessera"].update(re.findall(r"\btessera\.add_command\(\"([\w-]+)\"", text))
        for group, name in re.findall(r"\badd_command\(\s*(\w+), \"([\w-]+)\"", text):
            known.setdefault(f"tessera {group}", set()).add(name)
    return known


def code(page: Path) -> list[tuple[int, str]]:
    """Each line of a code block and each `span` of a page, with its line number."""
    found, fenced = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            found.append((number, line))
        else:
            found += [(number, span) for span in re.findall(r"`([^`]+)`", line)]
    return found


def unknown_commands(page: Path) -> list[str]:
    known, shown = known_commands(), []
    for number, text in code(page):
        shown += [(number, "./dev", name) for name in DEV_COMMAND.findall(text)]
        if match := TESSERA_COMMAND.match(text):
            shown.append((number, "tessera", match[1]))
            if f"tessera {match[1]}" in known and match[2]:
                shown += [(number, f"tessera {match[1]}", name) for name in match[2].split("|")]
    name_of_page = page.relative_to(ROOT) if ROOT in page.parents else page.name
    return [f"{name_of_page}:{n}: there is no {of} {name}" for n, of, name in shown if name not in known[of]]


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pages = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]
    faults = [f"{name}: promised, and not there" for name in PROMISED if not (ROOT / name).exists()]
    for page in pages:
        faults += faults_of(page) + unknown_commands(page)
    print("\n".join(faults) if faults else f"{len(pages)} pages, all links lead somewhere, all commands exist")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
