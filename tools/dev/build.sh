# shellcheck shell=bash
# ./dev build: the core by CMake into build/<preset>, installed into build/prefix; then each binding against that prefix,
# exactly as a user's own build would find it. A binding is built again only when its sources or the prefix changed.

cmd_build() {
  local preset=release cuda=no
  while (($#)); do
    case $1 in
      --preset) need_value "$@" && preset=$2 && shift ;;
      --cuda) cuda=yes ;;
      *) die "build: unknown option $1 (known: --preset P --cuda)" ;;
    esac
    shift
  done
  source tools/dev/setup.sh
  SETUP_QUIET=1 cmd_setup --no-torch
  [[ $cuda == no ]] || SETUP_QUIET=1 cmd_setup --no-torch --cuda
  use_tools
  build_core "$preset" TESTS EXAMPLES || die "the core did not build"
  install_core "$preset"
  [[ $cuda == no ]] || { build_cuda tessera_cuda && install_cuda; } || die "the kernels did not build"
  local part failed=()
  for part in python java rust examples; do
    "build_$part" || failed+=("$part")
  done
  ((${#failed[@]} == 0)) || die "these did not build: ${failed[*]}"
  say "built; installed into ${TESSERA_PREFIX#"$ROOT"/}"
}

# build_core PRESET OPTION...: each OPTION is a TESSERA_BUILD_<OPTION> that has to be on. What an earlier command switched
# on stays on, so that `./dev demo` and `./dev test` in turn do not configure each time.
build_core() {
  local preset=$1 dir=build/$1 option args=() configure=no
  shift
  [[ -f $dir/build.ninja ]] || configure=yes
  [[ $configure == no ]] || args+=(-DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCHMARKS=OFF -DTESSERA_BUILD_EXAMPLES=OFF)
  for option in "$@"; do
    grep -qsE "^TESSERA_BUILD_$option:[A-Z]+=ON$" "$dir/CMakeCache.txt" && continue
    configure=yes
    args+=("-DTESSERA_BUILD_$option=ON")
  done
  if [[ $configure == yes ]]; then
    say "core: configuring preset $preset"
    run_logged "configure-$preset" cmake --preset "$preset" -DCMAKE_INSTALL_PREFIX="$TESSERA_PREFIX" \
      -DCMAKE_INSTALL_LIBDIR=lib "${args[@]}" || return
  fi
  say "core: building preset $preset"
  run_logged "build-$preset" cmake --build "$dir"
}

install_core() {
  run_logged "install-$1" cmake --install "build/$1" --prefix "$TESSERA_PREFIX" || die "the core could not be installed"
}

# build_cuda TARGET: of cuda/, with nvcc: tessera_cuda (the plug-in with kernels for every device) or kernels_ptx.
build_cuda() {
  say "CUDA: building $1 with $(find_nvcc)"
  run_logged configure-cuda cmake -S cuda -B build/cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib \
    -DTESSERA_NVCC="$(find_nvcc)" || return
  run_logged "build-cuda-$1" cmake --build build/cuda --target "$1"
}

# Beside libtessera.so, which looks for it there.
install_cuda() { run_logged install-cuda cmake --install build/cuda --prefix "$TESSERA_PREFIX"; }

# What a binding sees of the core.
prefix_hash() { hash_of "$TESSERA_PREFIX"/lib/libtessera*.so* "$TESSERA_PREFIX"/include/tessera/*.h; }

build_python() {
  local key
  [[ -f bindings/python/pyproject.toml ]] || return 0
  key=$(tree_hash bindings/python)-$(prefix_hash)-$(hash_of "$TESSERA_PREFIX"/bin/tessera) # the wheel holds the command
  stamp_ok python-binding "$key" && "$VENV/bin/python" -c 'import importlib.util as u; exit(u.find_spec("tessera") is None)' && return
  say "Python: building the wheel into .venv"
  # One file, of which the compiler takes a minute.
  CMAKE_C_COMPILER_LAUNCHER=$(command -v ccache || true) run_logged build-python "$VENV/bin/python" -m pip install \
    --no-build-isolation --no-deps --no-input --quiet --config-settings=build-dir="$ROOT/build/python" ./bindings/python || return
  stamp_set python-binding "$key"
}

# maven POM ARGUMENTS...: offline once this set of POMs was resolved; a transfer that broke is tried again.
maven() {
  local pom=$1 name=$2 key try rc
  shift 2
  key=$(cat "$(dirname "$pom")"/pom.xml "$(dirname "$pom")"/*/pom.xml 2>/dev/null | hash_of -)-$*
  if stamp_ok "maven-$name" "$key"; then
    run_logged "$name" limited 40 mvn -B -ntp -Dstyle.color=never -o -f "$pom" "$@"
    return
  fi
  for try in 1 2 3; do
    run_logged "$name" limited 40 mvn -B -ntp -Dstyle.color=never -f "$pom" "$@" && { stamp_set "maven-$name" "$key"; return; }
    rc=$?
    grep -qE 'Could not transfer|Connection (reset|timed out)|Read timed out' "$LOGS/$name.log" || return "$rc"
    say "Maven: try $try of 3 failed on a transfer"
  done
  return 1
}

build_java() {
  local key goal=package
  [[ -f bindings/java/pom.xml ]] || return 0
  # An example project of its own finds the binding in the local repository; as a module of the binding's it need not.
  [[ -f examples/java/pom.xml ]] && ! grep -q 'examples/java' bindings/java/pom.xml && goal=install
  key=$(tree_hash bindings/java examples/java)-$(prefix_hash)-$goal
  stamp_ok java-binding "$key" && compgen -G 'bindings/java/target/*.jar' >/dev/null && return
  say "Java: building bindings/java"
  maven bindings/java/pom.xml build-java -DskipTests "$goal" || return
  if [[ $goal == install ]]; then
    say "Java: building examples/java"
    maven examples/java/pom.xml build-java-example -DskipTests package || return
  fi
  stamp_set java-binding "$key"
}

build_rust() {
  [[ -f bindings/rust/Cargo.toml ]] || return 0
  say "Rust: building bindings/rust"
  run_logged build-rust cargo build --workspace --manifest-path bindings/rust/Cargo.toml
}

# The Rust example; those in C are a part of the CMake build, those in Java of build_java.
build_examples() {
  [[ -f examples/rust/Cargo.toml ]] || return 0
  say "Rust: building examples/rust"
  run_logged build-rust-example cargo build --release --manifest-path examples/rust/Cargo.toml
}

# The examples with a network of DJL (PyTorch's libraries: 120 MB to download, 430 MB unpacked in ~/.djl.ai) and of candle.
build_frameworks() {
  say "Java: building examples/java-djl"
  # Again: the local repository is the machine's, and another clone may have put its binding there meanwhile.
  maven bindings/java/pom.xml build-java -DskipTests install || return
  maven examples/java-djl/pom.xml build-java-djl package || return
  say "Rust: building examples/rust-candle"
  run_logged build-rust-candle cargo build --manifest-path examples/rust-candle/Cargo.toml
}
