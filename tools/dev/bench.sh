# shellcheck shell=bash
# ./dev bench NAME: set up the peers (Open MPI, fio, PyTorch), build with benchmarks, and hand over to benchmarks/run.py.

cmd_bench() {
  local part
  [[ -f benchmarks/run.py ]] || die "benchmarks/run.py is not there"
  source tools/dev/setup.sh
  source tools/dev/build.sh
  if [[ ${1:-} == build ]]; then # it builds in folders of its own
    SETUP_QUIET=1 cmd_setup --no-torch
    use_tools
  elif [[ ${1:-} != check ]]; then
    SETUP_QUIET=1 cmd_setup --bench
    use_tools
    build_core release BENCHMARKS || die "the core did not build"
    install_core release
    for part in python java; do "build_$part" || die "the $part part did not build"; done
  else
    SETUP_QUIET=1 cmd_setup --no-torch
    use_tools
  fi
  exec "$VENV/bin/python" benchmarks/run.py "$@"
}
