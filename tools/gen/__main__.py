"""Writes what is derived from the C headers. `./dev gen` runs it; it needs Python alone.

python3 tools/gen            write what has changed
python3 tools/gen --check    write nothing; exit 1 if a file is not what would be written, or a binding has a gap
"""

import sys

sys.dont_write_bytecode = True

import cython  # noqa: E402
import java  # noqa: E402
import parity  # noqa: E402
import rust  # noqa: E402
from c_api import ROOT, read  # noqa: E402


def main() -> int:
    check = "--check" in sys.argv[1:]
    faults: list[str] = []

    def put(texts: dict[str, str]) -> None:
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

    api = read()
    places = parity.places(api, ROOT)
    names = {binding: parity.spellings(of) for binding, of in places.items()}
    put(cython.files(api, names["Python"]))
    put(java.files(api, names["Java"]))
    put(rust.files(api, names["Rust"]))
    if not check:
        places = parity.places(api, ROOT)  # of what was just written
    page, gaps = parity.page(api, ROOT, places)
    put({"docs/PARITY.md": page})
    faults += gaps
    for fault in faults:
        print(f"gen: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
