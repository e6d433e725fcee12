"""The words that our prose avoids (docs/STYLE.md), each with what to write instead.

    tools/prose.py [FILE|FOLDER]...     without arguments: the COVERED places

Looks at Markdown outside code, comments of C headers, string literals of C and C++, docstrings, Javadoc, rustdoc, and
comments, docstrings and messages of Cython.
Prints `file:line: words: what to write instead` for each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Add a place when it is clean.
COVERED = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bindings/java/README.md", "bindings/python/README.md",
    "bindings/rust/README.md", "examples/README.md", "docs/ABI.md", "docs/ARCHITECTURE.md", "docs/CHECKPOINTS.md",
    "docs/COMMAND.md", "docs/DDP.md", "docs/ENGINE.md", "docs/FORMAT.md", "docs/FROM_PYTORCH.md", "docs/FSDP.md",
    "docs/MEMORY.md", "docs/METRICS.md", "docs/OPTIMIZERS.md",
    "docs/PARITY.md", "docs/PERFORMANCE.md", "docs/RELIABILITY.md", "docs/RUNNING.md", "docs/SAFETY.md",
    "docs/SCALING.md", "docs/SCHEDULES.md", "docs/STORAGE.md",
    "docs/STYLE.md", "docs/TESTING.md", "docs/TORCH.md", "benchmarks/pages.py", "benchmarks/tables.py", "capi", "src",
    "cli", "bindings/python/native", "bindings/python/src", "bindings/java/src/main", "bindings/rust/tessera/src",
]  # fmt: skip


class Rule(NamedTuple):
    pattern: str  # words have one space between them; case is ignored
    instead: str
    example: str


_WHAT = "once|bytes|[KMG]iB|ms|us|calls|cop(?:y|ies)|one|threads?|instructions|messages|elements|files?|values"
_UNIT = "rank|host|step|call|round|second|parameter|tensor|machine|file|process|communicator|save|language|thread"
RULES = [
    Rule(r"(?:is|are|was|were|be) told|tells (?:of|what|which|whether|how)", "says, shows", "what it tells of"),
    Rule(r"(?:say|says|said) so", "name what it says", "the header says so"),
    Rule(r"shall", "must, will", "it shall be closed"),
    Rule(r"of (?:its|their) own(?: (?:and|that|which|is|in|on|for|to|with)|(?! \w))", "its own", "a thread of its own"),
    Rule(r"asked for", "target; requested", "what was asked for"),
    Rule(r"that which", "the one that, what", "next to that which is there"),
    Rule(r"by (?:itself|themselves)", "automatically; alone", "it starts by itself"),
    Rule(r"where (?:none|nobody|there (?:is|are|was|were) (?:none|no))", "if there is no", "where none is given"),
    Rule(r"as (?:it is|they are|it was|they were)(?= ?[,.;:)])", "unchanged", "the file stays as it is."),
    Rule(r"(?:takes?|took) (?:at most |about )?0\.\d+ of", "N times faster, N % less", "takes 0.11 of its time"),
    Rule(r"would be to be|(?:is|are|was|were) to be", "must be, will be", "it is to be closed"),
    Rule(r"such(?= ?[,.;:)]| (?:is|are|were)\b)", "repeat the noun", "cut into such."),
    Rule(r"beside(?! the index)", "next to, against, besides", "a server beside it"),
    Rule(r"the other way (?:a)?round", "in the opposite order, vice versa", "or the other way round"),
    Rule(r"former(?:ly)?", "previous, earlier", "the former checkpoint"),
    Rule(r"for ever", "forever, indefinitely", "it waits for ever"),
    Rule(r"in silence|without a word", "silently; without an error", "it was lost in silence"),
    Rule(r"so (?:long|many)(?! (?:as|that))", "how long, how many", "a step lasts so long"),
    Rule(r"(?:those that|who|what) (?:is|are|was|were) left", "the remaining, the surviving", "those that are left"),
    Rule(r"want of", "lack of", "for want of memory"),
    Rule(r"anew", "again", "it is made anew"),
    Rule(r"(?:go|goes|going|went) on(?! to\b)", "continue, resume", "training goes on"),
    Rule(r"(?:lie|lies|lay) (?:in|on|at|there|where|under|below)", "is in", "it lies in a folder"),
    Rule(r"for who", "for people who", "for who calls it"),
    Rule(r"(?<!there )(?:is|are) no (?!longer|more |need|better|different)\w+", "is not a", "a link is no root"),
    Rule(r"(?<=\. )(?-i:Of (?!course)|What (?:is|was|are|has)\b)\w*", "subject first", "Done. Of two one is read."),
    Rule(rf"(?:{_WHAT}) a (?:{_UNIT})(?! (?:of|to|that))", "per", "16 bytes a rank"),
    Rule(r"has to be (?:looked|argued)|(?:is|are) looked (?:at|for)", "use an active verb", "it is looked at"),
]  # fmt: skip
FINDERS = [(rule, re.compile(rf"(?<!\w)(?:{rule.pattern})(?!\w)", re.I)) for rule in RULES]

STRING = r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])'|#include[^\n]*|(?P<keep>\"(?:\\.|[^\"\\\n])*\")"
DOCSTRING = r'(?P<keep>""".*?""")'
CYTHON = r'(?:\b[bcfr])?(?P<keep>""".*?"""|"(?:\\.|[^"\\\n])*"|#[^\n]*)'
# What is prose in files that are not Markdown: the group `keep`.
PARTS = dict.fromkeys((".c", ".cc", ".hpp"), STRING) | dict.fromkeys((".pyx", ".pxi"), CYTHON)
PARTS[".py"] = DOCSTRING
PARTS |= {".h": r"(?P<keep>/\*.*?\*/|//[^\n]*)", ".java": r"(?P<keep>/\*\*.*?\*/)", ".rs": r"(?P<keep>//[/!][^\n]*)"}
# Code blocks, comments, code spans and targets of links.
MARKDOWN_CODE = r"^ *```.*?^ *```$|^    [^\n]*|<!--.*?-->|`[^`]+`|\]\([^)]*\)|https?:\S+"


def gap(text: str) -> str:
    """Stands for what is not prose: separates the words around it and keeps the lines."""
    return " \N{BULLET} " + "\n" * text.count("\n")


def prose(text: str, suffix: str) -> str:
    """The prose of a file, on the same lines."""
    if suffix == ".md":
        return re.sub(MARKDOWN_CODE, lambda found: gap(found[0]), text, flags=re.M | re.S)
    kept, end = [], 0
    for found in re.finditer(PARTS[suffix], text, re.S):
        between = text[end : found.start()]
        kept.append(gap(between) if between.strip() else between)  # adjacent literals and comments are one text
        plain = re.sub(r"``?[^`\n]+``?|\{@\w+ [^}]*\}", gap(""), found["keep"] or gap(found[0]))
        kept.append(re.sub(r"^\s*(?:\*|//[/!]?|#)", " ", plain.replace("\\n", "  ").strip('"'), flags=re.M))
        end = found.end()
    return "".join(kept)


def findings(text: str, suffix: str) -> list[tuple[int, str, str]]:
    """The line, the words and what to write instead."""
    words = [(word, number) for number, line in enumerate(prose(text, suffix).split("\n"), 1) for word in line.split()]
    joined = " ".join(word for word, _ in words)
    lines = [number for word, number in words for _ in range(len(word) + 1)]
    hits = [(hit, rule) for rule, finder in FINDERS for hit in finder.finditer(joined)]
    return sorted((lines[hit.start()], hit[0], rule.instead) for hit, rule in hits)


def files(places: list[str]) -> list[Path]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if Path(name).suffix in {".md", *PARTS} and (ROOT / name).is_file()]


def main(places: list[str]) -> int:
    found = [f"{path.relative_to(ROOT)}:{line}: {words}: {instead}"
             for path in files([str(Path(place).resolve()) for place in places] or COVERED)
             for line, words, instead in findings(path.read_text(encoding="utf-8"), path.suffix)]  # fmt: skip
    print("\n".join(found) or "no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
