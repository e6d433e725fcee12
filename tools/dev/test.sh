# shellcheck shell=bash
# ./dev test: every test in every language. A section that fails does not stop the next one; tools/tally.py reads what the
# runners wrote, prints a line for each section and closes with `N passed, N failed, N skipped`. What breaks most cheaply
# comes first; with --fail-fast, what takes longest is not begun once a section has failed.
#
# Random tests and samples of long enumerations follow from a seed: the commit's, or that of --seed. --long takes every
# enumeration whole, and goes on where an earlier --long of the same commit was cut off.
#
# Groups, by the same words everywhere (ctest labels, pytest markers, JUnit tags, the reason of a Rust #[ignore]):
#   long  only with --long      slow  not with --quick      frameworks  only with --frameworks
#   clusters  alone, with --clusters      tests/gpu  alone, with --gpu

RESULTS=$ROOT/build/results

cmd_test() {
  local quick=no long=no frameworks=no clusters=no gpu=no preset=release filter="" sanitizers=no strict=no formatting=no fail_fast=no cuda=no
  while (($#)); do
    case $1 in
      --quick) quick=yes ;;
      --long) long=yes && export TESSERA_TEST_LONG=1 ;;
      --seed) need_value "$@" && export TESSERA_TEST_SEED=$2 && shift ;;
      --frameworks) frameworks=yes ;;
      --clusters) clusters=yes ;;
      --gpu) gpu=yes ;;
      --preset) need_value "$@" && preset=$2 && shift ;;
      --sanitizers) sanitizers=yes ;; # .ci/run: the presets asan and tsan on what is labelled for them
      --strict-skips) strict=yes ;;   # .ci/run: a skipped test that does not need a GPU is a failure
      --cuda) cuda=yes ;;             # .ci/run: nvcc compiles the kernels; with --long all that a release has
      --formatting) formatting=yes ;; # .ci/run: and the formatting of C++ and Python
      --fail-fast) fail_fast=yes ;;   # .ci/run: after a failure no jobs of all languages and no sanitizers
      -*) die "test: unknown option $1 (known: --quick --long --seed N --frameworks --clusters --gpu --preset P --sanitizers
    --strict-skips --formatting --cuda --fail-fast)" ;;
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
  measure_patience
  draw_seed
  as_batch_job
  FAILED_SECTIONS=0

  [[ $formatting == no ]] || section "Formatting" checks run_formatting
  [[ $cuda == no ]] || section "CUDA kernels" checks run_kernels
  if [[ $clusters == yes ]]; then
    section "Clusters" junit run_clusters
  elif [[ $gpu == yes ]]; then
    section "GPU" junit run_gpu
  elif build_core "$preset" TESTS EXAMPLES BENCHMARKS && install_core "$preset"; then
    [[ $sanitizers == no ]] || build_ahead asan tsan
    section "ABI" junit run_cpp "$preset" abi ""
    section "C and C++" junit run_cpp "$preset" "" abi
    section "Python" junit run_pytest bindings/python/tests python
    section "Java" surefire run_java
    section "Rust" cargo run_rust
    costly "All languages together" section "All languages together" junit run_together
  else
    record "C and C++ (build)" none - 1 0
  fi
  if [[ $sanitizers == yes ]]; then
    costly "C++ under asan" sanitizer asan "address and undefined" "threads|memory" tsan
    costly "C++ under tsan" sanitizer tsan "threads" threads
  fi
  end_ahead
  exec "$VENV/bin/python" tools/tally.py "$RESULTS" --strict-skips="$strict" --filter="$filter"
}

# draw_seed: TESSERA_TEST_SEED, of the commit where none is given. DONE is where --long keeps what has passed at this commit.
draw_seed() {
  local commit
  commit=$(git rev-parse --verify --quiet HEAD || echo 0)
  export TESSERA_TEST_SEED=${TESSERA_TEST_SEED:-$((16#${commit:0:8}))}
  say "seed $TESSERA_TEST_SEED; ./dev test --seed $TESSERA_TEST_SEED draws the same again"
  DONE=()
  [[ $long == no ]] || DONE=(--done "$ROOT/build/long/$commit-$TESSERA_TEST_SEED")
}

# record TITLE KIND REPORT STATUS SECONDS
record() {
  printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>"$RESULTS/sections.tsv"
  (($4 == 0)) || FAILED_SECTIONS=$((FAILED_SECTIONS + 1))
}

# costly TITLE COMMAND...: not begun where failing fast is asked for and a section has failed.
costly() {
  local title=$1
  shift
  if [[ $fail_fast == yes ]] && ((FAILED_SECTIONS)); then
    record "$title" not-begun - 0 0
    return
  fi
  "$@"
}

# section TITLE KIND FUNCTION ARGUMENTS...: FUNCTION sets RESULT to where the runner's report is, or to "" if there is nothing.
section() {
  local title=$1 kind=$2 rc=0 begin=$SECONDS
  shift 2
  RESULT=""
  "$@" || rc=$?
  [[ -n $RESULT || $rc -ne 0 ]] || return 0
  record "$title" "$kind" "${RESULT:--}" "$rc" $((SECONDS - begin))
  if ((rc == 0)); then
    say "$title: passed in $((SECONDS - begin)) s"
  elif ((rc == 124)); then
    record_cut "$title"
  else
    say "$title: FAILED after $((SECONDS - begin)) s"
  fi
}

# record_cut TITLE: its time was over; how fast is the machine now, and how fast was it when its time was measured out?
record_cut() {
  local now
  now=$("$VENV/bin/python" tools/machine_speed.py)
  printf '%s\t%s\t%s\t%s\n' "$1" "$LIMIT_S" "$TESSERA_TEST_PATIENCE" "$now" >>"$RESULTS/cuts.tsv"
  say "$1: OUT OF TIME after $LIMIT_S s; machine speed: factor $TESSERA_TEST_PATIENCE at the start, $now now"
}

# What ./dev fmt would change. Its own tools alone: the other linters of deps/lint.txt are large.
run_formatting() {
  RESULT=$RESULTS/formatting.txt
  source tools/dev/lint.sh
  SETUP_QUIET=1 cmd_setup --no-torch --format
  local rc=0
  note "clang-format" format_cpp --dry-run -Werror || rc=1
  note "ruff format" ruff format --check --quiet "${PYTHON_PLACES[@]}" || rc=1
  note "ruff check" ruff check --quiet "${PYTHON_PLACES[@]}" || rc=1
  return "$rc"
}

# Needs no device. PTX names its entries, which are the kernels that the core looks up.
run_kernels() {
  RESULT=$RESULTS/kernels.txt
  SETUP_QUIET=1 cmd_setup --no-torch --cuda
  local rc=0
  note "nvcc" build_cuda kernels_ptx || return
  note "every kernel" every_kernel || rc=1
  [[ $long == no ]] || note "plug-in" build_cuda tessera_cuda || rc=1
  return "$rc"
}

every_kernel() {
  diff <(sed -n 's/^ *X(\([a-z0-9_]*\),.*/tessera_\1/p' src/kernels/list.hpp | sort) \
    <(sed -n 's/.*\.entry \(tessera_[a-z0-9_]*\).*/\1/p' build/cuda/kernels.ptx | sort)
}

# note NAME COMMAND...: a line of the report of a section of the kind `checks`.
note() {
  local name=$1 verdict=passed
  shift
  run_logged "check-${name/ /-}" "$@" || verdict=failed
  printf '%s %s\n' "$verdict" "$name" >>"$RESULT"
  [[ $verdict == passed ]]
}

# run_cpp PRESET LABELS EXCEPT: what CMake registered, by tools/cpp_tests.py.
run_cpp() {
  local preset=$1 label=$2 except=$3 without name=cpp-$1${2:+-${2//|/-}}
  without=$(excluded '|')
  [[ -z $except ]] || without+=${without:+|}$except
  RESULT=$RESULTS/$name.xml
  local fixed=() # ThreadSanitizer of GCC 12 fails at start under some settings of address randomisation
  [[ $preset != tsan ]] || ! setarch "$(uname -m)" -R true 2>/dev/null || fixed=(setarch "$(uname -m)" -R)
  say "${label:+$label: }tests of build/$preset"
  TESSERA_LOG_LINES=400 run_logged "$name" limited 40 "${fixed[@]}" "$VENV/bin/python" tools/cpp_tests.py "build/$preset" \
    --labels="$label" --without="$without" --filter="$filter" --junit="$RESULT" --seconds="$TESSERA_CACHE/seconds-$preset.json" \
    ${DONE:+"${DONE[0]}" "${DONE[1]}-$preset"}
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

# run_pytest FOLDER NAME [OPTION...]: as many pytests as there are processors share the files, since many tests wait.
run_pytest() {
  local dir=$1 name=$2 rc=0 marks
  [[ -d $dir ]] || return 0
  RESULT=$RESULTS/$name.xml
  if [[ $name == python ]]; then build_python || return; fi
  marks=$(excluded ' or ')
  local args=(-q -ra --timeout="$(patient 300)" -p no:cacheprovider --junitxml="$RESULT" "${@:3}")
  local count=${workers:-$(nproc)}
  [[ -z $filter ]] || count=1 # a few tests are not worth another start
  ((count <= 4)) || count=4
  [[ -z $marks ]] || args+=(-m "not ($marks)")
  say "pytest $dir"
  TESSERA_LOG_LINES=400 run_logged "pytest-$name" limited "${minutes:-40}" \
    "$VENV/bin/python" tools/pytest_progress.py "${RESULT%.xml}.progress" --workers="$count" ${filter:+--filter="$filter"} \
    ${DONE:+"${DONE[0]}" "${DONE[1]}-$name"} "${args[@]}" "$dir" || rc=$?
  ((rc != 5)) || rc=0 # no test is left by the filter; tally.py complains if that is so everywhere
  return "$rc"
}

# Jobs of several languages, checkpoints between them, and PyTorch beside them: with the examples of all languages.
run_together() {
  RESULT=$RESULTS/tests-python.xml
  build_python && build_java && build_examples || return
  [[ $frameworks == no ]] || build_frameworks || return
  run_pytest tests tests-python --ignore=tests/clusters --ignore=tests/gpu # what only ./dev setup --clusters installs; a GPU
}

# Real launchers and schedulers, and a job that is killed again and again; tests/clusters/ and nothing else.
run_clusters() {
  RESULT=$RESULTS/clusters.xml
  build_core "$preset" EXAMPLES && install_core "$preset" || return
  build_python && build_java && build_examples || return
  workers=1 minutes=$((40 + 2 * ${TESSERA_CHAOS_MINUTES:-5})) run_pytest tests/clusters clusters
}

# tests/gpu/ and nothing else.
run_gpu() {
  SETUP_QUIET=1 cmd_setup --no-torch --cuda
  build_core "$preset" TESTS && install_core "$preset" && build_cuda tessera_cuda && install_cuda && build_python || return
  TESSERA_CUDA_KERNELS=$TESSERA_PREFIX/lib/libtessera_cuda.so workers=1 run_pytest tests/gpu gpu
}

run_java() {
  local groups
  [[ -f bindings/java/pom.xml ]] || return 0
  RESULT=$RESULTS/java
  build_java || return
  groups=$(excluded ,)
  local args=(-Dsurefire.failIfNoSpecifiedTests=false -Dmaven.test.failure.ignore=false)
  [[ -z $groups ]] || args+=(-DexcludedGroups="$groups")
  [[ -z $filter ]] || args+=(-Dtest="%regex[.*(?:$filter).*\\.class]")
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
  local cargo_test=(cargo test --workspace --no-fail-fast --manifest-path bindings/rust/Cargo.toml)
  if [[ -n $filter ]]; then
    local names
    run_logged test-rust "${cargo_test[@]}" -- --list || return
    mapfile -t names < <(sed -n 's/: test$//p' "$RESULT" | grep -P -- "$filter")
    if [[ ${#names[@]} == 0 ]]; then
      : >"$RESULT"
      return
    fi
    args+=(--exact "${names[@]}")
  fi
  TESSERA_LOG_LINES=400 run_logged test-rust limited 40 "${cargo_test[@]}" -- "${args[@]}"
}

# build_ahead PRESET...: while tests wait.
build_ahead() {
  SETUP_QUIET=1 cmd_setup --no-torch --clang
  begin_ahead tools/dev/ahead.sh "$@"
}

# sanitizer PRESET WHAT LABELS [NEXT]: only the C++ tests whose ranks are threads; another language's run-time under a sanitizer
# tells little. The preset NEXT is built ahead.
sanitizer() {
  SETUP_QUIET=1 cmd_setup --no-torch --clang
  end_ahead
  if build_core "$1" TESTS; then
    [[ -z ${4:-} ]] || build_ahead "$4"
    section "C++ under $1 ($2)" junit run_cpp "$1" "$3" ""
  else
    record "C++ under $1 (build)" none - 1 0
  fi
}
