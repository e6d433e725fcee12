# shellcheck shell=bash
# ./dev lint: formatting and static checks of each language; all of them run, then the verdict. clang-tidy takes the
# longest, so without --all it sees only what differs from main; names of files or folders narrow it further.

cmd_lint() {
  local all=no failed=() paths=()
  while (($#)); do
    case $1 in
      --all) all=yes ;;
      -*) die "lint: unknown option $1 (known: --all)" ;;
      *) paths+=("$1") ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  source tools/dev/build.sh
  SETUP_QUIET=1 cmd_setup --no-torch --lint
  SETUP_QUIET=1 cmd_setup --no-torch --clang
  use_tools
  check "formatting of C and C++" format_cpp --dry-run -Werror
  check "formatting of Python" ruff format --check --quiet "${PYTHON_PLACES[@]}"
  check "ruff" ruff check --quiet "${PYTHON_PLACES[@]}"
  check "shell scripts" shell_scripts
  check "prose" "$VENV/bin/python" tools/prose.py
  check "clang-tidy" tidy
  check "clang compiles the fuzzers" fuzzers
  check "mypy" types_of_python
  check "formatting of Rust" rust_format --check
  check "clippy" rust_clippy
  check "javac -Xlint:all" java_lint
  ((${#failed[@]} == 0)) || die "lint: ${#failed[@]} failed: $(printf '%s; ' "${failed[@]}")"
  say "lint: all clean"
}

PYTHON_PLACES=(tools)
for place in bindings/python benchmarks examples tests; do
  [[ ! -d $place ]] || PYTHON_PLACES+=("$place")
done

# check NAME COMMAND...
check() {
  local name=$1 log
  shift
  say "$name"
  log=lint-$(tr -cs 'a-zA-Z0-9' '-' <<<"$name")
  TESSERA_LOG_LINES=200 run_logged "${log%-}" "$@" || failed+=("$name")
}

cpp_files() {
  git ls-files --cached --others --exclude-standard -- capi src cli tests cuda benchmarks examples bindings |
    grep -E '\.(c|cc|h|hpp|cu)$' || true
}

format_cpp() { cpp_files | xargs -r clang-format "$@"; }

shell_scripts() {
  git ls-files --cached --others --exclude-standard | { grep -E '(\.sh|^dev|^\.ci/run)$' || true; } | xargs -r shellcheck -x
}

tidy() {
  local files
  [[ -f CMakeLists.txt ]] || return 0
  # What clang-tidy knows of a file is how it is compiled, here without GCC's precompiled headers: a missing include shows.
  cmake --preset lint || return
  files=$(cpp_files | grep -E '\.cc?$' | grep -E "^(capi|src|cli|tests|examples)/" || true)
  if ((${#paths[@]})); then
    files=$(grep -F "$(printf '%s\n' "${paths[@]}")" <<<"$files" || true)
  elif [[ $all == no ]] && git rev-parse -q --verify main >/dev/null; then
    files=$(grep -xF "$( { git diff --name-only main...; git diff --name-only HEAD; git ls-files --others --exclude-standard; } | sort -u)" <<<"$files" || true)
  fi
  [[ -n $files ]] || { echo "nothing to check"; return; }
  # GCC's own warning options mean nothing to clang's front end.
  xargs -P "$(nproc)" -n 1 clang-tidy -p build/lint --quiet --extra-arg=-Wno-unknown-warning-option <<<"$files"
}

# Clang compiles the parsers, src/base and src/tensor here, so that what GCC alone takes is found before the next ./dev fuzz.
fuzzers() {
  [[ -f CMakeLists.txt ]] || return 0
  [[ -f build/fuzz/build.ninja ]] || cmake --preset fuzz || return
  cmake --build build/fuzz --target fuzzers
}

types_of_python() {
  [[ -d bindings/python/src/tessera ]] || return 0
  "$VENV/bin/python" -m mypy --strict --config-file bindings/python/pyproject.toml bindings/python/src/tessera
}

rust_places() { for place in bindings/rust examples/rust benchmarks/call; do [[ ! -f $place/Cargo.toml ]] || echo "$place"; done; }

rust_format() {
  local place
  for place in $(rust_places); do cargo fmt --all --manifest-path "$place/Cargo.toml" ${1:+-- "$1"} || return; done
  cargo fmt --manifest-path examples/rust-candle/Cargo.toml ${1:+-- "$1"} # clippy would have to compile candle
}

rust_clippy() {
  local place
  [[ ! -d bindings/rust ]] || { build_core release && install_core release; } || return
  for place in $(rust_places); do
    cargo clippy --workspace --all-targets --manifest-path "$place/Cargo.toml" -- -D warnings || return
  done
  RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace --manifest-path bindings/rust/Cargo.toml
}

# -Xlint:all is set in the POM, where every build has it; -Werror comes from here, so that a newer JDK still builds.
java_lint() {
  [[ -f bindings/java/pom.xml ]] || return 0
  mvn -B -ntp -q -f bindings/java/pom.xml -Dstyle.color=never -DskipTests \
    -Dmaven.compiler.failOnWarning=true clean test-compile
}
