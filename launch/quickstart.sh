#!/usr/bin/env bash
# Quickstart without a GPU: a small model learns arithmetic by reinforcement learning in unified FP8.
#   bash launch/quickstart.sh [NAME] [--make-model] [--section.key=value ...]
# NAME: quickstart (default), quickstart_moe, quickstart_hybrid, quickstart_mtp, calculator, tool_agent, or gsm8k. The models of quickstart and
# quickstart_hybrid are shipped, see examples/arithmetic/models; a warm start makes the others, and, with --make-model, these in runs/NAME-model.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/setup.sh"
cd "$root" # paths in the configuration are relative to the root
name=quickstart
if [[ ${1:--} != -* ]]; then name=$1 && shift; fi
if [[ ${1:-} == --make-model ]]; then shift && set -- "--model.path=runs/$name-model" "$@"; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # more threads gain little with such a small model
unset PYTHONDONTWRITEBYTECODE # or every process compiles what it imports, for 10 s
.venv/bin/python -m examples.arithmetic.warm_start "configs/$name.toml" "$@"
exec .venv/bin/python -m megatron_rl train "configs/$name.toml" "$@"
