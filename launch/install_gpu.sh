#!/usr/bin/env bash
# Install the GPU tier into .venv-gpu: torch for CUDA 13, SGLang with its kernels, DeepGEMM, Megatron-Core, Transformer Engine (whose torch
# extension is built from source), and this project (editable), with pinned versions. See docs/guides/gpu.md.
#   PYTHON=/path/to/python3.12               use this interpreter (default: the first usable one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=30000            required disk space (an estimate)
#   MAX_JOBS=8                               concurrent compilers; each needs a few GB of memory
# Exit code 2 with one line if Python, the C++ compiler, or the disk space is insufficient. Needs no GPU, for example in a container build.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv-gpu"
program=install_gpu
pins="$root/launch/requirements-gpu.txt"
. "$root/launch/common.sh"

print_dependencies() {
  (cd "$root" && sha256sum launch/requirements-gpu.txt launch/requirements-nodeps.txt launch/install_gpu.sh launch/common.sh pyproject.toml && pwd -P)
}

check_machine() {
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "$(uname -sm): the pinned wheels are for Linux on x86_64"
  command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler to build Transformer Engine's extension; install one (Ubuntu: apt install g++)"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "$python has no headers (Python.h); install them (Ubuntu: apt install python3.12-dev)"
  check_disk "${MEGATRON_RL_MIN_DISK_MB:-30000}" ""
}

[ $# -eq 0 ] || fail "$1: there are no options"
is_installed && exit 0
lock "${BASH_SOURCE[0]}"
is_installed && exit 0

python=$(find_python "Ubuntu: apt install python3.12 python3.12-venv python3.12-dev" python3.12 python3.11 python3 python)
check_machine
echo "megatron-rl install_gpu: installing into $venv (this happens once)"
was_made_here || "$python" -m venv --clear "$venv"
rm -f "$stamp"
pip -q install --no-deps -r "$pins"
pip -q install --no-deps --ignore-requires-python "$(grep ^megatron-core== "$root/launch/requirements-nodeps.txt")"
# Build against the torch installed above and its headers; otherwise its setup looks for a prebuilt wheel on GitHub.
NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-8} \
  pip -q install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "transformer-engine-torch==$(sed -n "s/^transformer-engine==//p" "$pins")"
pip -q install --no-deps --no-build-isolation -e "$root"
print_dependencies >"$stamp"
echo "megatron-rl install_gpu: done"
echo "  .venv-gpu/bin/megatron-rl doctor      # installed versions and known pitfalls"
echo "  bash tools/gpu_check.sh               # checks and measures, in at most 25 minutes"
