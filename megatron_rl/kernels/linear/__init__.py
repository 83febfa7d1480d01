"""Backends of the trainer's quantized products. `base` defines the interface; `reference` and each library have one module."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from megatron_rl.kernels.linear.base import Backend
from parallel.formats import TensorFormat

if TYPE_CHECKING:
    from megatron_rl.kernels.experts.deep_gemm import DeepGemmExperts

PRODUCTS = {
    ("fp8", "emulated"): "reference:EmulatedBackend",
    ("fp8", "deep_gemm"): "deep_gemm:DeepGemmBackend",
    ("fp8", "transformer_engine"): "transformer_engine:TransformerEngineBackend",
    ("int8", "emulated"): "reference:EmulatedInt8",
}
"""(`TensorFormat.name`, `precision.backend`) -> "module:class". A module without a dot is in this package; the class takes the format."""

GROUPED = dict.fromkeys([("fp8", "deep_gemm"), ("fp8", "transformer_engine")], "megatron_rl.kernels.experts.deep_gemm:DeepGemmExperts")
"""The same for products of all experts of a rank at once. Both use DeepGEMM, like SGLang: Transformer Engine's grouped products of
128-blocks call cuBLAS expert by expert."""


@functools.cache
def make_backend(name: str, format: TensorFormat) -> Backend:
    """Return the backend of `precision.backend` for a format and load its libraries. Preflight reports missing libraries."""
    return _load(PRODUCTS[format.name, name])(format)


@functools.cache
def make_grouped_backend(name: str, format: TensorFormat) -> DeepGemmExperts | None:
    """Return the backend for all experts at once, or None if the backend multiplies one expert after the other."""
    return _load(GROUPED[format.name, name])(format) if (format.name, name) in GROUPED else None


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module if "." in module else f"{__name__}.{module}"), attribute)
