# shellcheck shell=bash
# ./dev test: every test in every language. A section that fails does not stop the next one; tools/tally.py reads what the
# runners wrote, prints a line for each section and closes with `N passed, N failed, N skipped`.
#
# Groups, by the same words everywhere (ctest labels, pytest markers, JUnit tags, the reason of a Rust #[ignore]):
#   long  only with --long      slow  not with --quick      frameworks  only with --frameworks
#   clusters  alone, with --clusters

RESULTS=$ROOT/build/results

cmd_test() {
  local quick=no long=no frameworks=no clusters=no preset=release filter="" sanitizers=no strict=no
  while (($#)); do
    case $1 in
      --quick) quick=yes ;;
      --long) long=yes && export TESSERA_FSDP_PAIRS=all ;;
      --frameworks) frameworks=yes ;;
      --clusters) clusters=yes ;;
      --preset) need_value "$@" && preset=$2 && shift ;;
      --sanitizers) sanitizers=yes ;; # .ci/run: the presets asan and tsan on what is labelled for them
      --strict-skips) strict=yes ;;   # .ci/run: a skipped test that does not need a GPU is a failure
      -*) die "test: unknown option $1 (known: --quick --long --frameworks --clusters --preset P --sanitizers --strict-skips)" ;;
      *) filter=$1 ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  source tools/dev/build.sh
  if [[ $clusters == yes ]]; then
    SETUP_QUIET=1 cmd_setup --clusters
  elif [[ $quick == yes ]]; then
    SETUP_QUIET=1 cmd_setup --no-torch
  else
    SETUP_QUIET=1 cmd_setup
  fi
  use_tools
  rm -rf "$RESULTS"
  mkdir -p "$RESULTS"

  if [[ $clusters == yes ]]; then
    section "Clusters" pytest run_clusters
  elif build_core "$preset" TESTS EXAMPLES BENCHMARKS && install_core "$preset"; then
    section_ctest "$preset" "C and C++" ""
    section "Python" pytest run_pytest bindings/python/tests python
    section "Java" surefire run_java
    section "Rust" cargo run_rust
    section "All languages together" pytest run_together
  else
    record "C and C++ (build)" none - 1 0
  fi
  if [[ $sanitizers == yes ]]; then
    sanitizer asan "address and undefined" "threads|memory"
    sanitizer tsan "threads" threads
  fi
  exec "$VENV/bin/python" tools/tally.py "$RESULTS" --strict-skips="$strict" --filter="$filter"
}

record() { printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>"$RESULTS/sections.tsv"; }

# section TITLE KIND FUNCTION ARGUMENTS...: FUNCTION sets RESULT to where the runner's report is, or to "" if there is nothing.
section() {
  local title=$1 kind=$2 rc=0 begin=$SECONDS
  shift 2
  RESULT=""
  "$@" || rc=$?
  [[ -n $RESULT || $rc -ne 0 ]] || return 0
  record "$title" "$kind" "${RESULT:--}" "$rc" $((SECONDS - begin))
  if ((rc == 0)); then say "$title: passed in $((SECONDS - begin)) s"; else say "$title: FAILED after $((SECONDS - begin)) s"; fi
}

section_ctest() { section "$2" ctest run_ctest "$1" "$3"; }

run_ctest() {
  local preset=$1 label=$2 exclude
  local args=(--test-dir "build/$preset" --output-on-failure --no-tests=ignore --timeout 300
    --test-output-size-passed 1000000 --test-output-size-failed 1000000 -j "$(nproc)")
  exclude=$(excluded '|')
  [[ -z $exclude ]] || args+=(-LE "^($exclude)\$")
  [[ -z $label ]] || args+=(-L "^($label)\$")
  [[ -z $filter ]] || args+=(-R "$filter")
  RESULT=$RESULTS/ctest-$preset.xml
  local fixed=() # ThreadSanitizer of GCC 12 fails at start under some settings of address randomisation
  [[ $preset != tsan ]] || ! setarch "$(uname -m)" -R true 2>/dev/null || fixed=(setarch "$(uname -m)" -R)
  say "${label:+$preset: }ctest"
  TESSERA_LOG_LINES=400 run_logged "ctest-$preset" limited 40 "${fixed[@]}" ctest "${args[@]}" --output-junit "$RESULT"
}

# The groups that this run leaves out, joined by the runner's word for `or`.
excluded() {
  local group groups=() joined=""
  [[ $long == yes ]] || groups+=(long)
  [[ $quick == no ]] || groups+=(slow)
  [[ $frameworks == yes ]] || groups+=(frameworks)
  [[ $clusters == yes ]] || groups+=(clusters)
  for group in "${groups[@]}"; do joined+=${joined:+$1}$group; done
  printf '%s' "$joined"
}

run_pytest() {
  local dir=$1 name=$2 rc=0 marks
  [[ -d $dir ]] || return 0
  RESULT=$RESULTS/$name.xml
  if [[ $name == python ]]; then build_python || return; fi
  marks=$(excluded ' or ')
  local args=(-q -ra --timeout=300 -p no:cacheprovider --junitxml="$RESULT")
  [[ -z $marks ]] || args+=(-m "not ($marks)")
  [[ -z $filter ]] || args+=(-k "$filter")
  say "pytest $dir"
  TESSERA_LOG_LINES=400 run_logged "pytest-$name" limited "${minutes:-40}" "$VENV/bin/python" -m pytest "${args[@]}" "$dir" || rc=$?
  ((rc != 5)) || rc=0 # no test is left by the filter; tally.py complains if that is so everywhere
  return "$rc"
}

# Jobs of several languages, checkpoints between them, and PyTorch beside them: with the examples of all languages.
run_together() {
  RESULT=$RESULTS/tests-python.xml
  build_python && build_java && build_examples || return
  [[ $frameworks == no ]] || build_frameworks || return
  run_pytest tests tests-python
}

# Real launchers and schedulers, and a job that is killed again and again; tests/clusters/ and nothing else.
run_clusters() {
  RESULT=$RESULTS/clusters.xml
  build_core "$preset" EXAMPLES && install_core "$preset" || return
  build_python && build_java && build_examples || return
  minutes=$((40 + 2 * ${TESSERA_CHAOS_MINUTES:-5})) run_pytest tests/clusters clusters
}

run_java() {
  local groups
  [[ -f bindings/java/pom.xml ]] || return 0
  RESULT=$RESULTS/java
  build_java || return
  groups=$(excluded ,)
  local args=(-Dsurefire.failIfNoSpecifiedTests=false -Dmaven.test.failure.ignore=false)
  [[ -z $groups ]] || args+=(-DexcludedGroups="$groups")
  [[ -z $filter ]] || args+=(-Dtest="*$filter*")
  find bindings/java -type d -name surefire-reports -prune -exec rm -rf {} +
  say "Maven: tests of bindings/java"
  local rc=0
  TESSERA_LOG_LINES=400 maven bindings/java/pom.xml test-java "${args[@]}" verify || rc=$?
  mkdir -p "$RESULT"
  find bindings/java -path '*/surefire-reports/TEST-*.xml' -exec cp -t "$RESULT" {} +
  return "$rc"
}

run_rust() {
  [[ -f bindings/rust/Cargo.toml ]] || return 0
  RESULT=$LOGS/test-rust.log
  local args=()
  if [[ $long == yes ]]; then
    args=(--include-ignored)
    command -v nvidia-smi >/dev/null || args+=(--skip gpu)
  fi
  say "cargo test"
  TESSERA_LOG_LINES=400 run_logged test-rust limited 40 cargo test --workspace --no-fail-fast \
    --manifest-path bindings/rust/Cargo.toml ${filter:+"$filter"} -- "${args[@]}"
}

# sanitizer PRESET WHAT LABELS: only the C++ tests whose ranks are threads; another language's run-time under a sanitizer tells little.
sanitizer() {
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  [[ ! -f tests/tsan.supp ]] || TSAN_OPTIONS+=:suppressions=$ROOT/tests/tsan.supp
  [[ ! -f tests/lsan.supp ]] || export LSAN_OPTIONS=suppressions=$ROOT/tests/lsan.supp
  if build_core "$1" TESTS; then
    section_ctest "$1" "C++ under $1 ($2)" "$3"
  else
    record "C++ under $1 (build)" none - 1 0
  fi
}
