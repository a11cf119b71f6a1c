#!/usr/bin/env bash
# Sets up if needed, then runs the whole test suite; arguments go to pytest.
#   scripts/test.sh [tests/unit -k gate ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
