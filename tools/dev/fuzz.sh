# shellcheck shell=bash
# ./dev fuzz: libFuzzer with the address and undefined sanitizers on every parser of foreign files (tests/fuzz/targets.hpp),
# one after the other, from the committed corpus. New inputs stay in build/fuzz/found; a crash is written there and ends the run.

cmd_fuzz() {
  local seconds=60 runs="" only="" target
  while (($#)); do
    case $1 in
      --seconds) need_value "$@" && seconds=$2 && shift ;; # a target
      --runs) need_value "$@" && runs=$2 && shift ;;       # executions a target, however long they take
      -*) die "fuzz: unknown option $1 (known: --seconds N --runs N TARGET)" ;;
      *) only=$1 ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  SETUP_QUIET=1 cmd_setup --no-torch --fuzz
  use_tools
  say "fuzz: building"
  [[ -f build/fuzz/build.ninja ]] || run_logged configure-fuzz cmake --preset fuzz || die "CMake did not configure"
  run_logged build-fuzz cmake --build build/fuzz --target fuzzers || die "the fuzzers did not build"
  for target in zip pickle archive metadata safetensors manifest safetensors_file safetensors_index; do
    [[ -z $only || $only == "$target" ]] || continue
    fuzz_one "$target"
  done
}

fuzz_one() {
  local target=$1 limit=(-max_total_time="$seconds")
  [[ -z $runs ]] || limit=(-runs="$runs")
  mkdir -p "build/fuzz/found/$target"
  say "fuzz: $target"
  run_logged "fuzz-$target" "build/fuzz/tests/fuzz/programs/fuzz_$target" "${limit[@]}" -max_len=16384 -rss_limit_mb=2048 \
    -timeout=10 -print_final_stats=1 -artifact_prefix="build/fuzz/found/$target-" "build/fuzz/found/$target" "tests/fuzz/corpus/$target" ||
    die "fuzz: $target failed; the input is build/fuzz/found/$target-…; fix it, and add the input to tests/fuzz/corpus/$target as found-<what>"
  grep -E 'DONE|number_of_executed_units|average_exec_per_sec|cov:' "$LOGS/fuzz-$target.log" | tail -3 | sed 's/^/        /'
}
