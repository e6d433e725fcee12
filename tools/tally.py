"""Read what the test runners of one `./dev test` wrote, print a line for each section, and close with the total.

The folder given holds `sections.tsv` (title, kind, report, exit status, seconds), written by tools/dev/test.sh. Kinds
are `junit` (an XML file, or one from each worker), `surefire` (a folder of them), `cargo` (the runner's text), `checks`
(lines of a verdict and a name), `none`, and `not-begun` for what was left out after a failure. A section that exited
non-zero without a failed test to show for it (a crash, a build error) counts as one failure. What a failed test printed
is shown below its name, so that the end of a long run tells what is needed to find out why.

A section that ran out of time has exit status 124 and a line in `cuts.tsv` (title, its limit in seconds, the machine's
factor at the start and at the end). It counts as one failure, and what it had done by then counts as well: runners that
could not write their report have told it as they went, pytest in FILE.progress, Maven and cargo in their logs.

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

OUT_OF_TIME = 124  # the exit status of a section that did not end by itself
SLOW = 1.5  # times slower than the reference of tools/machine_speed.py
SAID_LINES = 40  # shown of a failed test
ALLOWED_SKIP = re.compile(r"needs (a|an|two|\d+) .*GPU", re.IGNORECASE)


@dataclass
class Tally:
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)  # of those that failed, the end of what they printed
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name, reason
    running: list[str] = field(default_factory=list)  # when the time was over


@dataclass
class Cut:
    """A section that ran out of time."""

    limit_s: float
    factor_before: float
    factor_after: float

    def __str__(self) -> str:
        slow = (
            "the machine was slow" if max(self.factor_before, self.factor_after) >= SLOW else "the machine was not slow"
        )
        factors = f"factor {self.factor_before:g} at the start, {self.factor_after:g} at the end"
        return f"out of time after {self.limit_s:.0f} s; {slow} ({factors})"


@dataclass
class Section:
    title: str
    kind: str
    seconds: int
    tally: Tally
    cut: Cut | None


def what_failed(lines: list[str]) -> str:
    """Of what a failed test printed: from GoogleTest's first complaint on, or else the end."""
    first = next((i for i, line in enumerate(lines) if line.endswith(": Failure")), -SAID_LINES)
    return "\n".join(lines[first:][:SAID_LINES])


def from_junit(path: Path, tally: Tally) -> None:
    for case in ET.parse(path).getroot().iter("testcase"):
        name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
        failure, error, skip = case.find("failure"), case.find("error"), case.find("skipped")
        if error is not None and (error.get("message") or "").startswith("still running"):
            tally.running.append(name)
        elif failure is not None or error is not None:
            told = case.findtext("failure") or case.findtext("error") or case.findtext("system-out") or ""
            tally.failed.append(name)
            tally.said[name] = what_failed(told.splitlines())
        elif skip is not None:
            tally.skipped.append((name, f"{skip.get('message') or ''} {case.findtext('system-out') or ''}".strip()))
        else:
            tally.passed += 1


def from_cargo(path: Path, tally: Tally) -> None:
    """The lines of `cargo test`. What waits for --long is left out on purpose and not counted as skipped."""
    text = path.read_text(errors="replace")
    tally.passed += sum(int(n) for n in re.findall(r"^test result: \w+\. (\d+) passed", text, re.MULTILINE))
    tally.failed += re.findall(r"^test (.+) \.\.\. FAILED$", text, re.MULTILINE)
    for name, reason in re.findall(r"^test (.+?) \.\.\. ignored(?:, (.*))?$", text, re.MULTILINE):
        if not re.match(r"(long|slow)\b", reason):
            tally.skipped.append((name, reason))


def from_cut_cargo(path: Path, tally: Tally) -> None:
    """What `from_cargo` leaves out: the tests of the program that did not come to its result."""
    parts = re.split(r"^test result: .*$", path.read_text(errors="replace"), flags=re.MULTILINE)
    last = parts[-1]
    tally.passed += len(re.findall(r"^test .+ \.\.\. ok$", last, re.MULTILINE))
    program = re.findall(r"^\s+(?:Running|Doc-tests) (.+?)(?: \(.*\))?$", last, re.MULTILINE)
    long = re.findall(r"^test (.+) has been running for over", last, re.MULTILINE)
    ended = re.findall(r"^test (.+) \.\.\. \w+", last, re.MULTILINE)
    if program:
        tests = [test for test in long if test not in ended]
        tally.running.append(f"{program[-1]}{': ' if tests else ''}{', '.join(tests)}")


def from_progress(path: Path, tally: Tally) -> None:
    """The lines of tools/pytest_progress.py. A test may fail in its teardown after it passed."""
    outcomes: dict[str, tuple[str, str]] = {}
    running = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            word, test, *text = json.loads(line)
        except ValueError:  # the line that was being written
            continue
        if word == "begins":
            running = test
        elif outcomes.get(test, ("", ""))[0] != "failed":
            outcomes[test] = (word, text[0] if text else "")
    for test, (outcome, text) in outcomes.items():
        if outcome == "failed":
            tally.failed.append(test)
            tally.said[test] = what_failed(text.splitlines())
        elif outcome == "skipped":
            tally.skipped.append((test, text))
        elif test != running:
            tally.passed += 1
    # What passed may still be in its teardown.
    if running and outcomes.get(running, ("", ""))[0] in ("", "passed"):
        tally.running.append(running)


def from_cut_surefire(log: Path, tally: Tally) -> None:
    """The class that Maven's log says is running; reports exist of those that ended."""
    text = log.read_text(errors="replace") if log.exists() else ""
    begun = re.findall(r"^\[INFO\] Running (\S+)$", text, re.MULTILINE)
    ended = re.findall(r"^\[\w+\] Tests run:.*? -+ in (\S+)", text, re.MULTILINE)
    tally.running += [name for name in begun if name not in ended][-1:]


def from_checks(path: Path, tally: Tally) -> None:
    for line in path.read_text().splitlines():
        verdict, name = line.split(" ", 1)
        if verdict == "passed":
            tally.passed += 1
        else:
            tally.failed.append(name)


def reports_of_workers(path: Path) -> list[Path]:
    """The reports that there are or would be where workers of tools/pytest_progress.py share a section."""
    return sorted({one.with_suffix(".xml") for one in path.parent.glob(f"{path.stem}.[0-9]*.*")}) or [path]


def read_section(kind: str, report: str, status: int, logs: Path) -> Tally:
    tally = Tally()
    path = Path(report)
    is_cut = status == OUT_OF_TIME
    try:
        if kind == "junit":
            for one in reports_of_workers(path):
                if one.exists():
                    from_junit(one, tally)
                elif one.with_suffix(".progress").exists():
                    from_progress(one.with_suffix(".progress"), tally)
        elif kind == "surefire":
            for file in sorted(path.glob("TEST-*.xml")):
                from_junit(file, tally)
            if is_cut:
                from_cut_surefire(logs / "test-java.log", tally)
        elif kind == "cargo" and path.exists():
            from_cargo(path, tally)
            if is_cut:
                from_cut_cargo(path, tally)
        elif kind == "checks" and path.exists():
            from_checks(path, tally)
    except ET.ParseError as error:
        tally.failed.append(f"{report}: {error}")
    if is_cut:
        tally.failed.append(f"out of time; running: {', '.join(tally.running) or 'unknown'}")
    elif tally.running:
        tally.failed += [f"{name} (was running at the end)" for name in tally.running]
    elif status != 0 and not tally.failed:
        tally.failed.append(f"ended with exit status {status}; see build/logs/")
    return tally


def read_sections(results: Path) -> list[Section]:
    def rows(name: str) -> list[list[str]]:
        table = results / name
        return [line.split("\t") for line in table.read_text().splitlines()] if table.exists() else []

    cuts = {title: Cut(float(limit), float(before), float(after)) for title, limit, before, after in rows("cuts.tsv")}
    logs = results.parent / "logs"
    return [
        Section(title, kind, int(seconds), read_section(kind, report, int(status), logs), cuts.get(title))
        for title, kind, report, status, seconds in rows("sections.tsv")
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--strict-skips", choices=["yes", "no"], default="no")
    parser.add_argument("--filter", default="")
    options = parser.parse_args()

    sections = read_sections(options.results)
    for section in sections:
        for name in section.tally.failed:
            print(f"FAILED  {section.title}: {name}")
            for line in section.tally.said.get(name, "").splitlines():
                print(f"        {line}")
    unexpected = 0
    for section in sections:
        for name, reason in section.tally.skipped:
            allowed = bool(ALLOWED_SKIP.search(reason))
            unexpected += not allowed
            print(f"skipped {section.title}: {name}: {reason[:300] or 'no reason given'}")

    print()
    for section in sections:
        if section.kind == "not-begun":
            print(f"{section.title:42}   not begun, since a section before it failed")
            continue
        tally = section.tally
        counts = f"{tally.passed:6} passed {len(tally.failed):4} failed {len(tally.skipped):4} skipped"
        print(f"{section.title:42}{counts} {section.seconds:6} s")
    for section in sections:
        if section.cut:
            print(f"\n{section.title}: {section.cut}")
            for name in section.tally.running:
                print(f"        was running: {name}")
    passed = sum(section.tally.passed for section in sections)
    failed = sum(len(section.tally.failed) for section in sections)
    skipped = sum(len(section.tally.skipped) for section in sections)

    (options.results / "summary.json").write_text(
        json.dumps(
            {
                "passed": passed,
                "failed": failed,
                "skipped": skipped,
                "sections": [
                    {
                        "title": section.title,
                        "seconds": section.seconds,
                        "passed": section.tally.passed,
                        "failed": section.tally.failed,
                        "skipped": section.tally.skipped,
                        "running": section.tally.running,
                    }
                    for section in sections
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
