#!/usr/bin/env bash
# The main job on a plain machine: a small model learns arithmetic by reinforcement learning in unified FP8. No GPU.
#   bash launch/quickstart.sh [NAME] [--section.key=value ...]
# NAME: quickstart (the default), quickstart_moe, quickstart_mtp, calculator, tool_agent or gsm8k. Its model is made by a warm start, unless it is there.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root" # the config's paths are relative to it
name=quickstart
if [[ ${1:--} != -* ]]; then name=$1 && shift; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # more gain little with a model this small
.venv/bin/python -m examples.arithmetic.warm_start "configs/$name.toml" "$@"
exec .venv/bin/python -m megatron_rl train "configs/$name.toml" "$@"
