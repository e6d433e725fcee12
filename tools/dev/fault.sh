# shellcheck shell=bash
# ./dev fault: the tests of crashes, power losses, file errors and damage (tests/fault), with their counts shown.

cmd_fault() {
  local filter='*'
  while (($#)); do
    case $1 in
      --long) export TESSERA_TEST_LONG=1 ;;
      --seed) need_value "$@" && export TESSERA_FAULT_SEED=$2 && filter='PowerLoss.LeavesACheckpoint*' && shift ;;
      *) die "fault: unknown option $1 (known: --long --seed N)" ;;
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
