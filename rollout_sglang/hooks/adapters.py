"""LoRA in the engine: a policy's adapters as parameters of SGLang's linear layers, which every sync fills, and the trainer's product.

SGLang's own LoRA serves many adapters to many requests: it keeps them in a pool beside the model, and multiplies request by request, so
that a token's bits depend on the batch. Here there is one adapter, the policy's; it is proved like any weight, and a layer adds what the
trainer's layer adds, by the same functions (`megatron_rl.precision.ops.low_rank`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision.ops import tree
from megatron_rl.precision.ops.low_rank import project_down, project_up

LORA_VARIABLE = "MEGATRON_RL_LORA"
"""Carries `describe`; `rollout_sglang.launch_args` sets it for the engine's processes."""


def describe(rank: int, scale: float, layers: list[str]) -> str:
    """Return what the engine's processes must know; `layers`: SGLang's names."""
    return json.dumps({"rank": rank, "scale": scale, "layers": layers})


@functools.cache
def read_settings() -> dict[str, Any]:
    """Return what `describe` was given; {} for an engine without adapters."""
    return json.loads(os.environ.get(LORA_VARIABLE, "{}"))


def add_to_column_layer(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `ColumnParallelLinear._initialize_partition`."""
    original(self, *args, **named)
    _add_parameters(self, named.get("prefix", ""), self.input_size, sum(self.output_partition_sizes))


def add_to_row_layer(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `RowParallelLinear.__init__`."""
    original(self, *args, **named)
    _add_parameters(self, named.get("prefix", ""), self.input_size_per_partition, self.output_size)


def _add_parameters(layer: Any, prefix: str, columns: int, rows: int) -> None:
    settings = read_settings()
    layer.has_adapter = prefix.rsplit(".", 1)[-1] in settings["layers"]
    if layer.has_adapter:
        layer.lora_A, layer.lora_B = (
            torch.nn.Parameter(torch.zeros(shape, dtype=layer.params_dtype), requires_grad=False)
            for shape in ((settings["rank"], columns), (rows, settings["rank"]))
        )


def run_column_parallel(original: Callable[..., Any], self: Any, input_: torch.Tensor) -> Any:
    """Wrap `ColumnParallelLinear.forward`: x [T, K] -> (y [T, N / tp], bias that was not added)."""
    y, bias = original(self, input_)
    if not self.has_adapter:
        return y, bias
    if self.gather_output:
        raise NotImplementedError("an adapter of a layer that gathers its output is outside the precision contract")
    return y + project_up(project_down(input_, self.lora_A), self.lora_B, read_settings()["scale"]), bias


def add_to_row_sum(layer: Any, x: torch.Tensor, y: torch.Tensor, add_over_ranks: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return y [T, N] of a row-parallel layer, summed over the ranks, with what its adapter adds; x [T, K / tp]."""
    if not getattr(layer, "has_adapter", False):
        return y
    h = add_over_ranks(tree.multiply(x, layer.lora_A), layer.tp_group, x.dtype)
    return y + project_up(h, layer.lora_B, read_settings()["scale"])
