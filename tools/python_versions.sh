#!/usr/bin/env bash
# Run tests with another Python than CI's 3.11, in a fresh environment with the pins of launch/requirements.txt. Not in CI: an index without
# torch's CPU build for that Python gives its CUDA build with its packages, 4.6 GB in all. Exit code 1 if a pin cannot be installed or a test
# fails.
#   bash tools/python_versions.sh python3.12                       # tests/unit
#   bash tools/python_versions.sh python3.13 tests/unit -k config  # arguments for pytest
#   INDEX=URL ENVIRONMENT=DIR bash tools/python_versions.sh ...    # another index for torch; keep the environment
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${1:?name an interpreter, such as python3.12} index=${INDEX:-https://download.pytorch.org/whl/cpu}
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${ENVIRONMENT:-$folder/venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# install ARGUMENT...: install, or end with pip's last line.
install() {
  "$venv/bin/python" -m pip -q install --no-compile "$@" 2>"$folder/pip" || {
    echo "FAILED installation: $(tail -n 1 "$folder/pip")" >&2
    exit 1
  }
}

echo "$(date -I), $(git -C "$root" rev-parse --short HEAD), $("$python" --version)"
git -C "$root" archive HEAD | (mkdir "$folder/source" && tar x -C "$folder/source") # the installation writes into its source
cd "$folder/source"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install --extra-index-url "$index" "$(grep ^torch== launch/requirements.txt)"
install --no-deps -r launch/requirements.txt -r launch/requirements-nodeps.txt
install --no-deps --no-build-isolation --ignore-requires-python -e .
"$venv/bin/python" -c "import torch; print('torch', torch.__version__)"
"$venv/bin/python" -m pytest -q -p no:cacheprovider -m "not gpu and not long" "${@:-tests/unit}"
