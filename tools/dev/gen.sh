# shellcheck shell=bash
# ./dev gen: what is derived from the C headers is written anew (tools/gen); a test fails when it is not up to date.

cmd_gen() { python3 tools/gen "$@"; }
