"""Checks that the loaded libtessera has the ABI that this package was built for."""

from __future__ import annotations

import ctypes
from pathlib import Path

try:
    from . import _core
except ImportError as _error:
    # A library that lacks a function cannot be linked at all, but can still report its version.
    if "tsr_" not in str(_error) and "libtessera" not in str(_error):
        raise
    _found = ""
    for _name in ("libtessera.so.0.1", str(Path(__file__).parent / "libtessera.so.0.1")):
        try:
            _library = ctypes.CDLL(_name)
            _library.tsr_library_path.restype = ctypes.c_char_p
            _path = (_library.tsr_library_path() or b"").decode() or _name
            _found = f" Found ABI {_library.tsr_abi_version()} in {_path}."
        except (OSError, AttributeError):
            continue
        break
    raise ImportError(f"tessera cannot load its native library: {_error}.{_found}") from _error

if _core.abi_version() != _core.ABI_VERSION:
    raise ImportError(
        f"tessera was built for libtessera ABI {_core.ABI_VERSION}, but ABI {_core.abi_version()} (version "
        f"{_core.version()}) was loaded from {_core.library_path()}. Remove that library from the search path "
        "(LD_LIBRARY_PATH), or install the tessera package that matches it."
    )

VERSION: str = _core.version()
