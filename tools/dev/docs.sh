# shellcheck shell=bash
# ./dev docs: the pages stay true: links lead somewhere, commands exist, promised pages are there; the checkpoints' figures
# are made anew.

cmd_docs() {
  source tools/dev/setup.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  use_tools
  "$VENV/bin/python" benchmarks/pages.py
  "$VENV/bin/python" tools/check_docs.py
}
