#!/usr/bin/env bash
# Check installations by pip (of a wheel) and by uv (of a checkout) outside of this checkout, for each Python in a fresh environment: the
# light dependencies alone, then the CPU tier and two steps of the quickstart, then the unit tests (not with 3.11, which CI has). pip alone
# tries a Python that pyproject.toml does not allow. Prints a line per check; exits with 1 at the first that fails, or last if a test fails.
# Not in CI: it downloads the CPU tier twice per Python, about 1 GB.
#   bash tools/install_check.sh                                      # python3.12 and python3.11
#   INDEX= UV_FIND_LINKS=DIR bash tools/install_check.sh python3.11  # without PyTorch's index, with its CPU wheel in DIR
#   INDEX= BUILD=cu130 TESTS=tests/unit/cli bash tools/install_check.sh python3.13   # with PyPI's torch, for CUDA (5 GB); fewer tests
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
"$folder/tools/bin/pip" -q wheel --no-deps --ignore-requires-python --wheel-dir "$folder" "$folder/source"
cp -r "$root/configs" "$root/examples" "$folder" # examples are not installed
cd "$folder"

# check TITLE PATTERN COMMAND...: fail if the output of a command does not match.
check() {
  local output
  output=$("${@:3}" 2>&1 | tr '\n' ' ') || true
  grep -qE "$2" <<<"$output" || { echo "FAILED $version, $1: ${output: -600}" >&2; exit 1; }
  echo "passed $version, $1${shown:+: $(grep -oE "$shown" <<<"$output")}"
}

import_times() {
  local code="import time; start = time.process_time(); import megatron_rl; print(f'{time.process_time() - start:.4f} s')"
  for _ in 1 2 3 4 5; do "$venv/bin/python" -c "$code"; done | sort -n
}

for python in "$@"; do
  case $("$python" --version) in
    *" 3.11."* | *" 3.12."*) installers="pip uv" ignore="" diagnosis="The CPU tier can run" ;;
    *) installers=pip ignore=--ignore-requires-python diagnosis="the CPU tier cannot run: Python \([0-9.]*\); " ;;
  esac
  for installer in $installers; do
    version="$("$python" --version), $installer" venv="$folder/$installer" shown=""
    "$python" -m venv "$venv"
    case $installer in
      pip) from=$(ls "$folder"/megatron_rl-*.whl) install=("$venv/bin/pip" -q install $ignore) ;;
      uv)
        from="$folder/source"
        install=("$folder/tools/bin/uv" pip install -q --index-strategy unsafe-best-match --python "$venv/bin/python")
        ;;
    esac
    run="$venv/bin/megatron-rl" none="\(not installed\)"
    "${install[@]}" "$from"
    shown="^[0-9.]* s" check "import in under 0.3 s of CPU time, the best of five" "^0\.[0-2]" import_times
    check "--help" "Usage: megatron-rl" "$run" --help
    check "doctor without torch" "torch $none, megatron-core $none, sglang $none; .*pip install" "$run" doctor
    check "plan without torch" "placements tried" "$run" plan configs/qwen3_8b.toml
    check "train without torch" "^megatron-rl: train: needs torch, megatron-core, sglang $none; pip" "$run" train configs/qwen3_8b.toml
    check "no torch came" "^False" "$venv/bin/python" -c "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
    "${install[@]}" ${index:+--extra-index-url "$index"} "$from[cpu]"
    "$venv/bin/pip" -q install --no-deps --ignore-requires-python -r "$root/launch/requirements-nodeps.txt" # uv has no such option
    check "torch's build is $build" "\+$build " "$venv/bin/python" -c "import torch; print(torch.__version__)"
    check "doctor of the CPU tier" "$diagnosis" "$run" doctor
    warm_start=("$venv/bin/python" -m examples.arithmetic.warm_start configs/quickstart.toml --warm_start.steps=20)
    check "a warm start" "warm start saved" "${warm_start[@]}"
    check "two steps" "mismatch mean 0\.0e\+00 .*report: " "$run" train configs/quickstart.toml --train.steps=2
    rm -rf runs
    if [[ $version = *", pip" && $version != *" 3.11."* ]]; then
      "${install[@]}" "$from[test]"
      (
        cd source
        "$venv/bin/python" -m pytest -q -n 2 --dist loadfile -p no:cacheprovider -m "not gpu and not long" ${TESTS:-tests/unit}
      ) >tests.log || failed=1
      grep -E "^(FAILED|ERROR) " tests.log || true
      echo "$version, unit tests: $(tail -n 1 tests.log)"
    fi
    rm -rf "$venv"
  done
done
exit $failed
