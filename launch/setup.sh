#!/usr/bin/env bash
# Make .venv in the repository's root with pinned packages: torch's CPU build, Megatron-Core, SGLang, and this project (editable).
# A second call finds the stamp of a finished installation and returns at once; an unfinished one is continued. Needs no GPU.
#   PYTHON=/path/to/python3.11     use this interpreter (default: the first usable one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=4000   required disk; .venv takes 2.1 GB of it, pip's cache and unpacking the rest
# Exit code 2 and one line where Python or the disk does not suffice.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
program=setup
. "$root/launch/common.sh"

# An installation depends on these files and on the folder (a venv that was moved or copied belongs to its old folder).
print_dependencies() {
  (cd "$root" && sha256sum launch/requirements-torch.txt launch/requirements-common.txt launch/requirements.txt launch/requirements-peft.txt launch/setup.sh launch/common.sh pyproject.toml && pwd -P)
}

# Can the present virtual environment be completed? Otherwise it is made anew.
is_usable_venv() {
  was_made_here && is_usable_python "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# compile_packages CORES PACKAGE...: compile what every run imports (0: on all cores); Python compiles the rest when it is first imported.
compile_packages() {
  local cores=$1 site
  shift
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  (cd "$site" && "$venv/bin/python" -m compileall -qq -j "$cores" -x '/(tests?|testing)/|transformers/models/' "$@") 9>&- || true # some files are templates
}

is_installed && exit 0
lock "${BASH_SOURCE[0]}"
is_installed && exit 0
[ ! -L "$venv" ] || fail "$venv is a link, and an installation would empty what it points to; remove the link"

python=$(find_python "Debian, Ubuntu: apt install python3.11 python3.11-venv" python3.11 python3.12 python3 python)
check_disk "${MEGATRON_RL_MIN_DISK_MB:-4000}" "; free some, or move the clone"
echo "megatron-rl setup: installing into $venv (a few minutes; this happens once)"
is_usable_venv || "$python" -m venv --clear "$venv"
rm -f "$stamp"
pip -qq --retries 1 install --no-compile --no-deps -r "$root/launch/requirements-torch.txt" # a closed network may lack its index and still have the build
compile_packages 1 torch & # pip uses one core
pip -qq install --no-compile --no-deps -r "$root/launch/requirements.txt"
pip -qq install --no-compile --no-deps --upgrade --target "$venv/peft" -r "$root/launch/requirements-peft.txt"
pip -qq install --no-deps --no-build-isolation -e "$root"
compile_packages 0 transformers sglang/srt sglang/kernels megatron sympy networkx numpy pydantic huggingface_hub openai
wait
print_dependencies >"$stamp"
echo "megatron-rl setup: done"
