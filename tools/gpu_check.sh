#!/usr/bin/env bash
# Checks the GPU tier on this machine, then measures it: all parts in under 9 minutes, each by itself. Results: benchmarks/<gpu>-<date>.json and .md.
#   bash tools/gpu_check.sh                     # everything
#   bash tools/gpu_check.sh --dry-run           # list the parts and what each lacks here; needs no GPU
#   bash tools/gpu_check.sh --only products,layer
#   PYTHON=python3 bash tools/gpu_check.sh      # another interpreter than .venv-gpu's or .venv's
# Exit code 0: all that ran is as it should be; 1: something is not; 2: no GPU, or bad options.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
python=${PYTHON:-}
for candidate in .venv-gpu/bin/python .venv/bin/python python3; do
  if [ -z "$python" ] && command -v "$candidate" >/dev/null; then python=$candidate; fi
done
export PYTHONPATH="$root:$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "${python:-python3}" tools/gpu_check.py "$@"
