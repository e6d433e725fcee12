#!/usr/bin/env bash
# Build the tests of the presets that are given, one after the other: what `begin_ahead` of common.sh begins.
set -euo pipefail
ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
cd "$ROOT"
source tools/dev/common.sh
source tools/dev/setup.sh
source tools/dev/build.sh
use_tools
for preset; do build_core "$preset" TESTS; done
