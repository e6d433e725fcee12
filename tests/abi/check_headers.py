"""Each public header compiles alone, as strict C99 and as C++17, with every compiler that is here, without a warning.

Usage: check_headers.py C_COMPILER CXX_COMPILER
"""

import shutil
import subprocess
import sys

from headers import INCLUDE, headers

FLAGS = ["-pedantic", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-fsyntax-only"]


def compilers():
    """The build's own pair, and GCC's and Clang's where they are installed."""
    pairs = [tuple(sys.argv[1:3]), ("gcc", "g++"), ("clang", "clang++")]
    paths = [(shutil.which(c), shutil.which(cxx)) for c, cxx in pairs]
    return [pair for pair in dict.fromkeys(paths) if all(pair)]


def main():
    bad = []
    pairs = compilers()
    for c, cxx in pairs:
        for compiler, language in (
            (c, ["-x", "c", "-std=c99", "-Wstrict-prototypes"]),
            (cxx, ["-x", "c++", "-std=c++17"]),
        ):
            for header in headers():
                command = [compiler, *language, *FLAGS, "-I", INCLUDE, "-include", header, "/dev/null"]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode != 0:
                    bad.append(f"{header.name} with {' '.join([compiler, *language])}:\n{result.stderr}")
    print("\n".join(bad) if bad else f"{len(headers())} headers compile alone with {len(pairs)} pairs of compilers")
    return 1 if bad or not pairs else 0


if __name__ == "__main__":
    sys.exit(main())
