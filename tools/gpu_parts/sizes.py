"""Widths of the models that parts compute with, and how many of their layers fit. Nothing of Megatron."""

from __future__ import annotations

from megatron_rl.config import ArchitectureConfig

SIZES = {
    "small": ArchitectureConfig(
        hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1
    ),
    "8B": ArchitectureConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1),
    "32B": ArchitectureConfig(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8, num_hidden_layers=1
    ),
}
"""Widths of a layer of Llama-3.1-8B and of Qwen3-32B, as in tools/bench_backends.py; the vocabulary stays small. DeepGEMM compiles a kernel
for every shape, in seconds each: `small` has few shapes, and the others are those that `speed_linears` has compiled."""

LAYERS_OF_8B = 32
VOCABULARY_OF_8B = 128256

ACTOR = 18
"""Bytes that an actor holds of a value, in BF16 as in FP8: see `megatron_rl.planner.memory`, with the blocks' bytes twice."""
REFERENCE = {"bf16": 2, "fp8": 6}
ENGINE = {"bf16": 2, "fp8": 1, "int8": 1}


def stack(size: str, layers: int, **more: object) -> ArchitectureConfig:
    """So many layers of a size."""
    return ArchitectureConfig.model_validate(SIZES[size].model_dump() | {"num_hidden_layers": layers} | more)


def layer_values(architecture: ArchitectureConfig) -> int:
    """Values of one layer's linear weights."""
    return architecture.hidden_size * _widths(architecture)


def activation_bytes(architecture: ArchitectureConfig) -> int:
    """Of a layer and token, kept for the backward pass: the larger ones, in two bytes, with half as much again for what is left out."""
    return 3 * (4 * architecture.hidden_size + _widths(architecture))


def _widths(a: ArchitectureConfig) -> int:
    """Of queries, keys, values and the attention's result, and of the three of the MLP, together."""
    return a.head_dim * (2 * a.num_attention_heads + 2 * a.num_key_value_heads) + 3 * a.intermediate_size


def layers_that_fit(architecture: ArchitectureConfig, memory_gib: float, value_bytes: int, tokens: int, most: int) -> int:
    """Layers, 1 to `most`, where each of their values is held in `value_bytes` and one model at a time computes with `tokens`. A quarter
    of the memory is left to all else: CUDA's contexts, KV caches, what an optimizer step needs for a moment."""
    each = layer_values(architecture) * value_bytes + activation_bytes(architecture) * tokens
    return max(1, min(int(memory_gib * 2**30 * 3 / 4 / each), most))
