"""The words that our prose avoids (docs/STYLE.md), each with what to write instead.

    tools/prose.py [FILE|FOLDER]...     without arguments: the COVERED places

Looks at Markdown outside code, comments of C headers, string literals of C and C++, docstrings, Javadoc and rustdoc. Prints
`file:line: word: what to write instead` for each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Add a place when it is clean.
COVERED = (
    "README.md CHANGELOG.md CONTRIBUTING.md bindings/java/README.md bindings/python/README.md bindings/rust/README.md "
    "examples/README.md docs/ABI.md docs/COMMAND.md docs/MEMORY.md docs/RUNNING.md docs/SAFETY.md docs/SCALING.md "
    "docs/STORAGE.md docs/STYLE.md"
).split()


class Rule(NamedTuple):
    pattern: str  # words are separated by one space each; case is ignored
    instead: str
    example: str


_RATE = "once|times|bytes|[KMG]iB|ms|us|calls|copy|copies|one|threads?|instructions|messages|elements|files?|values|samples"
_PER = "rank|host|step|call|round|second|parameter|tensor|machine|file|process|communicator|save|language|thread"
RULES = [
    Rule(r"tells?|telling|told", "says, shows, reports; raises, returns", "the error tells the rank"),
    Rule(r"(?:say|says|said) so", "name what it says", "the header says so"),
    Rule(r"shall", "must, will", "one that is stopped shall hear it"),
    Rule(r"of (?:its|their) own(?! \w+)|of (?:its|their) own (?=and|that|which|is|in|on|for|to|with)", "its own, separate", "a thread of its own"),
    Rule(r"asked for", "target; requested", "what was asked for"),
    Rule(r"that which", "the one that, what", "beside that which is there"),
    Rule(r"by (?:itself|themselves)", "automatically; alone, on its own", "it starts by itself"),
    Rule(r"where (?:none|nobody|there (?:is|are|was|were) (?:none|no))", "if there is no, if none", "where none is given"),
    Rule(r"as (?:it is|they are|it was|they were)(?= ?[,.;:)])", "unchanged", "the file stays as it is."),
    Rule(r"(?:takes?|took) (?:at most |about )?0\.\d+ of", "N times faster, N % less", "takes 0.11 of its time"),
    Rule(r"would be to be|(?:is|are|was|were) to be", "must be, will be", "it is to be closed"),
    Rule(r"such(?= ?[,.;:)]| (?:is|are|were)\b)", "repeat the noun", "cut into such."),
    Rule(r"beside", "next to, with, against; besides", "a server beside it"),
    Rule(r"whole(?! numbers?)", "complete, full, entire; unsharded", "a whole tensor"),
    Rule(r"at once", "immediately; at the same time", "it fails at once"),
    Rule(r"the other way (?:a)?round", "in the opposite order, vice versa", "or the other way round"),
    Rule(r"former(?:ly)?", "previous, earlier", "the former checkpoint"),
    Rule(r"for ever", "forever, indefinitely", "it waits for ever"),
    Rule(r"in silence|without a word", "silently; without an error", "it was lost in silence"),
    Rule(r"so (?:long|many)(?! (?:as|that))", "how long, how many", "a step lasts so long"),
    Rule(r"(?:those|who|what) (?:that )?(?:is|are|was|were) left", "the remaining, the surviving", "those that are left"),
    Rule(r"want of", "lack of", "for want of memory"),
    Rule(r"anew", "again", "it is made anew"),
    Rule(r"(?:go|goes|going|went) on(?! to\b)", "continue, resume", "training goes on"),
    Rule(r"(?:lie|lies|lay) (?:in|on|at|there|where|under|below)", "is in, is stored in", "it lies in a folder"),
    Rule(r"for who(?: \w+s)", "for people who", "for who calls it"),
    Rule(r"(?<!there )(?:is|are) no (?!longer|more |need|better|different)\w+", "is not a", "a link is no root"),
    Rule(r"(?<=[.;] )of (?!course)\w+", "put the subject first", "Done. Of PyTorch's files one is read."),
    Rule(r"(?<=[.;] )what (?:is|was|are|were|has)", "put the subject first", "Done. What is cut short is not there."),
    Rule(rf"(?:{_RATE}) a (?:{_PER})(?! (?:of|to|that))", "per", "once a step"),
    Rule(r"has to be (?:looked|argued)|(?:is|are) looked (?:at|for|into)", "use an active verb", "it is looked at"),
]  # fmt: skip
_FINDERS = [(rule, re.compile(rf"(?<!\w)(?:{rule.pattern})(?!\w)", re.I)) for rule in RULES]

_STRINGS = r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])'|#include[^\n]*|(?P<keep>\"(?:\\.|[^\"\\\n])*\")"
# What is prose in a file that is not Markdown: the groups named keep.
PARTS = {
    ".h": r"(?P<keep>/\*.*?\*/|//[^\n]*)",
    ".cc": _STRINGS, ".hpp": _STRINGS, ".c": _STRINGS,
    ".java": r"(?P<keep>/\*\*.*?\*/)",
    ".rs": r"(?P<keep>//[/!][^\n]*)",
    ".py": r'(?P<keep>"""(?:.*?)""")', ".pxi": r'(?P<keep>"""(?:.*?)""")',
}  # fmt: skip
# Code blocks, comments, code spans and targets of links.
MARKDOWN_CODE = r"^ *```.*?^ *```$|^    [^\n]*|<!--.*?-->|`[^`]+`|\]\([^)]*\)|https?:\S+"


def gap(text: str) -> str:
    """Stands for what is not prose, so that words before and after it are not neighbours; keeps the lines."""
    return " \N{BULLET} " + "\n" * text.count("\n")


def prose(text: str, suffix: str) -> str:
    """The prose of a file, on the same lines."""
    if suffix == ".md":
        return re.sub(MARKDOWN_CODE, lambda found: gap(found[0]), text, flags=re.M | re.S)
    kept, end = [], 0
    for found in re.finditer(PARTS[suffix], text, re.S):
        between = text[end : found.start()]
        kept.append(gap(between) if between.strip() else "\n" * between.count("\n") + " ")
        plain = re.sub(r"``?[^`\n]+``?|\{@\w+ [^}]*\}", gap(""), found["keep"] or gap(found[0]))
        kept.append(re.sub(r"^\s*(?:\*|//[/!]?)", " ", plain.replace("\\n", "  ").strip('"'), flags=re.M))
        end = found.end()
    return "".join(kept)


def findings(text: str, suffix: str) -> list[tuple[int, str, str]]:
    """The line, the words and what to write instead."""
    words = [(word, number) for number, line in enumerate(prose(text, suffix).split("\n"), 1) for word in line.split()]
    joined, lines = " ".join(word for word, _ in words), []
    for word, number in words:
        lines += [number] * (len(word) + 1)
    found = [(lines[hit.start()], hit[0], rule.instead) for rule, finder in _FINDERS for hit in finder.finditer(joined)]
    return sorted(found)


def files(places: list[str]) -> list[Path]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if Path(name).suffix in {".md", *PARTS} and (ROOT / name).is_file()]


def main(places: list[str]) -> int:
    count = 0
    for path in files([str(Path(place).resolve()) for place in places] or list(COVERED)):
        for line, words, instead in findings(path.read_text(encoding="utf-8"), path.suffix):
            print(f"{path.relative_to(ROOT)}:{line}: {words}: {instead}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
