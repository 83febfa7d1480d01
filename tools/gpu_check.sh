#!/usr/bin/env bash
# Check the GPU tier on this machine, then measure it: tests/gpu in under 9 minutes. Arguments go to pytest.
#   bash tools/gpu_check.sh                                # everything
#   bash tools/gpu_check.sh --collect-only                 # list the tests
#   bash tools/gpu_check.sh -k "backends or layers"
#   PYTHON=python3 OUT=DIR bash tools/gpu_check.sh         # another interpreter than .venv-gpu's or .venv's, another folder than benchmarks/
# Writes OUT/<gpu>-<date>.xml (JUnit: every check) and OUT/<gpu>-<date>.json (pytest-benchmark: every figure), never over older ones.
# Exit code 0: all that ran is as it should be; 1: something is not; 2: no GPU; 124: ended at the time limit, with what was found until then.
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
out=${OUT:-benchmarks}
mkdir -p "$out"
name=$(printf %s "$gpu" | tr '[:upper:]' '[:lower:]' | sed 's/nvidia//; s/[^a-z0-9]\+/-/g; s/^-//; s/-$//')-$(date +%F)
unused=$name number=2
while [ -e "$out/$unused.json" ] || [ -e "$out/$unused.xml" ]; do unused=$name-$number number=$((number + 1)); done
code=0
timeout --signal=INT --kill-after=18 520 "$python" -m pytest tests/gpu -m gpu -n 0 -p no:cacheprovider --benchmark-enable --benchmark-quiet \
  --junitxml="$out/$unused.xml" --benchmark-json="$out/$unused.json" "$@" || code=$?
echo "checks: $out/$unused.xml   figures: $out/$unused.json"
exit "$code"
