"""The library exports exactly capi/abi/symbols.txt, and those are exactly the functions of the headers.

Usage: check_symbols.py LIBRARY [--update]     --update rewrites symbols.txt from the headers
"""

import subprocess
import sys

from headers import ROOT, read

LIST = ROOT / "capi" / "abi" / "symbols.txt"


def differences(left, left_name, right, right_name):
    lines = [f"{name}: in {left_name}, not in {right_name}" for name in sorted(left - right)]
    return lines + [f"{name}: in {right_name}, not in {left_name}" for name in sorted(right - left)]


def main():
    declared = {f.name for f in read().functions}
    if "--update" in sys.argv:
        LIST.write_text("\n".join(sorted(declared)) + "\n")
    lines = LIST.read_text().split()
    listed = set(lines)
    output = subprocess.run(
        ["nm", "-D", "--defined-only", sys.argv[1]], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in output.splitlines()}
    bad = differences(listed, "symbols.txt", exported, "the library")
    bad += differences(listed, "symbols.txt", declared, "the headers")
    if lines != sorted(listed):
        bad.append("symbols.txt is not sorted, or names a symbol twice")
    print("\n".join(bad) if bad else f"{len(exported)} symbols are exported, listed and declared")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
