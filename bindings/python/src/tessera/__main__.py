"""``python -m tessera`` is the `tessera` command that was installed with this package."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NoReturn


def installed_command() -> Path | None:
    """The command's file, as the installer recorded it."""
    try:
        recorded = files("tessera") or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in recorded if file.name == "tessera" and file.parent.name == "bin"]
    return next((path.resolve() for path in found if path.is_file()), None)


def main() -> NoReturn:
    """Become the command: same process, same arguments."""
    command = installed_command()
    if command is None:
        sys.exit(
            "tessera: this installation of the Python package came without the `tessera` command, as its library had "
            "none beside it. Build Tessera (./dev build) and install the package again with TESSERA_PREFIX naming "
            "build/prefix."
        )
    os.execv(command, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
