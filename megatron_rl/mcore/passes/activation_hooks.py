"""Records the outputs of the trainer's operators for a batch, with columns in the engine's order."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.precision.activation_hooks import TRAINER, attach_hooks, layer_hook_points

HOOK_POINTS = (
    ("embedding", None, "embedding"),
    *layer_hook_points(TRAINER),
    ("norm", None, "decoder.final_layernorm"),
    ("lm_head", None, "output_layer"),
)


@contextmanager
def record_activations(model: GPTModel) -> Iterator[dict[str, torch.Tensor]]:
    """Context manager that yields a dictionary operator -> `[t, columns]`, in the order of computation, which a forward pass of one row
    fills. Model parallelism is not supported."""
    activations: dict[str, torch.Tensor] = {}

    def record(op: str, values: torch.Tensor) -> None:
        rows = values.flatten(1)  # [t, 1, ...], and [t, ...] around the attention of packed sequences
        activations[op] = _to_engine_order(rows, model.config) if op.endswith(".qkv") else rows

    with ExitStack() as hooks:
        for handle in attach_hooks(model, HOOK_POINTS, record):
            hooks.enter_context(handle)
        yield activations


def _to_engine_order(qkv: torch.Tensor, config: object) -> torch.Tensor:
    """Reorder Megatron's `[q heads | k | v]` of each key-value head into all q, all k, all v. Gates of heads follow all q heads of their
    group in Megatron, and each its own q head in the engine."""
    queries, groups = config.num_attention_heads // config.num_query_groups, config.num_query_groups  # type: ignore[attr-defined]
    per_head = 1 + config.attention_output_gate  # type: ignore[attr-defined]
    by_group = qkv.unflatten(-1, (groups, per_head * queries + 2, -1))
    query, key, value = by_group.split([per_head * queries, 1, 1], dim=-2)
    query = query.unflatten(-2, (per_head, queries)).transpose(-2, -3)
    return torch.cat([query.flatten(-4), key.flatten(-3), value.flatten(-3)], dim=-1)
