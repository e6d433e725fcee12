# shellcheck shell=bash
# ./dev fault: the tests of crashes, power losses, file errors and damage (tests/fault), with their counts shown.
# ./dev fault chaos: faults of ranks, hosts and networks (tests/netns/chaos.py), as many rounds as are asked for.

cmd_fault() {
  if [[ ${1:-} == chaos ]]; then
    shift
    fault_chaos "$@"
    return
  fi
  local filter='*'
  while (($#)); do
    case $1 in
      --long) export TESSERA_TEST_LONG=1 ;;
      --seed) need_value "$@" && export TESSERA_FAULT_SEED=$2 && filter='PowerLoss.LeavesACheckpoint*' && shift ;;
      *) die "fault: unknown option $1 (known: --long --seed N, or chaos and its options)" ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  source tools/dev/build.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  use_tools
  measure_patience
  build_core release TESTS || die "the core did not build"
  limited 40 build/release/tests/fault_test --gtest_brief=1 --gtest_filter="$filter"
}

fault_chaos() {
  source tools/dev/setup.sh
  source tools/dev/build.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  use_tools
  measure_patience
  build_core release EXAMPLES && install_core release || die "the core did not build"
  build_python && build_java && build_examples || die "the bindings and the examples did not build"
  exec "$VENV/bin/python" tests/netns/chaos.py "$@"
}
