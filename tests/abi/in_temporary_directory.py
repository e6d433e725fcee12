"""Runs PROGRAM with one more argument, a directory that is removed afterwards. Usage: ... PROGRAM [ARGUMENT...]"""

import subprocess
import sys
import tempfile

with tempfile.TemporaryDirectory() as directory:
    sys.exit(subprocess.run([*sys.argv[1:], directory], check=False).returncode)
