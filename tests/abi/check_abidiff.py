"""abidiff (libabigail) finds nothing removed or changed since capi/abi/tessera.abi; additions are allowed.

Usage: check_abidiff.py [--update]     --update writes tessera.abi anew: when a version is released

Both sides are read from debug information of a library made of the headers alone: every function with an empty body. So
the record holds what a compiled program depends on, signatures and layouts, whatever the library is made of inside.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from headers import INCLUDE, ROOT, read

RECORD = ROOT / "capi" / "abi" / "tessera.abi"
CHANGED = 4 | 8  # bits of abidiff's exit code: ABI change, incompatible change


def bodies():
    lines = ['#include "tessera/tessera.h"']
    for function in read().functions:
        result = "" if function.returns == "void" else "return 0;"
        params = ", ".join(f"{param.type} {param.name}" for param in function.params) or "void"
        lines.append(f"{function.returns} {function.name}({params}) {{ {result} }}")
    return "\n".join(lines) + "\n"


def library(directory):
    source, target = Path(directory, "bodies.c"), Path(directory, "libtessera.so.0")
    source.write_text(bodies())
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-std=c99", "-g", "-O0", "-w", "-shared", "-fPIC", "-fno-eliminate-unused-debug-types"]
    subprocess.run([*command, "-Wl,-soname,libtessera.so.0", "-I", INCLUDE, source, "-o", target], check=True)
    return target


def record(target):
    text = subprocess.run(
        ["abidw", "--no-show-locs", "--no-corpus-path", "--no-comp-dir-path", "--short-locs", target],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # The path of the temporary source says nothing.
    return re.sub(r" path='[^']*bodies\.c'", " path='bodies.c'", text)


def main():
    if platform.machine() != "x86_64":
        print("the record is of x86_64; layouts of other machines are compared by check_layout.py alone")
        return 0
    if shutil.which("abidiff") is None:
        print("abidiff is not installed (Debian: abigail-tools); ./dev setup installs it")
        return 1
    with tempfile.TemporaryDirectory() as directory:
        target = library(directory)
        if "--update" in sys.argv:
            RECORD.write_text(record(target))
        result = subprocess.run(
            ["abidiff", "--no-added-syms", RECORD, target], capture_output=True, text=True, check=False
        )
    print(result.stdout or f"no change since {RECORD.relative_to(ROOT)}", result.stderr, sep="")
    return 1 if result.returncode & (1 | 2 | CHANGED) else 0


if __name__ == "__main__":
    sys.exit(main())
