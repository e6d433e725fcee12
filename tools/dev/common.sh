# shellcheck shell=bash
# What the commands of ./dev share: messages, quiet runs with a heartbeat, stamps, and the environment of tools.
# Sourced by ./dev with ROOT set and the working directory there.

VENV=$ROOT/.venv
LOGS=$ROOT/build/logs
STAMPS=$VENV/.tessera-stamps
export TESSERA_PREFIX=$ROOT/build/prefix

# The machine's cache of what is too large to keep once per clone.
TESSERA_CACHE=${TESSERA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tessera}

# A descriptor that never delivers: `read -t` on it is a sleep that leaves no child process behind.
exec {NEVER}<> <(:)
BEAT=""
AHEAD="" # the process group of `begin_ahead`
trap '[[ -z $BEAT ]] || kill "$BEAT" 2>/dev/null || true; end_ahead' EXIT

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }
warn() { printf '[%3ds] warning: %s\n' "$SECONDS" "$*" >&2; }
die() {
  printf 'dev: %s\n' "$*" >&2
  exit 1
}

# run_logged NAME COMMAND...: output goes to build/logs/NAME.log and is shown only on failure; a heartbeat shows the
# log's last line meanwhile. The command stays in the foreground, so that Ctrl-C reaches it and SIGINT is not ignored in it.
run_logged() {
  local name=$1 rc=0 outer=$BEAT # a run may hold another one
  shift
  mkdir -p "$LOGS"
  local log=$LOGS/$name.log
  if [[ ${TESSERA_VERBOSE:-0} == 1 ]]; then
    "$@" </dev/null 2>&1 | tee "$log"
    return
  fi
  heartbeat "$log" &
  BEAT=$!
  "$@" </dev/null >"$log" 2>&1 || rc=$?
  kill "$BEAT" 2>/dev/null || true
  wait "$BEAT" 2>/dev/null || true
  [[ ! -t 1 ]] || printf '\r\033[K'
  BEAT=$outer
  if ((rc != 0)); then
    printf -- '---- the end of %s (exit status %d) ----\n' "${log#"$ROOT"/}" "$rc"
    tail -n "${TESSERA_LOG_LINES:-80}" "$log"
    printf -- '----\n'
  fi
  return "$rc"
}

# On a terminal a line that is drawn over itself; elsewhere one a minute, so that nobody takes a long run for a hung one.
heartbeat() {
  local pause=60 begin="" end=$'\n' width=100 last
  [[ ! -t 1 ]] || { pause=2 begin=$'\r\033[K' end="" width=64; }
  trap - EXIT
  while kill -0 $$ 2>/dev/null; do
    read -rt "$pause" -u "$NEVER" _ || true
    last=$(tail -c 400 "$1" 2>/dev/null | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-"$width") || true
    printf '%s[%3ds]     … %s%s' "$begin" "$SECONDS" "$last" "$end"
  done
}

# measure_patience: how many times longer than on an idle machine tests wait for what has to happen, in the environment of
# all that is started from here on (tests/patience.hpp). What the caller has set stays.
measure_patience() {
  local source="measured"
  if [[ -n ${TESSERA_TEST_PATIENCE:-} ]]; then
    source="given"
  else
    TESSERA_TEST_PATIENCE=$("$VENV/bin/python" tools/machine_speed.py) || die "the machine's speed could not be measured"
  fi
  export TESSERA_TEST_PATIENCE
  say "machine speed: factor $TESSERA_TEST_PATIENCE ($source); deadlines are that much longer"
}

# patient N: N, stretched by that factor, as an integer.
patient() { awk -v n="$1" -v factor="${TESSERA_TEST_PATIENCE:-1}" 'BEGIN { printf "%d", n * factor + 0.999 }'; }

# limited MINUTES COMMAND...: no test runner goes on for ever. Exit status 124 says that its time was over; what it had
# started and left running is ended then, so that it does not disturb what comes next. LIMIT_S is what it had.
limited() {
  local rc=0 begin=$SECONDS mark="DEV_LIMITED=$$.$RANDOM$RANDOM"
  LIMIT_S=$(patient $(($1 * 60)))
  shift
  env "$mark" timeout --foreground --kill-after=20 "$LIMIT_S" "$@" || rc=$?
  if ((rc == 124 || rc == 137 && SECONDS - begin >= LIMIT_S)); then
    rc=124
    end_marked "$mark"
  fi
  return "$rc"
}

# end_marked NAME=VALUE: ends all processes that have this in their environment.
end_marked() {
  local file pid
  while IFS= read -r file; do
    pid=${file#/proc/}
    kill -KILL "${pid%/environ}" 2>/dev/null || true
  done < <(grep -lzxsF -- "$1" /proc/[0-9]*/environ || true)
}

# retry TIMES COMMAND...: registries fail now and then; a download is worth another try, a compiler error is not.
retry() {
  local times=$1 try
  shift
  for ((try = 1; try <= times; try++)); do
    "$@" && return
    ((try == times)) || { echo "try $try of $times failed: $*"; read -rt $((try * 5)) -u "$NEVER" _ || true; }
  done
  return 1
}

# version_ge A B: is version A at least B?
version_ge() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

minimum() { awk -v tool="$1" '$1 == tool { print $2 }' deps/versions.txt; }

hash_of() { sha256sum "$@" 2>/dev/null | sha256sum | cut -c 1-32; }

# tree_hash DIR...: of all files that git knows or would add, by content.
tree_hash() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z --cached --others --exclude-standard -- "$@"
  else
    find "$@" -type f -not -path '*/target/*' -not -path '*/__pycache__/*' -print0 | sort -z
  fi | xargs -0 -r sha256sum 2>/dev/null | sha256sum | cut -c 1-32
}

stamp_ok() { [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$2" ]]; }
stamp_set() {
  mkdir -p "$STAMPS"
  printf '%s\n' "$2" >"$STAMPS/$1"
}

# find_jdk: the home of the first JDK that is new enough, from JAVA_HOME, PATH and the distribution's folder.
find_jdk() {
  local want home version
  want=$(minimum java)
  for home in "${JAVA_HOME:-}" "$(dirname "$(dirname "$(readlink -f "$(command -v javac || echo /)")")")" /usr/lib/jvm/*; do
    [[ -x $home/bin/javac && -f $home/release ]] || continue
    version=$(sed -n 's/^JAVA_VERSION="\([0-9]*\).*/\1/p' "$home/release")
    ((${version:-0} >= want)) && { echo "$home"; return; }
  done
  return 1
}

# find_cargo_dir: the folder of a cargo whose rustc is new enough.
find_cargo_dir() {
  local want dir version
  want=$(minimum rust)
  for dir in "$(dirname "$(command -v cargo || echo /none/cargo)")" "${CARGO_HOME:-$HOME/.cargo}/bin" /usr/bin; do
    [[ -x $dir/cargo && -x $dir/rustc ]] || continue
    version=$("$dir/rustc" --version 2>/dev/null | awk '{ print $2 }') || continue
    version_ge "${version:-0}" "$want" && { echo "$dir"; return; }
  done
  return 1
}

# find_nvcc: the first nvcc that is new enough: of CUDA_HOME, PATH, the usual place, then that of deps/cuda.txt.
find_nvcc() {
  local want nvcc version
  want=$(minimum nvcc)
  for nvcc in ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} "$(command -v nvcc || echo /none/nvcc)" /usr/local/cuda/bin/nvcc \
    "$(nvcc_cache)"/lib/python*/site-packages/nvidia/cu13/bin/nvcc; do
    [[ -x $nvcc ]] || continue
    version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') || continue
    version_ge "${version:-0}" "$want" && { echo "$nvcc"; return; }
  done
  return 1
}
nvcc_cache() { echo "$TESSERA_CACHE/nvcc-$(hash_of deps/cuda.txt)"; }

# put_first VARIABLE ENTRY: heads that list of paths, once however often it is evaluated.
put_first() {
  local rest=:${!1:-}:
  while [[ $rest == *":$2:"* ]]; do rest=${rest/":$2:"/:}; done
  rest=${rest#:}
  rest=${rest%:}
  export "$1=$2${rest:+:$rest}"
}

# use_tools: the environment in which everything is built and run. Called after setup.
use_tools() {
  local home cargo entry libraries=
  # What a shell has of `./dev env`, maybe another clone's, does not stand in for the libraries that are tested here.
  while IFS= read -rd : entry; do
    [[ -z $entry || -e $entry/libtessera.so ]] || libraries+=${libraries:+:}$entry
  done <<<"${LD_LIBRARY_PATH:-}:"
  if [[ -n $libraries ]]; then export LD_LIBRARY_PATH=$libraries; else unset LD_LIBRARY_PATH; fi
  if home=$(find_jdk); then
    export JAVA_HOME=$home
    put_first PATH "$home/bin"
  fi
  if cargo=$(find_cargo_dir); then
    put_first PATH "$cargo"
  fi
  put_first PATH "$TESSERA_PREFIX/bin"
  put_first PATH "$VENV/bin"
  export VIRTUAL_ENV=$VENV
  put_first CMAKE_PREFIX_PATH "$TESSERA_PREFIX"
  put_first PKG_CONFIG_PATH "$TESSERA_PREFIX/lib/pkgconfig"
  # So that a second clone of the same sources compiles from ccache, precompiled headers and their users too.
  export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
  export CARGO_NET_RETRY=${CARGO_NET_RETRY:-5} CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}
  export PIP_DISABLE_PIP_VERSION_CHECK=1
}

need_value() { [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"; }

# as_batch_job: this shell and what it starts from now on. Gloo's thread spins while another thread holds its lock. Where it
# preempts that one, it spins for a whole time slice; with more ranks than processors that took half of the tests' time. The
# kernel lets no batch job preempt another. Where that cannot be had, the tests take longer.
as_batch_job() { chrt --batch --pid 0 "$BASHPID" || warn "chrt cannot make this shell a batch job: tests over Gloo are slow"; }

# begin_ahead COMMAND...: on what processors would otherwise idle for, one such command at a time. Linux lets an idle job run
# only while nothing else wants the processor. Its output goes to build/logs/ahead.log.
begin_ahead() {
  mkdir -p "$LOGS"
  set -m # a process group of its own
  (
    AHEAD=""
    if renice -n 19 -p "$BASHPID" && chrt --idle --pid 0 "$BASHPID"; then "$@"; fi
  ) </dev/null >"$LOGS/ahead.log" 2>&1 &
  AHEAD=$!
  set +m
}

# end_ahead: ends it where it is, and all its processes. Ninja goes on from there.
end_ahead() {
  [[ -n $AHEAD ]] || return 0
  local word=TERM begin=$SECONDS
  while kill "-$word" -- "-$AHEAD" 2>/dev/null; do
    wait "$AHEAD" 2>/dev/null || true
    read -rt 0.1 -u "$NEVER" _ || true
    word=0
    ((SECONDS - begin < 20)) || word=KILL
  done
  AHEAD=""
}
