#!/usr/bin/env bash
# Check and measure the GPU tier on this machine: run tests/gpu in parts, in at most 25 minutes.
#   bash tools/gpu_check.sh                                # all parts
#   bash tools/gpu_check.sh --quick                        # parts that need no engine, in 5 minutes
#   bash tools/gpu_check.sh --list                         # the parts and their limits
#   bash tools/gpu_check.sh kernels speed-sync             # these parts
#   bash tools/gpu_check.sh kernels -- -k backends         # pass the options after -- to pytest
#   bash tools/gpu_check.sh --results=DIR                  # write into another folder than benchmarks/
#   PYTHON=python3 bash tools/gpu_check.sh                 # use another interpreter than that of .venv-gpu or .venv
# Writes benchmarks/<gpu>-<date>/<part>.xml (JUnit: every check) and .json (pytest-benchmark: every figure). Compiled kernels are kept in
# $SGLANG_CACHE_DIR (default: ~/.cache/megatron-rl-kernels).
# Exit code 0: all parts passed; 1: a part failed; 2: no GPU or a wrong option; 124: out of time, name the remaining parts in another call.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
python=${PYTHON:-}
for candidate in .venv-gpu/bin/python .venv/bin/python python3; do
  if [ -z "$python" ] && command -v "$candidate" >/dev/null; then python=$candidate; fi
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
gpu=$("${python:-python3}" -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null) || {
  echo "gpu_check: no NVIDIA GPU that torch can use; megatron-rl doctor shows what is missing" >&2
  exit 2
}
exec "$python" tools/gpu_parts.py "$gpu" "$@"
