"""Backends of the trainer's quantized products. `base` defines the interface; `reference` and each library have one module."""

import functools
import importlib
from typing import Any

from megatron_rl.kernels.linear.base import Backend
from parallel.formats import TensorFormat

PRODUCTS = {
    ("fp8", "emulated"): "reference:EmulatedBackend",
    ("fp8", "deep_gemm"): "deep_gemm:DeepGemmBackend",
    ("fp8", "transformer_engine"): "transformer_engine:TransformerEngineBackend",
    ("int8", "emulated"): "reference:EmulatedInt8",
}
"""(`TensorFormat.name`, `precision.backend`) -> "module:class". A module without a dot is in this package; the class takes the format."""


@functools.cache
def make_backend(name: str, format: TensorFormat) -> Backend:
    """Return the backend of `precision.backend` for a format and load its libraries. Preflight reports missing libraries."""
    return load_backend(PRODUCTS[format.name, name])(format)


def load_backend(path: str) -> Any:
    """Return the class at "module:class", with the libraries that it needs."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module if "." in module else f"{__name__}.{module}"), attribute)
