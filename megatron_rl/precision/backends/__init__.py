"""Backends of the trainer's FP8 products; `base` holds the interface, every other module one implementation."""

from __future__ import annotations

import functools

from megatron_rl.precision.backends.base import Fp8Backend


@functools.cache
def make_backend(name: str, scale_format: str) -> Fp8Backend:
    """Return the backend of `precision.backend` and load its libraries. `requirements.check_machine` reports beforehand what is missing."""
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
