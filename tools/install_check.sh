#!/usr/bin/env bash
# Check installations by pip and by uv, outside of this checkout: build a wheel, install it into fresh virtual environments, and run it there.
# Not in CI: it downloads the CPU tier twice, about 1 GB. Prints a line per check and exits with 1 at the first that fails.
#   bash tools/install_check.sh                      # Python 3.11
#   INDEX= UV_FIND_LINKS=DIR bash tools/install_check.sh    # without PyTorch's index, with its CPU wheel in DIR
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${PYTHON:-python3.11} index=${INDEX-https://download.pytorch.org/whl/cpu}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -m venv "$folder/tools"
"$folder/tools/bin/pip" -q install uv
git -C "$root" archive HEAD | (mkdir "$folder/source" && tar x -C "$folder/source")
"$folder/tools/bin/pip" -q wheel --no-deps --wheel-dir "$folder" "$folder/source"
wheel=$(ls "$folder"/megatron_rl-*.whl)
cp -r "$root/configs" "$folder/configs"
cd "$folder"

# check TITLE PATTERN COMMAND...: fail if the output of a command does not match.
check() {
  local output
  output=$("${@:3}" 2>&1 | tr '\n' ' ') || true
  grep -qE "$2" <<<"$output" || { echo "FAILED $1: ${output: -600}" >&2; exit 1; }
  echo "passed $1"
}

for installer in pip uv; do
  venv="$folder/$installer"
  "$python" -m venv "$venv"
  case $installer in
    pip) install=("$venv/bin/pip" -q install) ;;
    uv) install=("$folder/tools/bin/uv" pip install -q --index-strategy unsafe-best-match --python "$venv/bin/python") ;;
  esac
  run="$venv/bin/megatron-rl"
  "${install[@]}" "$wheel"
  check "$installer: --help" "Usage: megatron-rl" "$run" --help
  check "$installer: doctor without torch" "torch \(not installed\), megatron-core \(not installed\), sglang \(not installed\); pip install" "$run" doctor
  check "$installer: plan without torch" "placements tried" "$run" plan configs/qwen3_8b.toml
  check "$installer: train without torch" "^megatron-rl: train: needs torch, megatron-core, sglang \(not installed\); pip install" "$run" train configs/qwen3_8b.toml
  check "$installer: no torch came" "^False" "$venv/bin/python" -c "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
  "${install[@]}" ${index:+--extra-index-url "$index"} "$wheel[cpu]"
  "$venv/bin/pip" -q install --no-deps --ignore-requires-python -r "$root/launch/requirements-nodeps.txt" # uv has no such option
  check "$installer: doctor of the CPU tier" "The CPU tier can run" "$run" doctor
  check "$installer: no CUDA came" "^None" "$venv/bin/python" -c "import torch; print(torch.version.cuda)"
  check "$installer: a warm start" "." "$venv/bin/python" -m examples.arithmetic.warm_start configs/quickstart.toml
  check "$installer: two steps" "run folder: " "$run" train configs/quickstart.toml --train.steps=2
  rm -rf runs "$venv"
done
