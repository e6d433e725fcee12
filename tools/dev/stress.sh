# shellcheck shell=bash
# ./dev stress: repeat tests beside busy loops, and list how often each fails (tools/stress.py).

cmd_stress() {
  local filter="" arguments=()
  while (($#)); do
    case $1 in
      --times | --load) need_value "$@" && arguments+=("$1" "$2") && shift ;;
      --append) arguments+=("$1") ;;
      -*) die "stress: unknown option $1 (known: --times N --load L --append)" ;;
      *) filter=$1 ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  source tools/dev/build.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  local suites
  suites=$("$VENV/bin/python" tools/stress.py needs "$filter") || die "stress: is '$filter' a regular expression?"
  [[ $suites != *together* ]] || SETUP_QUIET=1 cmd_setup
  use_tools
  build_core release TESTS EXAMPLES BENCHMARKS || die "the core did not build"
  install_core release
  [[ -z $suites ]] || build_python || die "the Python binding did not build"
  [[ $suites != *together* ]] || { build_java && build_examples; } || die "what the jobs of all languages need did not build"
  as_batch_job
  exec "$VENV/bin/python" tools/stress.py run "${arguments[@]}" "$filter"
}
