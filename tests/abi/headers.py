"""The public headers as the ABI gates see them: the generator's reader, tools/gen/c_api.py, reads them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/gen"))

from c_api import INCLUDE, ROOT, Api, Function, Variable, headers, parameters, read, read_into, variable

__all__ = ["INCLUDE", "ROOT", "Api", "Function", "Variable", "headers", "parameters", "read", "read_into", "variable"]
