"""Backends of the trainer's FP8 products; `base` has the interface, every other module one implementation."""

from __future__ import annotations

import functools

from megatron_rl.precision.backends.base import Backend


@functools.cache
def make_backend(name: str, scale_format: str) -> Backend:
    """The backend of `precision.backend`. Loads its libraries; `requirements.check_backend` tells a user beforehand what is missing."""
    if name == "emulated":
        from megatron_rl.precision.backends.emulated import Emulated

        return Emulated(scale_format)
    if name == "deep_gemm":
        from megatron_rl.precision.backends.deep_gemm import DeepGemm

        return DeepGemm(scale_format)
    if name == "transformer_engine":
        from megatron_rl.precision.backends.transformer_engine import TransformerEngine

        return TransformerEngine(scale_format)
    raise ValueError(f"no backend {name}")
