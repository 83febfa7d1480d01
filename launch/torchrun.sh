#!/usr/bin/env bash
# The quickstart's job with the trainer on two ranks of this machine, tensor parallel: the same losses as one process.
# Arguments go to `megatron-rl train`. NPROC ranks (default 2), which is also train.layout.tp here.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root"
nproc=${NPROC:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
  -m megatron_rl train configs/quickstart.toml "--train.layout.tp=$nproc" "$@"
