# shellcheck shell=bash
# ./dev env: what `eval "$(./dev env)"` needs to make this build the one that a shell uses.

cmd_env() {
  use_tools
  local name
  for name in PATH VIRTUAL_ENV JAVA_HOME TESSERA_PREFIX CMAKE_PREFIX_PATH PKG_CONFIG_PATH; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  # Programs that were linked by pkg-config find the library without an rpath.
  # shellcheck disable=SC2016  # the shell that evaluates this expands it
  printf 'export LD_LIBRARY_PATH=%q${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\n' "$TESSERA_PREFIX/lib"
}
