"""Writes what is derived from the C headers. `./dev gen` runs it; it needs Python alone.

python3 tools/gen            write what has changed
python3 tools/gen --check    write nothing; exit 1 if a file is not what would be written, or a binding has a gap
"""

import sys
from pathlib import Path

sys.dont_write_bytecode = True

import cython  # noqa: E402
import parity  # noqa: E402
import rust  # noqa: E402
from c_api import ROOT, Api, read  # noqa: E402


def outputs(api: Api, root: Path) -> tuple[dict[str, str], list[str]]:
    """The text of each generated file, and what is wrong."""
    page, faults = parity.page(api, root)
    return {"docs/PARITY.md": page, **cython.files(api), **rust.files(api)}, faults


def main() -> int:
    check = "--check" in sys.argv[1:]
    texts, faults = outputs(read(), ROOT)
    for file, text in texts.items():
        path = ROOT / file
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            faults.append(f"{file} is not up to date: run ./dev gen")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"gen: {file}")
    for fault in faults:
        print(f"gen: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
