"""The backend of products of all experts of a rank at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_rl.kernels.linear import load_backend
from parallel.formats import TensorFormat

if TYPE_CHECKING:
    from megatron_rl.kernels.experts.deep_gemm import DeepGemmExperts

GROUPED = dict.fromkeys([("fp8", "deep_gemm"), ("fp8", "transformer_engine")], "megatron_rl.kernels.experts.deep_gemm:DeepGemmExperts")
"""(`TensorFormat.name`, `precision.backend`) -> "module:class". Both use DeepGEMM, like SGLang: Transformer Engine's grouped products of
128-blocks call cuBLAS expert by expert."""


@functools.cache
def make_grouped_backend(name: str, format: TensorFormat) -> DeepGemmExperts | None:
    """Return the backend for all experts at once, or None if the backend multiplies one expert after the other."""
    return load_backend(GROUPED[format.name, name])(format) if (format.name, name) in GROUPED else None
