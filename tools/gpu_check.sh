#!/usr/bin/env bash
# Check the GPU tier on this machine, then measure it: tests/gpu in parts, in 25 minutes. What passed is not run again.
#   bash tools/gpu_check.sh                                # what did not pass yet
#   bash tools/gpu_check.sh --quick                        # what needs no engine, in 5 minutes
#   bash tools/gpu_check.sh --list                         # the parts, and which passed
#   bash tools/gpu_check.sh kernels speed-sync --again     # these parts, also if they passed
#   bash tools/gpu_check.sh kernels -- -k backends         # what follows -- goes to pytest
#   PYTHON=python3 OUT=DIR bash tools/gpu_check.sh         # another interpreter than .venv-gpu's or .venv's, another folder than benchmarks/
# Writes OUT/<gpu>-<date>/<part>.xml (JUnit: every check) and .json (pytest-benchmark: every figure). Compiled kernels, and what passed, are
# kept in $SGLANG_CACHE_DIR, by default ~/.cache/megatron-rl-kernels.
# Exit code 0: all passed; 1: something is not as it should be; 2: no GPU, or a wrong option; 124: the time was up: run it again to go on.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
python=${PYTHON:-}
for candidate in .venv-gpu/bin/python .venv/bin/python python3; do
  if [ -z "$python" ] && command -v "$candidate" >/dev/null; then python=$candidate; fi
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
gpu=$("${python:-python3}" -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null) || {
  echo "gpu_check: no NVIDIA GPU that torch sees; megatron-rl doctor says what is missing" >&2
  exit 2
}
exec "$python" tools/checks/gpu_parts.py "$gpu" "$@"
