"""``python -m tessera`` runs the `tessera` command that was installed with this package."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NoReturn


def installed_command() -> Path | None:
    """The path of the command, as recorded by the installer; None if it was not installed."""
    try:
        recorded = files("tessera") or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in recorded if file.name == "tessera" and file.parent.name == "bin"]
    return next((path.resolve() for path in found if path.is_file()), None)


def main() -> NoReturn:
    """Replace this process by the command, with the same arguments."""
    command = installed_command()
    if command is None:
        sys.exit(
            "tessera: this Python package was installed without the `tessera` command. Build Tessera (./dev build) and "
            "reinstall the package with TESSERA_PREFIX set to build/prefix."
        )
    os.execv(command, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    main()
