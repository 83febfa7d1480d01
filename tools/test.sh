#!/usr/bin/env bash
# Set up, then lint, check formats and types, and run the tests that need no GPU.
# Arguments go to pytest: bash tools/test.sh -m "not slow and not gpu", bash tools/test.sh tests/unit
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=.venv/bin/python
$python -m ruff check .
$python -m ruff format --check --quiet . || { echo "not formatted: run $python -m ruff format ." >&2; exit 1; }
$python -m mypy
exec $python -m pytest -n 2 --dist loadfile -m "not gpu" "$@" # a file stays on one worker: it shares its worlds and engines
