# shellcheck shell=bash
# ./dev fmt: write what ./dev lint would ask for.

cmd_fmt() {
  source tools/dev/setup.sh
  source tools/dev/lint.sh
  SETUP_QUIET=1 cmd_setup --no-torch --lint
  use_tools
  format_cpp -i
  ruff format --quiet "${PYTHON_PLACES[@]}"
  ruff check --quiet --fix "${PYTHON_PLACES[@]}" || true
  rust_format ""
  git diff --stat
}
