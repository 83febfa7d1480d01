"""What the trainer's operators give for a batch, in the engine's order of columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.precision.graph.activation_hooks import HookPoint, attach_hooks

_LAYER = "decoder.layers.*."
HOOK_POINTS = (
    HookPoint("embedding", "embedding"),
    HookPoint(f"{_LAYER}self_attention.linear_qkv", "layers.*.input_norm", argument=0),
    HookPoint(f"{_LAYER}self_attention.linear_qkv", "layers.*.attention.qkv"),
    HookPoint(f"{_LAYER}self_attention.q_layernorm", "layers.*.attention.q_norm"),
    HookPoint(f"{_LAYER}self_attention.k_layernorm", "layers.*.attention.k_norm"),
    HookPoint(f"{_LAYER}self_attention.core_attention", "layers.*.attention.rope.q", argument=0),
    HookPoint(f"{_LAYER}self_attention.core_attention", "layers.*.attention.rope.k", argument=1),
    HookPoint(f"{_LAYER}self_attention.linear_proj", "layers.*.attention.core", argument=0),
    HookPoint(f"{_LAYER}self_attention.linear_proj", "layers.*.attention.output"),
    HookPoint(f"{_LAYER}mlp.linear_fc1", "layers.*.post_attention_norm", argument=0),
    HookPoint(f"{_LAYER}mlp.router", "layers.*.post_attention_norm", argument=0),
    HookPoint(f"{_LAYER}mlp.linear_fc1", "layers.*.mlp.gate_up"),
    HookPoint(f"{_LAYER}mlp.linear_fc2", "layers.*.mlp.swiglu", argument=0),
    HookPoint(f"{_LAYER}mlp.linear_fc2", "layers.*.mlp.down"),
    HookPoint(f"{_LAYER}mlp", "layers.*.mlp"),
    HookPoint("decoder.final_layernorm", "norm"),
    HookPoint("output_layer", "lm_head"),
)


@contextmanager
def record_activations(model: GPTModel) -> Iterator[dict[str, torch.Tensor]]:
    """A dictionary that a forward pass of one row within fills: operator -> [t, columns], in the order of computation. One process, no
    parts."""
    found: dict[str, torch.Tensor] = {}

    def record(op: str, values: torch.Tensor) -> None:
        rows = values.flatten(1)  # [t, 1, ...], and [t, ...] around the attention of packed sequences
        found[op] = _engine_order(rows, model.config) if op.endswith(".qkv") else rows

    handles = attach_hooks(model, HOOK_POINTS, record)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _engine_order(qkv: torch.Tensor, config: object) -> torch.Tensor:
    """Megatron's [q heads | k | v] of every key-value head, one after the other, as all q, all k, all v."""
    heads, groups = config.num_attention_heads, config.num_query_groups  # type: ignore[attr-defined]
    parts = qkv.unflatten(-1, (groups, heads // groups + 2, -1)).split([heads // groups, 1, 1], dim=-2)
    return torch.cat([part.flatten(-3) for part in parts], dim=-1)
