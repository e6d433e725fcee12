# shellcheck shell=bash
# ./dev fuzz: libFuzzer with the address and undefined sanitizers on every parser of foreign files (tests/fuzz/targets.hpp),
# one after the other, from the committed corpus. New inputs stay in build/fuzz/found; a crash is written there and ends the run.
# --coverage runs no fuzzer, but tells how much of each parser the committed corpus and what was found reach.
# --merge takes into the corpus, of what was found, the least that reaches more.

FUZZ_TARGETS=(zip pickle archive metadata safetensors manifest safetensors_file safetensors_index store_request store_hello)

cmd_fuzz() {
  local seconds=60 runs="" only="" what=run target
  while (($#)); do
    case $1 in
      --seconds) need_value "$@" && seconds=$2 && shift ;; # a target
      --runs) need_value "$@" && runs=$2 && shift ;;       # executions a target, however long they take
      --coverage) what=coverage ;;
      --merge) what=merge ;;
      -*) die "fuzz: unknown option $1 (known: --seconds N --runs N --coverage --merge TARGET)" ;;
      *) only=$1 ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  SETUP_QUIET=1 cmd_setup --no-torch --clang
  use_tools
  if [[ $what == coverage ]]; then build_fuzzers coverage; else build_fuzzers fuzz; fi
  for target in "${FUZZ_TARGETS[@]}"; do
    [[ -z $only || $only == "$target" ]] || continue
    mkdir -p "build/fuzz/found/$target"
    "fuzz_$what" "$target"
  done
}

build_fuzzers() {
  say "fuzz: building preset $1"
  [[ -f build/$1/build.ninja ]] || run_logged "configure-$1" cmake --preset "$1" || die "CMake did not configure"
  run_logged "build-$1" cmake --build "build/$1" --target fuzzers || die "the fuzzers did not build"
}

# Where memory was allocated is not noted, which takes more time than the parsers do: run a crash's input alone to see it.
fuzzer() {
  ASAN_OPTIONS=malloc_context_size=0:quarantine_size_mb=8 "build/fuzz/tests/fuzz/programs/fuzz_$1" -rss_limit_mb=2048 \
    -artifact_prefix="build/fuzz/found/$1-" "${@:2}"
}

fuzz_run() {
  local target=$1 limit=(-max_total_time="$seconds")
  [[ -z $runs ]] || limit=(-runs="$runs")
  say "fuzz: $target"
  run_logged "fuzz-$target" fuzzer "$target" "${limit[@]}" -max_len=4096 -detect_leaks=0 -timeout=10 -print_final_stats=1 \
    "build/fuzz/found/$target" "tests/fuzz/corpus/$target" ||
    die "fuzz: $target failed; the input is build/fuzz/found/$target-…; fix it, and add the input to tests/fuzz/corpus/$target as found-<what>"
  grep -E 'DONE|number_of_executed_units|average_exec_per_sec|cov:' "$LOGS/fuzz-$target.log" | tail -3 | sed 's/^/        /'
}

# Of inputs that reach the same the shortest is taken; how often a line is passed does not count.
fuzz_merge() {
  local target=$1 merged=build/fuzz/merged/$1 corpus=tests/fuzz/corpus/$1 input added=0
  rm -rf "$merged"
  mkdir -p "$merged"
  cp "$corpus"/* "$merged"
  run_logged "fuzz-merge-$target" fuzzer "$target" -merge=1 -use_counters=0 -max_len=2048 -detect_leaks=0 "$merged" \
    "build/fuzz/found/$target" || die "fuzz: $target cannot be merged"
  for input in "$merged"/*; do
    [[ ${input##*/} =~ ^[0-9a-f]{40}$ ]] || continue
    input=${input##*/}
    cp "$merged/$input" "$corpus/found-${input:0:12}"
    added=$((added + 1))
  done
  say "fuzz: $target: $added inputs more, $(cat "$corpus"/* | wc -c) bytes in all"
}

# The source that a target is there for. Some of them write as well, which no input reaches.
parser_of() {
  local formats=src/checkpoint/formats
  local torch=$formats/torch_dcp foreign=$formats/safetensors
  case $1 in
    zip) echo "$torch/zip.cc" ;;
    pickle) echo "$torch/pickle.cc" ;;
    archive) echo "$torch/torch_archive.cc" ;;
    metadata) echo "$torch/metadata.cc" ;;
    safetensors) echo "$formats/native/rank_file.cc" ;;
    manifest) echo src/checkpoint/model/manifest.cc ;;
    safetensors_file) echo "$foreign/header.cc" ;;
    safetensors_index) echo "$foreign/files.cc" ;;
    store_request) echo src/store/wire.hpp ;;
    store_hello) echo src/store/handshake.cc ;;
  esac
}

# Lines of the functions that are reached at all, and of how many.
fuzz_coverage() {
  local target=$1 program=build/coverage/tests/fuzz/programs/fuzz_$1 profile=build/coverage/$1 inputs
  mapfile -t inputs < <(find "tests/fuzz/corpus/$target" "build/fuzz/found/$target" -type f)
  LLVM_PROFILE_FILE=$profile.raw run_logged "coverage-$target" "$program" "${inputs[@]}" || die "fuzz: $target failed"
  llvm-profdata merge -o "$profile.profdata" "$profile.raw"
  llvm-cov export "$program" -instr-profile="$profile.profdata" -format=lcov |
    awk -v target="$target" -v file="$(parser_of "$target")" -v inputs="${#inputs[@]}" '
      { colon = index($0, ":"); comma = index($0, ","); kind = substr($0, 1, colon - 1); rest = substr($0, comma + 1)
        first = substr($0, colon + 1, comma - colon - 1) + 0 }
      kind == "SF" { on = substr($0, length($0) - length(file) + 1) == file }
      !on { next }
      kind == "FN" { starts[rest] = first }
      kind == "FNDA" { calls[starts[rest]] += first }
      kind == "DA" { if (first in calls) { in_reached = calls[first] > 0; if (in_reached) ++reached; else ++others }
                     if (in_reached) { ++lines; if (rest + 0 > 0) ++covered } }
      END { printf "%-18s %5d inputs  %-40s %5.1f %% of the %d lines of %d functions; %d functions are not reached\n",
                   target, inputs, file, 100 * covered / lines, lines, reached, others }'
}
