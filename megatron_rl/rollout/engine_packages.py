"""What SGLang's engines on a GPU need of other packages, found without importing them."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

INSTALL = "bash launch/install_gpu.sh"
PACKAGES = {"sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
"""Modules that SGLang imports on a GPU at every start -> their packages."""
ATTENTION = "rollout.sglang.attention_backend"
HOPPER = 9  # major compute capability of GPUs on which FlashAttention 3 is SGLang's default


def find_missing_packages() -> list[str]:
    """Return the names of packages without which no engine starts on a GPU."""
    return [package for module, package in PACKAGES.items() if find_spec(module) is None]


def has_flash_attention_3() -> bool:
    """Return whether sglang-kernel has the library of FlashAttention 3, which its builds for some platforms leave out."""
    found = find_spec("sgl_kernel")
    folders = (found.submodule_search_locations if found else None) or []
    return any(any(Path(folder).glob("flash_ops*.so")) for folder in folders)


def check(options: Mapping[str, Any], kv_by_layer: bool, capability: int) -> None:
    """Raise UserError if an engine cannot start on this machine's GPU; see `find_problem`."""
    if problem := find_problem(options, kv_by_layer, capability):
        raise problem


def find_problem(options: Mapping[str, Any], kv_by_layer: bool, capability: int) -> UserError | None:
    """Return why an engine cannot start on this machine's GPU, or None.

    Args:
        options: `rollout.sglang`.
        kv_by_layer: whether the E4M3 cache has a scale per layer, with which engines attend by FlashInfer.
        capability: major compute capability of the GPU.
    """
    if missing := find_missing_packages():
        return UserError("rollout.engine", "sglang", f"does not start on a GPU without {' and '.join(missing)} (not installed)", INSTALL)
    backend = options.get("attention_backend")
    if capability == HOPPER and not kv_by_layer and backend in (None, "fa3") and not has_flash_attention_3():
        lacking = "the installed sglang-kernel has no FlashAttention 3 (flash_ops)"
        rule = lacking if backend else f"is not set, and {lacking}, SGLang's default on a Hopper GPU"
        return UserError(ATTENTION, backend, rule, f"{INSTALL}, or set {ATTENTION} to triton with precision.reduction = 'fast' or 'ranks'")
    return None
