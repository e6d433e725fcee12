"""Sizes and offsets of all public structs and the numbers of all enumerators are those of capi/abi/layout.txt.

Usage: check_layout.py [--update]     --update rewrites layout.txt from the headers

A C program made from the headers prints them (with $CC, or cc); nothing of the layout is written by hand. A change of
a line is a break of the ABI: only new lines, of new structs, fields at the end of options and enumerators, are not.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headers import INCLUDE, ROOT, read

LAYOUT = ROOT / "capi" / "abi" / "layout.txt"


def program():
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "tessera/tessera.h"', "int main(void) {"]
    for struct in sorted(read().structs, key=lambda struct: struct.header):
        name = struct.name
        lines.append(f'    printf("struct {name} size %zu\\n", sizeof({name}));')
        for field in (field.name for field in struct.fields):
            lines.append(
                f'    printf("struct {name}.{field} offset %zu size %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
    for name in (c.name for c in sorted(read().constants, key=lambda c: c.header) if c.enumerator):
        lines.append(f'    printf("enum {name} %d\\n", (int){name});')
    return "\n".join([*lines, "    return 0;", "}", ""])


def measured():
    with tempfile.TemporaryDirectory() as directory:
        source, binary = Path(directory, "layout.c"), Path(directory, "layout")
        source.write_text(program())
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=c99", "-I", INCLUDE, source, "-o", binary], check=True)
        return subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()


def main():
    now = measured()
    if "--update" in sys.argv:
        LAYOUT.write_text("\n".join(now) + "\n")
    released = LAYOUT.read_text().splitlines()
    bad = [f"changed or gone:       {line}" for line in released if line not in now]
    bad += [f"not in layout.txt yet: {line}" for line in now if line not in released]
    print("\n".join(bad) if bad else f"{len(now)} sizes, offsets and numbers are as released")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
