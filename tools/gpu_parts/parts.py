"""The parts of the check, in the order they run: what each needs, what it uses where it is there, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_SECONDS = 530
"""Of the whole check, with what ending a part takes under nine minutes; a part that would go beyond gets what is left."""

SECONDS = "GPU_CHECK_SECONDS"
"""Environment variable that tells a part's process its time limit."""


@dataclass(frozen=True)
class Part:
    """`needs` and `uses` are names that `found.Machine.has` knows; without one of `uses` only its rows are left out."""

    name: str
    """Of the module gpu_parts.NAME."""
    title: str
    seconds: int
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()


_PROJECT = ("gpu", "torch", "pydantic")
_TRAINER = (*_PROJECT, "megatron-core", "transformers")
_BACKENDS = ("hopper", "triton", "nvcc", "deep_gemm", "transformer-engine")
_RUN = (*_TRAINER, "sglang", "sglang-kernel", "triton", "typer", "math-verify")

PARTS = (
    Part("quantisers", "quantised bytes and scales of every library", 40, _PROJECT, (*_BACKENDS, "sglang", "sglang-kernel")),
    Part("products", "FP8 products of every back end", 60, _PROJECT, (*_BACKENDS, "sglang")),
    Part("layer", "one transformer layer, forward and backward", 40, _TRAINER, _BACKENDS),
    Part("bridge", "the sync by CUDA IPC into a live engine, proved", 80, _RUN),
    Part("quickstart", "the quickstart in fp8_unified", 85, _RUN, _BACKENDS),
    Part("speed_stack", "a stack of 8B layers: reference forward and actor update", 55, (*_TRAINER, "typer"), _BACKENDS),
    Part("speed_sync", "the sync by CUDA IPC against copies and others' ways", 50, (*_TRAINER, "typer", "triton")),
    Part("speed_decode", "engines decoding in BF16, FP8 and INT8", 120, _RUN, ("hopper", "nvcc", "deep_gemm")),
    Part("speed_step", "whole RL steps in fp8_unified and in BF16", 120, _RUN, _BACKENDS),
    Part("speed_linears", "linear layers and quantisers of 8B and 32B models", 75, (*_PROJECT, "typer"), _BACKENDS),
    Part("speed_layer", "a layer's forward pass and whole step", 55, (*_TRAINER, "typer"), _BACKENDS),
    Part("gpu_tests", "pytest's tests marked gpu", 65, (*_TRAINER, "pytest"), (*_BACKENDS, "sglang")),
)
"""Those that check come first, then those with a figure to beat. Time limits are for what goes wrong; together they may be more than
`TOTAL_SECONDS`, which bounds the whole: what comes too late is left out and named, and `--only` runs it."""
