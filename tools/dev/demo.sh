# shellcheck shell=bash
# ./dev demo: only what the demo needs (no PyTorch, no tests), then examples/demo/demo.py with the arguments given.

cmd_demo() {
  local part
  [[ -f examples/demo/demo.py ]] || die "examples/demo/demo.py is not there"
  source tools/dev/setup.sh
  source tools/dev/build.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  use_tools
  build_core release EXAMPLES || die "the core did not build"
  install_core release
  for part in python java examples; do "build_$part" || die "the $part part did not build"; done
  exec "$VENV/bin/python" examples/demo/demo.py "$@"
}
