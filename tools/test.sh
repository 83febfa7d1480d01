#!/usr/bin/env bash
# Install if needed, lint, check formatting and types, and run the tests that need no GPU.
#   --all   also run the tests marked `long`: a real SLURM, kills, eight ranks, full matrices. Must be the first argument.
# Other arguments go to pytest: bash tools/test.sh tests/unit -k config
set -euo pipefail

selection="not gpu and not long"
[ "${1:-}" != --all ] || { selection="not gpu"; shift; }
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=.venv/bin/python
$python -m ruff check .
$python -m ruff format --check --quiet . || { echo "not formatted: run $python -m ruff format ." >&2; exit 1; }
types=$(mktemp)
trap 'kill $mypy 2>/dev/null || true; rm -f "$types"' EXIT
$python -m mypy >"$types" 2>&1 & # takes one core for a minute; runs beside the tests, which often wait
mypy=$!
status=0
$python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$selection" "$@" || status=$? # testpaths puts files with engines first; each file stays on one worker
wait $mypy || status=$?
cat "$types"
exit $status
