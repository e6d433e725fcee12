"""Read what the test runners of one `./dev test` wrote, print a line for each section, and close with the total.

The folder given holds `sections.tsv` (title, kind, report, exit status, seconds), written by tools/dev/test.sh. Kinds
are `ctest` and `pytest` (a JUnit XML file), `surefire` (a folder of them), `cargo` (the runner's text) and `none`. A
section that exited non-zero without a failed test to show for it (a crash, a build error) counts as one failure. What a
failed test printed is shown below its name, so that the end of a long run tells what is needed to find out why.

The exit status is 1 when anything failed, when nothing ran, or, with --strict-skips=yes, when a test was skipped for
another reason than a missing GPU: its reason has to say `needs a GPU`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

SAID_LINES = 40  # shown of a failed test
ALLOWED_SKIP = re.compile(r"needs (a|an|two|\d+) .*GPU", re.IGNORECASE)


@dataclass
class Tally:
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)  # of those that failed, the end of what they printed
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name, reason


def from_gtest_output(name: str, text: str, tally: Tally) -> bool:
    """Count the cases inside one GoogleTest program. False if the text is of none, or of one that did not end."""
    passed = re.search(r"^\[  PASSED  \] (\d+) tests?", text, re.MULTILINE)
    if not passed:
        return False
    tally.passed += int(passed[1])
    for case in re.findall(r"^\[  FAILED  \] ([\w./]+)(?:, where .*)? \(\d+ ms\)$", text, re.MULTILINE):
        tally.failed.append(f"{name}: {case}")
    for block, case in re.findall(
        r"^\[ RUN      \] [^\n]*\n((?:(?!\[ RUN ).*\n)*?)\[  SKIPPED \] ([\w./]+)(?:, where .*)? \(\d+ ms\)$",
        text,
        re.MULTILINE,
    ):
        tally.skipped.append((f"{name}: {case}", " ".join(block.split())))
    return True


def what_failed(lines: list[str]) -> str:
    """Of what a failed test printed: from GoogleTest's first complaint on, or else the end."""
    first = next((i for i, line in enumerate(lines) if line.endswith(": Failure")), -SAID_LINES)
    return "\n".join(lines[first:][:SAID_LINES])


def from_junit(path: Path, tally: Tally, *, gtest: bool) -> None:
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname') or ''}.{case.get('name')}" if not gtest else str(case.get("name"))
        output = case.findtext("system-out") or ""
        skip = case.find("skipped")
        missing = skip is not None and (skip.get("message") or "").startswith("Unable to find executable")
        if (
            missing
            or case.find("failure") is not None
            or case.find("error") is not None
            or case.get("status") == "fail"
        ):
            before = len(tally.failed)
            if not (gtest and from_gtest_output(name, output, tally)) or len(tally.failed) == before:
                tally.failed.append(name)
            told = case.findtext("failure") or case.findtext("error") or output
            tally.said[tally.failed[-1]] = what_failed(told.splitlines())
        elif skip is not None or case.get("status") in ("notrun", "disabled"):
            reason = (skip.get("message") if skip is not None else "") or case.get("status") or ""
            tally.skipped.append((name, f"{reason} {output}".strip()))
        elif not (gtest and from_gtest_output(name, output, tally)):
            tally.passed += 1


def from_cargo(path: Path, tally: Tally) -> None:
    """The lines of `cargo test`. What waits for --long is left out on purpose and not counted as skipped."""
    text = path.read_text(errors="replace")
    tally.passed += sum(int(n) for n in re.findall(r"^test result: \w+\. (\d+) passed", text, re.MULTILINE))
    tally.failed += re.findall(r"^test (.+) \.\.\. FAILED$", text, re.MULTILINE)
    for name, reason in re.findall(r"^test (.+?) \.\.\. ignored(?:, (.*))?$", text, re.MULTILINE):
        if not re.match(r"(long|slow)\b", reason):
            tally.skipped.append((name, reason))


def read_section(kind: str, report: str, status: int) -> Tally:
    tally = Tally()
    path = Path(report)
    try:
        if kind in ("ctest", "pytest") and path.exists():
            from_junit(path, tally, gtest=kind == "ctest")
        elif kind == "surefire":
            for file in sorted(path.glob("TEST-*.xml")):
                from_junit(file, tally, gtest=False)
        elif kind == "cargo" and path.exists():
            from_cargo(path, tally)
    except ET.ParseError as error:
        tally.failed.append(f"{report}: {error}")
    if status != 0 and not tally.failed:
        tally.failed.append(f"ended with exit status {status}; see build/logs/")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--strict-skips", choices=["yes", "no"], default="no")
    parser.add_argument("--filter", default="")
    options = parser.parse_args()

    sections = []
    table = options.results / "sections.tsv"
    for line in table.read_text().splitlines() if table.exists() else []:
        title, kind, report, status, seconds = line.split("\t")
        sections.append((title, int(seconds), read_section(kind, report, int(status))))

    for title, _, tally in sections:
        for name in tally.failed:
            print(f"FAILED  {title}: {name}")
            for line in tally.said.get(name, "").splitlines():
                print(f"        {line}")
    unexpected = 0
    for title, _, tally in sections:
        for name, reason in tally.skipped:
            allowed = bool(ALLOWED_SKIP.search(reason))
            unexpected += not allowed
            print(f"skipped {title}: {name}: {reason[:300] or 'no reason given'}")

    print()
    for title, seconds, tally in sections:
        counts = f"{tally.passed:6} passed {len(tally.failed):4} failed {len(tally.skipped):4} skipped"
        print(f"{title:42}{counts} {seconds:6} s")
    passed = sum(t.passed for _, _, t in sections)
    failed = sum(len(t.failed) for _, _, t in sections)
    skipped = sum(len(t.skipped) for _, _, t in sections)

    (options.results / "summary.json").write_text(
        json.dumps(
            {
                "passed": passed,
                "failed": failed,
                "skipped": skipped,
                "sections": [
                    {"title": title, "seconds": s, "passed": t.passed, "failed": t.failed, "skipped": t.skipped}
                    for title, s, t in sections
                ],
            },
            indent=1,
        )
    )
    if unexpected and options.strict_skips == "yes":
        print(f"\n{unexpected} tests were skipped that need no GPU; here that is a failure")
        failed += unexpected
        skipped -= unexpected
    if passed + failed == 0:
        print(f"\nno test ran{' that matches ' + repr(options.filter) if options.filter else ''}")
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
