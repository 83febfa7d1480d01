#!/usr/bin/env bash
# Install if needed, including Triton for the tests of its kernels, lint, check formatting and types, and run the tests that need no GPU.
#   --all   also run the tests marked `long`: a real SLURM, kills, eight ranks, full matrices. Must be the first argument.
# Other arguments go to pytest: bash tools/test.sh tests/unit -k config
set -euo pipefail

selection="not gpu and not long"
[ "${1:-}" != --all ] || { selection="not gpu"; shift; }
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
program=test
. "$root/launch/common.sh"

# Install the GPU tier's Triton into a folder of its own, since torch and SGLang would use it. A last file marks a finished installation.
install_triton() (
  pin=$(grep ^triton== launch/requirements-gpu.txt)
  lock tools/test.sh
  if [ "$(cat "$venv/triton/installed" 2>/dev/null)" != "$pin" ]; then
    check_disk 3400 "; free some, or move the clone"
    echo "megatron-rl test: installing $pin into $venv/triton (250 MB to download; this happens once)"
    rm -rf "$venv/triton"
    pip -qq install --no-compile --no-deps --target "$venv/triton" "$pin"
    echo "$pin" >"$venv/triton/installed"
  fi
)

bash "$root/launch/setup.sh"
cd "$root"
install_triton
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
