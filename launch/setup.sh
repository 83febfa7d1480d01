#!/usr/bin/env bash
# Install the CPU tier into .venv: torch's CPU build, Megatron-Core, SGLang, and this project (editable), with pinned versions.
# Returns at once if the installation is complete, and continues an incomplete one.
#   PYTHON=/path/to/python3.11     use this interpreter (default: the first usable one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=4000   required disk space: 2.1 GB for .venv, the rest for pip
# Exit code 2 with one line if Python or the disk space is insufficient.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
program=setup
. "$root/launch/common.sh"

# The folder is included because a virtual environment does not work after it is moved or copied.
print_dependencies() {
  (cd "$root" && sha256sum launch/requirements.txt launch/requirements-nodeps.txt launch/requirements-peft.txt launch/setup.sh launch/common.sh pyproject.toml && pwd -P)
}

# Succeed if the existing virtual environment can be completed. Otherwise it is made from scratch.
is_usable_venv() {
  was_made_here && is_usable_python "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# compile_packages CORES PACKAGE...: compile packages that every run imports (0: all cores). Python compiles the others on first import.
compile_packages() {
  local cores=$1 site
  shift
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  (cd "$site" && "$venv/bin/python" -m compileall -qq -j "$cores" -x '/(tests?|testing)/|transformers/models/' "$@") 9>&- || true # ignore templates, which are no valid Python
}

is_installed && exit 0
lock "${BASH_SOURCE[0]}"
is_installed && exit 0
[ ! -L "$venv" ] || fail "$venv is a link, and an installation would empty its target; remove the link"

python=$(find_python "Debian, Ubuntu: apt install python3.11 python3.11-venv" python3.11 python3.12 python3 python)
check_disk "${MEGATRON_RL_MIN_DISK_MB:-4000}" "; free some, or move the clone"
echo "megatron-rl setup: installing into $venv (a few minutes; this happens once)"
is_usable_venv || "$python" -m venv --clear "$venv"
rm -f "$stamp"
pip -qq --retries 1 install --no-compile --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$root/launch/requirements.txt")" # one retry: a closed network may have no PyTorch index but a cached wheel
compile_packages 1 torch & # while pip uses the other core
pip -qq install --no-compile --no-deps -r "$root/launch/requirements.txt"
pip -qq install --no-compile --no-deps --ignore-requires-python -r "$root/launch/requirements-nodeps.txt"
pip -qq install --no-compile --no-deps --upgrade --target "$venv/peft" -r "$root/launch/requirements-peft.txt"
pip -qq install --no-deps --no-build-isolation -e "$root"
compile_packages 0 transformers sglang/srt sglang/kernels megatron sympy networkx numpy pydantic huggingface_hub openai
wait
print_dependencies >"$stamp"
echo "megatron-rl setup: done"
