"""Backends of the trainer's quantized products; `base` holds the interface, every other module one implementation."""

from __future__ import annotations

import functools
import importlib

from megatron_rl.precision.backends.base import Backend
from parallel.formats import TensorFormat

PRODUCTS = {
    ("fp8", "emulated"): "emulated:EmulatedBackend",
    ("fp8", "deep_gemm"): "deep_gemm:DeepGemmBackend",
    ("fp8", "transformer_engine"): "transformer_engine:TransformerEngineBackend",
    ("int8", "emulated"): "emulated:EmulatedInt8",
}
"""(`TensorFormat.name`, `precision.backend`) -> module of this package and class, which is given the format."""


@functools.cache
def make_backend(name: str, format: TensorFormat) -> Backend:
    """Return the backend of `precision.backend` for a format and load its libraries; preflight has reported what is missing."""
    module, _, attribute = PRODUCTS[format.name, name].partition(":")
    return getattr(importlib.import_module(module if "." in module else f"{__name__}.{module}"), attribute)(format)
