#!/usr/bin/env bash
# Quickstart with a tensor-parallel trainer on NPROC ranks of this machine (default 2). The losses equal those of one process.
# Arguments are passed to `megatron-rl train`.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root"
nproc=${NPROC:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
  -m megatron_rl train configs/quickstart.toml "--train.layout.tp=$nproc" "$@"
