# shellcheck shell=bash
# ./dev setup: everything that a bare machine lacks. Three layers, each with its stamp, so that a second run only
# compares hashes: system packages (apt), .venv with the pinned Python tools, PyTorch in a cache that all clones share.

cmd_setup() {
  local torch=yes force=no group=""
  while (($#)); do
    case $1 in
      --no-torch) torch=no ;;
      --force) force=yes ;;
      --bench) group=bench ;;
      --clang) group=clang ;;
      --lint) group=lint ;;
      --format) group=format ;;
      --clusters) group=clusters torch=yes ;;
      --cuda) group=cuda ;;
      --quiet) SETUP_QUIET=1 ;;
      *) die "setup: unknown option $1 (known: --no-torch --force --bench --clang --lint --format --clusters --cuda --quiet)" ;;
    esac
    shift
  done
  [[ $force == yes ]] && rm -rf "$STAMPS"
  local before=$SECONDS
  ensure_base
  [[ $group == bench || $group == clang ]] && ensure_packages "$group"
  [[ $group == bench ]] && ensure_peers
  [[ $group == lint ]] && ensure_lint
  [[ $group == format ]] && ensure_format
  [[ $group == cuda ]] && ensure_nvcc
  [[ $torch == yes ]] && ensure_torch
  [[ $group == clusters ]] && ensure_clusters
  [[ ${SETUP_QUIET:-0} == 1 ]] || say "set up in $((SECONDS - before)) s: $("$VENV/bin/python" --version), JDK at $(find_jdk), Rust at $(find_cargo_dir)"
}

ensure_base() {
  local key
  key=$(hash_of deps/apt.txt deps/python.txt deps/versions.txt tools/dev/setup.sh)
  stamp_ok base "$key" && [[ -x $VENV/bin/python && -x $VENV/bin/cmake ]] && return
  install_system build test
  install_jdk
  install_maven
  install_rust
  install_python
  install_venv
  pip_install python-tools -r deps/python.txt
  stamp_set base "$key"
}

# ensure_packages GROUP: of deps/apt.txt.
ensure_packages() {
  local key
  key=$(hash_of deps/apt.txt)
  stamp_ok "$1" "$key" && return
  install_system "$1"
  stamp_set "$1" "$key"
}

# Peers of the benchmarks that come from PyPI. Not beside the other tools: Intel MPI has an mpirun too. Without what they
# depend on: PyTorch and the others are there.
ensure_peers() {
  local key
  key=$(hash_of deps/bench.txt)
  stamp_ok peers "$key" && return
  say "Python: Intel MPI and torchmetrics of deps/bench.txt (about 130 MB)"
  rm -rf "$VENV/impi"
  pip_install bench-peers --no-deps --ignore-installed --prefix "$VENV/impi" -r deps/bench.txt
  stamp_set peers "$key"
}

ensure_lint() {
  local key
  key=$(hash_of deps/lint.txt tools/dev/setup.sh)
  stamp_ok lint "$key" && return
  say "Python: the linters of deps/lint.txt"
  pip_install lint-tools -r deps/lint.txt
  install_rust_linters
  stamp_set lint "$key"
}

# What formats C++ and Python, without the rest of the linters.
ensure_format() {
  local key
  key=$(hash_of deps/lint.txt)
  stamp_ok format "$key" && return
  pip_install format-tools -c deps/lint.txt clang-format ruff
  stamp_set format "$key"
}

# The machine's nvcc, or that of PyPI: once a machine.
ensure_nvcc() {
  local cache
  find_nvcc >/dev/null && return
  cache=$(nvcc_cache)
  mkdir -p "$TESSERA_CACHE"
  exec {nvcc_lock}>"$cache.lock"
  flock "$nvcc_lock" # another clone may be installing it
  if ! find_nvcc >/dev/null; then
    say "CUDA: installing deps/cuda.txt into $cache (about 400 MB, once a machine)"
    "$("$VENV/bin/python" -c 'import sys; print(sys._base_executable)')" -m venv --clear "$cache"
    run_logged pip-cuda retry 3 "$cache/bin/python" -m pip install --disable-pip-version-check --no-input --no-cache-dir \
      --retries 5 --timeout 120 --no-deps -r deps/cuda.txt || die "pip could not install nvcc; the whole log is build/logs/pip-cuda.log"
  fi
  exec {nvcc_lock}>&-
  find_nvcc >/dev/null || die "there is no nvcc of at least $(minimum nvcc); install a CUDA toolkit and set CUDA_HOME"
}

# The services that the cluster tests start by themselves, and the launchers of PyPI: once a machine, as PyTorch is.
ensure_clusters() {
  local key site cache
  key=$(hash_of deps/apt.txt deps/torch.txt deps/clusters.txt tools/dev/setup.sh)
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  stamp_ok clusters "$key" && [[ -f $site/tessera_clusters.pth && -d $(<"$site/tessera_clusters.pth")/ray ]] && return
  install_system clusters
  cache=$TESSERA_CACHE/clusters-$(hash_of deps/torch.txt deps/clusters.txt)-$("$VENV/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')
  mkdir -p "$TESSERA_CACHE"
  exec {clusters_lock}>"$cache.lock"
  flock "$clusters_lock" # another clone may be installing it
  if [[ ! -f $cache/complete ]]; then
    say "Python: installing deps/clusters.txt into $cache (about 1 GB, once a machine)"
    "$("$VENV/bin/python" -c 'import sys; print(sys._base_executable)')" -m venv --clear "$cache"
    # DeepSpeed's setup.py imports PyTorch.
    cp "$site/tessera_torch.pth" "$("$cache/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    pip_into_clusters setuptools wheel packaging
    DS_BUILD_OPS=0 pip_into_clusters --no-build-isolation -r deps/clusters.txt
    touch "$cache/complete"
  fi
  exec {clusters_lock}>&-
  "$cache/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/tessera_clusters.pth"
  stamp_set clusters "$key"
}

# Uses the caller's $cache.
pip_into_clusters() {
  run_logged pip-clusters retry 3 "$cache/bin/python" -m pip install --disable-pip-version-check --no-input --no-cache-dir \
    --retries 5 --timeout 120 --prefer-binary "$@" ||
    die "pip could not install deps/clusters.txt; the whole log is build/logs/pip-clusters.log"
}

# without_services COMMAND...: what COMMAND installs by apt does not run as a service of this machine, now or after a restart.
# The tests start their own sshd and slurmd, on hosts that nobody else reaches.
without_services() {
  local policy=/usr/sbin/policy-rc.d made=no before unit rc=0
  before=$(enabled_units)
  if can_be_root && [[ ! -e $policy ]]; then
    made=yes
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
  fi
  "$@" || rc=$?
  [[ $made == no ]] || as_root rm "$policy"
  comm -13 <(printf '%s\n' "$before") <(enabled_units) | while IFS= read -r unit; do
    run_logged "disable-$unit" as_root systemctl disable "$unit" || warn "$unit starts with this machine"
  done
  return "$rc"
}

# The services that start with the machine, a line each.
enabled_units() { { find /etc/systemd/system/*.target.wants -name '*.service' -printf '%f\n' 2>/dev/null || true; } | sort -u; }

# rustfmt and clippy, from where cargo came.
install_rust_linters() {
  local cargo
  cargo=$(find_cargo_dir)
  if PATH=$cargo:$PATH cargo fmt --version >/dev/null 2>&1 && PATH=$cargo:$PATH cargo clippy --version >/dev/null 2>&1; then
    return
  elif [[ -x $cargo/rustup ]]; then
    run_logged rustup-lint retry 3 "$cargo/rustup" component add clippy rustfmt || die "rustup could not add clippy and rustfmt"
  elif is_installed rustc-web; then
    apt_install rustfmt-web rust-web-clippy
  else
    apt_install rustfmt rust-clippy
  fi
}

# ---- system packages ----

# apt_group NAME: the packages of a section of deps/apt.txt, one a line; alternatives keep their bars.
apt_group() {
  awk -v group="[$1]" '/^#/ || /^[[:space:]]*$/ { next } /^\[/ { on = ($0 == group); next } on { print }' deps/apt.txt
}

is_installed() { [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# pick_alternative "a | b": the one that is installed, else the first that apt could install.
pick_alternative() {
  local name names
  IFS='|' read -ra names <<<"${1// /}"
  for name in "${names[@]}"; do is_installed "$name" && { echo "$name"; return; }; done
  for name in "${names[@]}"; do has_candidate "$name" && { echo "$name"; return; }; done
  echo "${names[0]}"
}

has_candidate() { [[ $(apt-cache policy "$1" 2>/dev/null) == *"Candidate: "[0-9]* ]]; }

# install_system GROUP...: nothing at all where all are installed, so that no root and no network is needed then.
install_system() {
  local group line missing=()
  if ! command -v apt-get >/dev/null; then
    need_by_hand "$@"
    return
  fi
  for group in "$@"; do
    while IFS= read -r line; do
      case $line in
        *'|'*)
          local name any=no
          for name in ${line//|/ }; do is_installed "$name" && any=yes; done
          [[ $any == yes ]] || { apt_update && missing+=("$(pick_alternative "$line")"); }
          ;;
        *) is_installed "$line" || missing+=("$line") ;;
      esac
    done < <(apt_group "$group")
  done
  apt_install "${missing[@]}"
}

# as_root COMMAND...: sudo_beforehand has asked for the password where there is somebody to ask.
as_root() {
  if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi
}

APT_UPDATED=no
apt_update() {
  [[ $APT_UPDATED == yes ]] && return
  APT_UPDATED=yes
  can_be_root || return 0
  say "apt: refreshing the package lists"
  sudo_beforehand
  run_logged apt-update retry 3 apt_get update || warn "the package lists could not be refreshed; going on with the old ones"
}

can_be_root() { ((EUID == 0)) || command -v sudo >/dev/null; }

# A password prompt must not disappear in a log.
sudo_beforehand() { ((EUID == 0)) || sudo -v 2>/dev/null || true; }

apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -o Acquire::Retries=5 -o Acquire::http::Timeout=60 \
    -o Acquire::https::Timeout=60 -o DPkg::Lock::Timeout=600 "$@"
}

# --no-remove: a set-up that throws out packages of the machine's owner is worse than one that stops.
apt_install() {
  (($#)) || return 0
  if ! can_be_root; then
    die "these packages are missing, and this user is neither root nor has sudo. As root:
    apt-get update && apt-get install $*
Then start this command again."
  fi
  apt_update
  sudo_beforehand
  say "apt: installing $*"
  without_services run_logged apt-install retry 3 apt_get install --no-install-recommends --no-remove "$@" ||
    die "apt could not install them; by hand it is: apt-get install $*"
}

# Without apt we check what counts, by compiling nothing: the commands and the headers.
need_by_hand() {
  local header lacking=()
  [[ ${TESSERA_SYSTEM_DEPS:-} == present ]] && return
  for tool in g++ make pkg-config git; do command -v "$tool" >/dev/null || lacking+=("$tool"); done
  for header in gloo/allreduce.h isa-l.h simdjson.h CLI/CLI.hpp fmt/format.h spdlog/spdlog.h openssl/hmac.h gtest/gtest.h; do
    [[ -e /usr/include/$header || -e /usr/local/include/$header ]] || lacking+=("<$header>")
  done
  ((${#lacking[@]} == 0)) && return
  printf 'dev: this machine has no apt, so install these yourself (their Debian names):\n' >&2
  for group in "$@"; do apt_group "$group" | sed 's/^/    /' >&2; done
  die "not found: ${lacking[*]}. If they are there under other paths, set TESSERA_SYSTEM_DEPS=present and start again."
}

install_jdk() {
  find_jdk >/dev/null && return
  say "no JDK of at least $(minimum java) found"
  command -v apt-get >/dev/null || die "install a JDK of at least $(minimum java) and set JAVA_HOME"
  install_system jdk
  find_jdk >/dev/null || die "there is still no JDK of at least $(minimum java); install one and set JAVA_HOME"
}

install_maven() {
  command -v mvn >/dev/null && return
  command -v apt-get >/dev/null || die "install Maven of at least $(minimum maven)"
  install_system maven
}

# The distribution's Rust where it is new enough, else its rustup, else rustc-web (a current Rust that Debian keeps for
# browsers), else rustup as its authors say. Debian 12 ends at the third, Debian 13 and Ubuntu 24.04 before.
install_rust() {
  local want version
  find_cargo_dir >/dev/null && return
  want=$(minimum rust)
  say "no Rust of at least $want found"
  if command -v rustup >/dev/null; then
    install_rust_toolchain
  elif command -v apt-get >/dev/null && can_be_root; then
    apt_update
    version=$(apt-cache policy rustc | awk '/Candidate:/ { print $2 }')
    if version_ge "${version:-0}" "$want"; then
      apt_install rustc cargo
    elif has_candidate rustup; then
      apt_install rustup
      install_rust_toolchain
    elif version=$(apt-cache policy rustc-web | awk '/Candidate:/ { print $2 }') && version_ge "${version:-0}" "$want"; then
      apt_install rustc-web cargo-web
    fi
  fi
  hash -r
  find_cargo_dir >/dev/null || die "Rust of at least $want is needed and the distribution has none. Install rustup as
    its site says, run 'rustup default stable', and start this command again."
}

install_rust_toolchain() {
  say "rustup: installing the stable toolchain"
  run_logged rustup retry 3 rustup toolchain install stable --profile minimal --component clippy --component rustfmt ||
    die "rustup could not install a toolchain; its words are above"
  run_logged rustup-default rustup default stable
}

# ---- Python ----

# find_python: the first new enough interpreter that can make a virtual environment and has its headers.
find_python() {
  local python want
  want=$(minimum python)
  for python in ${TESSERA_PYTHON:+"$TESSERA_PYTHON"} python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
    "$python" - "$want" <<'PY' >/dev/null 2>&1 && { echo "$python"; return; }
import os, sys, sysconfig
import ensurepip, venv
want = tuple(map(int, sys.argv[1].split(".")))
ok = sys.version_info[:2] >= want and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(0 if ok else 1)
PY
  done
  return 1
}

install_python() {
  local version
  find_python >/dev/null && return
  if command -v apt-get >/dev/null; then
    install_system python
    hash -r
    find_python >/dev/null && return
    apt_update
    for version in 3.13 3.12 3.11; do # the distribution's python3 is too old; perhaps it has a newer one beside it
      has_candidate "python$version-venv" || continue
      apt_install "python$version" "python$version-venv" "python$version-dev"
      find_python >/dev/null && return
    done
  fi
  die "Python of at least $(minimum python) with venv and headers is needed; install one, or name it in TESSERA_PYTHON"
}

install_venv() {
  local python
  [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -c 'import pip' 2>/dev/null && return
  python=$(find_python)
  say "Python: making .venv with $("$python" --version)"
  run_logged venv "$python" -m venv --clear "$VENV" || die "$python could not make a virtual environment"
}

# pip_install LOGNAME ARGUMENTS...
pip_install() {
  local name=$1
  shift
  say "Python: installing ${*#-r}"
  run_logged "pip-$name" retry 3 "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input \
    --retries 5 --timeout 120 --prefer-binary "$@" || die "pip failed; the whole log is build/logs/pip-$name.log"
}

# ---- PyTorch ----

# 5 GB are installed once a machine: into a venv of its own under TESSERA_CACHE, seen from .venv through a .pth file
# (last on the path, so .venv's own NumPy wins). An interpreter that has the right version already is used instead.
ensure_torch() {
  local key want python site
  key=$(hash_of deps/torch.txt)
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  stamp_ok torch "$key" && [[ -f $site/tessera_torch.pth && -d $(<"$site/tessera_torch.pth")/torch ]] && return
  want=$(sed -n 's/^torch==//p' deps/torch.txt)
  say "PyTorch $want: looking for one that is installed"
  local cache
  cache=$TESSERA_CACHE/torch-$want-$("$VENV/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')
  local base
  base=$("$VENV/bin/python" -c 'import sys; print(sys._base_executable)')
  for python in ${TESSERA_TORCH_PYTHON:+"$TESSERA_TORCH_PYTHON"} "$cache/bin/python" "$base"; do
    has_torch "$python" && { link_torch "$python" "$site" "$key"; return; }
  done
  make_torch_cache "$cache" "$base"
  link_torch "$cache/bin/python" "$site" "$key"
}

# has_torch PYTHON: same minor version as .venv, and every pin of deps/torch.txt met. Metadata only: importing takes seconds.
has_torch() {
  [[ -x $(command -v "$1") ]] || return 1
  "$1" - deps/torch.txt "$("$VENV/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')" <<'PY' 2>/dev/null
import importlib.metadata as metadata, sys
if sys.implementation.cache_tag != sys.argv[2]:
    sys.exit(1)
for line in open(sys.argv[1]):
    if "==" in line and not line.startswith("#"):
        name, version = line.strip().split("==")
        if metadata.version(name).split("+")[0] != version:
            sys.exit(1)
PY
}

link_torch() {
  local from
  from=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$from" >"$2/tessera_torch.pth"
  "$VENV/bin/python" -c 'import torch, safetensors' || die "PyTorch in $from cannot be imported from .venv"
  say "PyTorch: using $from"
  stamp_set torch "$3"
}

make_torch_cache() {
  local cache=$1 base=$2 free
  mkdir -p "$TESSERA_CACHE"
  free=$(df --output=avail -k "$TESSERA_CACHE" | tail -n 1)
  ((free > 8 * 1024 * 1024)) || die "PyTorch needs 8 GB free in $TESSERA_CACHE; set TESSERA_CACHE to another folder"
  exec {torch_lock}>"$cache.lock"
  flock "$torch_lock" # another clone may be installing it
  if ! has_torch "$cache/bin/python"; then
    say "PyTorch: installing into $cache (about 5 GB, some minutes, once a machine)"
    "$cache/bin/python" -c 'import pip' 2>/dev/null || "$base" -m venv --clear "$cache"
    run_logged pip-torch retry 3 "$cache/bin/python" -m pip install --disable-pip-version-check --no-input --no-cache-dir \
      --retries 5 --timeout 120 --prefer-binary -r deps/torch.txt ||
      die "pip could not install PyTorch; the whole log is build/logs/pip-torch.log"
  fi
  exec {torch_lock}>&-
}
