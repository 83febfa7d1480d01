"""Backends of the trainer's FP8 products; `base` has the interface, every other module one implementation."""

from __future__ import annotations

import functools

from megatron_rl.precision.backends.base import Fp8Backend


@functools.cache
def make_backend(name: str, scale_format: str) -> Fp8Backend:
    """The backend of `precision.backend`. Loads its libraries; `requirements.check_backend` tells a user beforehand what is missing."""
    if name == "emulated":
        from megatron_rl.precision.backends.emulated import EmulatedBackend

        return EmulatedBackend(scale_format)
    if name == "deep_gemm":
        from megatron_rl.precision.backends.deep_gemm import DeepGemmBackend

        return DeepGemmBackend(scale_format)
    if name == "transformer_engine":
        from megatron_rl.precision.backends.transformer_engine import TransformerEngineBackend

        return TransformerEngineBackend(scale_format)
    raise ValueError(f"no backend {name}")
