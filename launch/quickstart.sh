#!/usr/bin/env bash
# The main job on a plain machine: a small model learns arithmetic by reinforcement learning in unified FP8. No GPU.
# Arguments go to `megatron-rl train`: bash launch/quickstart.sh --train.steps=5
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root" # the config's paths are relative to it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more threads slow down a model this small
exec .venv/bin/python -m megatron_rl train configs/quickstart.toml "$@"
