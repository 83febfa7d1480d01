"""Policies of a few random layers, for the tests of tests/gpu that compute with whole layers; run in a child of their own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.layers.quantized_linear import fill_weights
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout
from support.timing import time_in_turns

ARCHITECTURES = {
    "tiny": ArchitectureConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1),
    "small": ArchitectureConfig(
        hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1
    ),
    "8B": ArchitectureConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1),
    "32B": ArchitectureConfig(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=1
    ),
}
"""Widths of a layer of Llama-3.1-8B and of Qwen3-32B; the vocabulary stays small. DeepGEMM compiles a kernel for every shape, in seconds
each: `small` has few shapes, and the others are those of test_speed_linears.py."""
LAYERS_OF_8B = 32
VOCABULARY_OF_8B = 128256

ACTOR_BYTES = 18
"""Bytes that an actor of one replica holds per value, in BF16 as in FP8: see `megatron_rl.planner.memory`, with the FP8 bytes twice."""
REFERENCE_BYTES = {"bf16": 2, "fp8": 2}
ENGINE_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def stack_layers(size: str, layers: int, **changes: object) -> ArchitectureConfig:
    """Return an architecture of so many layers."""
    return ArchitectureConfig.model_validate(ARCHITECTURES[size].model_dump() | {"num_hidden_layers": layers} | changes)


def count_layers_that_fit(size: str, memory_gib: float, bytes_per_value: int, tokens: int, most: int) -> int:
    """Return the layers, 1 to `most`, that fit where each value of a linear weight takes `bytes_per_value` and one model at a time
    computes with `tokens`.

    Activations kept for the backward pass are the larger ones, in two bytes, with half as much again for the others. A quarter of the
    memory is left for all else: CUDA's contexts, KV caches, what an optimizer step needs for a moment.
    """
    a = ARCHITECTURES[size]
    widths = a.head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads) + 3 * a.intermediate_size
    bytes_per_layer = a.hidden_size * widths * bytes_per_value + 3 * (4 * a.hidden_size + widths) * tokens
    return max(1, min(int(memory_gib * 2**30 * 3 / 4 / bytes_per_layer), most))


def make_model(architecture: ArchitectureConfig, precision: PrecisionConfig) -> torch.nn.Module:
    """Return a model with random weights, the same for the same widths and precision.mode. Megatron must be started."""
    hf_config = make_hf_config(architecture, 0, precision.high)
    (chunk,) = get_model_chunks(build_model(hf_config, Layout(), PrecisionContract.from_config(precision)))
    device = next(chunk.parameters()).device

    def draw(shape: torch.Size, number: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        return torch.empty(shape, device=device).normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(number))

    fill_weights(chunk, draw)
    return chunk


def make_actor(architecture: ArchitectureConfig, precision: PrecisionConfig) -> Actor:
    return Actor(make_model(architecture, precision), TrainConfig(learning_rate=1e-6, clip_grad=0.0), temperature=1.0)


def make_samples(tokens: int, length: int) -> list[TrainingSample]:
    """Return samples of `length` random tokens, half of each an answer; `tokens` in all."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(max(tokens // length, 1))]
    ids = [torch.randint(0, 250, (length,), generator=generator).tolist() for generator in generators]
    return [TrainingSample(tokens[: length // 2], tokens[length // 2 :]) for tokens in ids]


def sum_negative_logprobs(logprobs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * batch.mask).sum(), {}


def compare_with_emulated(backends: list[str], size: str, tokens: int) -> dict[tuple[str, str], dict[str, float] | str]:
    """Return for (scale format, back end) the relative L2 distance to `emulated` of log-probs and of every gradient, or a traceback."""

    def compute(backend: str, scale_format: str) -> dict[str, torch.Tensor]:
        actor = make_actor(ARCHITECTURES[size], PrecisionConfig.model_validate({"backend": backend, "scale_format": scale_format}))
        samples = make_samples(tokens, length=min(tokens, 256))
        logprobs = torch.cat(actor.compute_logprobs(samples)[0])
        actor.update(samples, sum_negative_logprobs)
        gradients = {name: parameter.main_grad.float().clone() for name, parameter in actor.chunks[0].named_parameters()}
        return {"log-probs": logprobs} | gradients

    def compare(backend: str, scale_format: str, expected: dict[str, torch.Tensor]) -> dict[str, float] | str:
        try:
            values = compute(backend, scale_format)
        except Exception:
            return traceback.format_exc()
        return {name: relative_l2(values[name], value) for name, value in expected.items()}

    start_megatron(Layout(), seed=0)
    try:
        distances = {}
        for scale_format in ("pow2", "fp32"):
            expected = compute("emulated", scale_format)
            assert all(value.isfinite().all() for value in expected.values())
            distances |= {(scale_format, backend): compare(backend, scale_format, expected) for backend in backends}
        return distances
    finally:
        stop_megatron()


def relative_l2(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`; 0 where both are zero, inf where only `expected` is."""
    norm, distance = float(expected.double().norm()), float((values.double() - expected.double()).norm())
    return distance / norm if norm else (float("inf") if distance else 0.0)


def time_policies(architecture: ArchitectureConfig, backends: list[str], tokens: int, repeat: int) -> dict[tuple[str, str], float]:
    """Return the median seconds of ("forward" or "step", "bf16" or back end): the log-probs' forward pass; forward, backward, optimizer
    step and quantizing the weights. All actors are on the device at once and take turns."""
    start_megatron(Layout(), seed=0)
    try:
        precisions = {"bf16": PrecisionConfig(mode="bf16", reduction="fast")}
        precisions |= {backend: PrecisionConfig.model_validate({"backend": backend, "reduction": "fast"}) for backend in backends}
        samples = make_samples(tokens, length=min(tokens, 512))
        cases: dict[tuple[str, str], Callable[[], object]] = {}
        for name, precision in precisions.items():
            actor = make_actor(architecture, precision)
            cases["forward", name] = lambda actor=actor: actor.compute_logprobs(samples)
            cases["step", name] = lambda actor=actor: actor.update(samples, sum_negative_logprobs)
        return time_in_turns(cases, repeat)
    finally:
        stop_megatron()
