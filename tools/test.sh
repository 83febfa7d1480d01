#!/usr/bin/env bash
# Install if needed, including what only tests need, lint, check formatting and types, and run the tests that need no GPU.
#   --all   also run the tests marked `long`: a real SLURM, kills, eight ranks, full matrices. Must be the first argument.
# Other arguments go to pytest: bash tools/test.sh tests/unit -k config
set -euo pipefail

selection="not gpu and not long"
[ "${1:-}" != --all ] || { selection="not gpu"; shift; }
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
program=test
. "$root/launch/common.sh"

# Install what only tests need, and the trackers. PEFT and the GPU tier's Triton get folders of their own, since transformers, torch, and
# SGLang would import them in each process of a run. A last file marks a finished installation.
install_test_packages() (
  lock tools/test.sh
  triton=$(grep ^triton== launch/requirements-gpu.txt) done="$venv/.megatron-rl-test-packages"
  wanted=$(cat launch/requirements-test.txt launch/requirements-peft.txt; echo "$triton")
  if [ "$(cat "$done" 2>/dev/null)" != "$wanted" ]; then
    check_disk 3800 "; free some, or move the clone"
    echo "megatron-rl test: installing the packages of tests and $triton into $venv (300 MB to download; this happens once)"
    rm -rf "$venv"/{peft,triton} "$done"
    pip -qq install --no-compile --no-deps -r launch/requirements-test.txt
    pip -qq install --no-compile --no-deps --target "$venv/peft" -r launch/requirements-peft.txt
    pip -qq install --no-compile --no-deps --target "$venv/triton" "$triton"
    echo "$wanted" >"$done"
  fi
)

bash "$root/launch/setup.sh"
cd "$root"
install_test_packages
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same files, and would compile each of them again
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=.venv/bin/python
$python -m ruff check .
$python -m ruff format --check --quiet . || { echo "not formatted: run $python -m ruff format ." >&2; exit 1; }
types=$(mktemp)
trap 'kill $mypy 2>/dev/null || true; rm -f "$types"' EXIT
$python -m mypy >"$types" 2>&1 & # takes one core for a minute; runs beside the tests, which often wait
mypy=$!
status=0
# Tests often wait for engines and ranks. Where memory allows it, a third worker computes meanwhile.
workers=$(awk '/^MemAvailable/ {print ($2 > 10e6 ? 3 : 2)}' /proc/meminfo)
$python -m pytest -n "$workers" --dist loadgroup --no-loadscope-reorder -m "$selection" "$@" || status=$? # testpaths puts files with engines first; each file or `xdist_group` stays on one worker
wait $mypy || status=$?
cat "$types"
exit $status
