# shellcheck shell=bash
# ./dev env: what `eval "$(./dev env)"` needs to make this build the one that a shell uses.

cmd_env() {
  use_tools
  # Programs that were linked by pkg-config find the library without an rpath.
  put_first LD_LIBRARY_PATH "$TESSERA_PREFIX/lib"
  local name
  for name in PATH VIRTUAL_ENV JAVA_HOME TESSERA_PREFIX CMAKE_PREFIX_PATH PKG_CONFIG_PATH LD_LIBRARY_PATH; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
}
