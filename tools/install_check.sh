#!/usr/bin/env bash
# Check installations by pip (of a wheel) and by uv (of a checkout) outside of this checkout, for each Python in a fresh virtual environment:
# the light dependencies alone, then the CPU tier and two steps of the quickstart, then the unit tests (not with 3.11, which CI has). pip alone
# tries a Python that pyproject.toml does not allow. Prints a line per check; exits with 1 at the first that fails, but after unit tests goes on.
# Not in CI: it downloads the CPU tier twice per Python, about 1 GB.
#   bash tools/install_check.sh                     # python3.12 and python3.11
#   INDEX= UV_FIND_LINKS=DIR bash tools/install_check.sh python3.11         # without PyTorch's index, with its CPU wheel in DIR
#   INDEX= BUILD=cu130 bash tools/install_check.sh python3.12 python3.13    # with PyPI's torch, which is for CUDA: 6 GB per environment
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
index=${INDEX-https://download.pytorch.org/whl/cpu} build=${BUILD:-cpu} failed=0
[ $# -gt 0 ] || set -- python3.12 python3.11
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$1" -m venv "$folder/tools"
"$folder/tools/bin/pip" -q install uv
git -C "$root" archive HEAD | (mkdir "$folder/source" && tar x -C "$folder/source")
"$folder/tools/bin/pip" -q wheel --no-deps --wheel-dir "$folder" "$folder/source"
cp -r "$root/configs" "$folder/configs"
cd "$folder"

# check TITLE PATTERN COMMAND...: fail if the output of a command does not match.
check() {
  local output
  output=$("${@:3}" 2>&1 | tr '\n' ' ') || true
  grep -qE "$2" <<<"$output" || { echo "FAILED $version, $1: ${output: -600}" >&2; exit 1; }
  echo "passed $version, $1${shown:+: $(grep -oE "$shown" <<<"$output" | tail -n 1)}"
}

import_times() {
  local code="import time; start = time.process_time(); import megatron_rl; print(f'{time.process_time() - start:.3f} s')"
  for _ in 1 2 3 4 5; do "$venv/bin/python" -c "$code"; done | sort -n
}

for python in "$@"; do
  minor=$("$python" -c "import sys; print(sys.version_info.minor)")
  case $minor in
    11 | 12) installers="pip uv" ignore="" diagnosis="The CPU tier can run" ;;
    *) installers=pip ignore=--ignore-requires-python diagnosis="the CPU tier cannot run: Python \([0-9.]*\); " ;;
  esac
  for installer in $installers; do
    version="$("$python" --version), $installer" venv="$folder/$installer" shown=""
    "$python" -m venv "$venv"
    case $installer in
      pip) install=("$venv/bin/pip" -q install $ignore) from=$(ls "$folder"/megatron_rl-*.whl) ;;
      uv) install=("$folder/tools/bin/uv" pip install -q --index-strategy unsafe-best-match --python "$venv/bin/python") from="$folder/source" ;;
    esac
    run="$venv/bin/megatron-rl"
    "${install[@]}" "$from"
    shown=".*s" check "import in under 0.3 s of CPU time, the best of five" "^0\.[0-2]" import_times
    check "--help" "Usage: megatron-rl" "$run" --help
    check "doctor without torch" "torch \(not installed\), megatron-core \(not installed\), sglang \(not installed\); .*pip install" "$run" doctor
    check "plan without torch" "placements tried" "$run" plan configs/qwen3_8b.toml
    check "train without torch" "^megatron-rl: train: needs torch, megatron-core, sglang \(not installed\); pip install" "$run" train configs/qwen3_8b.toml
    check "no torch came" "^False" "$venv/bin/python" -c "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    "${install[@]}" ${index:+--extra-index-url "$index"} "$from[cpu]"
    "$venv/bin/pip" -q install --no-deps --ignore-requires-python -r "$root/launch/requirements-nodeps.txt" # uv has no such option
    check "torch's build" "\+$build " "$venv/bin/python" -c "import torch; print(torch.__version__)"
    check "doctor of the CPU tier" "$diagnosis" "$run" doctor
    check "a warm start" "." "$venv/bin/python" -m examples.arithmetic.warm_start configs/quickstart.toml --warm_start.steps=20
    check "two steps" "run folder: " "$run" train configs/quickstart.toml --train.steps=2
    rm -rf runs
    if [ $installer = pip ] && [ "$minor" != 11 ]; then
      "${install[@]}" "$from[test]"
      (cd source && "$venv/bin/python" -m pytest -q -n 2 --dist loadfile -p no:cacheprovider -m "not gpu and not long" tests/unit) >tests.log || failed=1
      grep -E "^(FAILED|ERROR) " tests.log || true
      echo "$version, unit tests: $(tail -n 1 tests.log)"
    fi
    rm -rf "$venv"
  done
done
exit $failed
