#!/usr/bin/env bash
# Install the GPU tier into .venv-gpu: torch for CUDA 13, SGLang with its kernels, DeepGEMM, Megatron-Core, Transformer Engine (whose torch
# extension is built from source), and this project (editable), with pinned versions. See docs/guides/gpu.md.
#   bash launch/install_gpu.sh --check       # print what would be installed and what this machine lacks, without changes
#   PYTHON=/path/to/python3.12               use this interpreter (default: the first usable one on PATH)
#   MEGATRON_RL_MIN_DISK_MB=30000            required disk space (an estimate)
#   MAX_JOBS=8                               concurrent compilers; each needs a few GB of memory
# Exit code 2 with one line if Python, the C++ compiler, or the disk space is insufficient. Needs no GPU, for example in a container build.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv-gpu"
program=install_gpu
pins="$root/launch/requirements-gpu.txt" common="$root/launch/requirements-common.txt"
. "$root/launch/common.sh"

print_pin() {
  sed -n "s/^$1==//p" "$common" "$pins"
}

print_dependencies() {
  (cd "$root" && sha256sum launch/requirements-common.txt launch/requirements-gpu.txt launch/install_gpu.sh launch/common.sh pyproject.toml && pwd -P)
}

find_gpu_python() {
  find_python "Ubuntu: apt install python3.12 python3.12-venv python3.12-dev" python3.12 python3.11 python3 python
}

check_machine() {
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "$(uname -sm): the pinned wheels are for Linux on x86_64"
  command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler to build Transformer Engine's extension; install one (Ubuntu: apt install g++)"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "$python has no headers (Python.h); install them (Ubuntu: apt install python3.12-dev)"
  check_disk "${MEGATRON_RL_MIN_DISK_MB:-30000}" ""
}

# Print the compiler that DeepGEMM uses at run time, and its CUDA version.
print_nvcc() {
  local nvcc
  nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
  [ -x "${nvcc:-}" ] || nvcc=$(command -v nvcc || true)
  [ -n "$nvcc" ] || { echo "none: DeepGEMM cannot compile its kernels; install the CUDA 13.0 toolkit and set CUDA_HOME"; return; }
  echo "$nvcc, CUDA $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
}

print_check() {
  local name installed python
  python=$( (find_gpu_python) 2>&1) || true
  echo "would make $venv with $(cat "$common" "$pins" | grep -c ==) pinned packages and build transformer-engine-torch $(print_pin transformer-engine) from source"
  for name in torch triton sglang sglang-kernel sgl-deep-gemm flashinfer-python megatron-core transformer-engine nvidia-cublas; do
    installed=$("$venv/bin/python" -c "import importlib.metadata as m; print(m.version('$name'))" 2>/dev/null || echo "not installed")
    printf '  %-20s %-12s %s\n' "$name" "$(print_pin "$name")" "$installed"
  done
  echo "python: $python"
  echo "compiler: $(command -v "${CXX:-g++}" || echo "none; install g++")"
  echo "nvcc: $(print_nvcc)"
  echo "GPU: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "none found; CUDA 13 needs driver 580 or newer")"
  echo "disk: $(df -Pm "$root" | awk 'NR == 2 { print $4 }') MB free"
  if is_installed; then echo "state: installed"; else echo "state: not installed, or installed with other pins"; fi
}

case "${1:-}" in
  --check) print_check; exit 0 ;;
  "") ;;
  *) fail "$1: is no option; the only option is --check" ;;
esac

is_installed && exit 0
lock "${BASH_SOURCE[0]}"
is_installed && exit 0

python=$(find_gpu_python)
check_machine
echo "megatron-rl install_gpu: installing into $venv (this happens once)"
was_made_here || "$python" -m venv --clear "$venv"
rm -f "$stamp"
pip -q install --no-deps -r "$pins"
# Build against the torch installed above and its headers; otherwise its setup looks for a prebuilt wheel on GitHub.
NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-8} \
  pip -q install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "transformer-engine-torch==$(print_pin transformer-engine)"
pip -q install --no-deps --no-build-isolation -e "$root"
print_dependencies >"$stamp"
echo "megatron-rl install_gpu: done. nvcc: $(print_nvcc)"
echo "  .venv-gpu/bin/megatron-rl doctor      # installed versions and known pitfalls"
echo "  bash tools/gpu_check.sh               # checks and measures, in at most 25 minutes"
