#!/usr/bin/env bash
# Resolve the extras of pyproject.toml into the pins of launch/requirements.txt (CPU tier), launch/requirements-test.txt (what trackers and
# tests need beside it), and launch/requirements-gpu.txt. Present pins are kept where they fit; name packages to take their newest versions:
#   bash launch/lock.sh --upgrade-package pydantic
# Needs uv 0.13 (pip install uv).
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# compile FILE GLIBC OPTION...: write the pins of some extras.
compile() {
  uv -q pip compile pyproject.toml --python-version 3.11 --python-platform "x86_64-manylinux_$2" --only-binary :all: --no-annotate \
    --custom-compile-command "bash launch/lock.sh" --output-file "$1" "${@:3}" >/dev/null
}

cuda=$(mktemp) all=$(mktemp) # cuda: what torch's CUDA build on PyPI requires; its CPU build does not
trap 'rm -f "$cuda" "$all"' EXIT
printf '%s\n' cuda-bindings cuda-toolkit nvidia-{cudnn,cusparselt,nccl,nvshmem}-cu13 triton >"$cuda"
compile launch/requirements.txt 2_28 --extra cpu --excludes "$cuda" "$@"
cat launch/requirements.txt launch/requirements-test.txt >"$all"
compile "$all" 2_28 --extra cpu --extra trackers --extra test --excludes "$cuda" --constraints launch/requirements.txt "$@"
{ grep "^#" launch/requirements.txt; grep -vxFf launch/requirements.txt "$all"; } >launch/requirements-test.txt
compile launch/requirements-gpu.txt 2_34 --extra gpu --extra test "$@"
