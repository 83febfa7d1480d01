"""LoRA in the engine: the policy's adapters as parameters of SGLang's linear layers, which every sync fills, with the trainer's products.
With SGLang's own LoRA, a token's bits depend on the batch, and no sync proves the adapters."""

import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.kernels.linear.reference import project_down, project_up
from megatron_rl.kernels.sums import reference as tree
from parallel.adapters import NAMES, TARGETS

ExpertLinear = Callable[[torch.Tensor, int], torch.Tensor]  # linear layer of an expert: (x `[T, K]`, expert) -> `[T, N]` in x's dtype
LORA_VARIABLE = "MEGATRON_RL_LORA"  # environment variable of the engine's processes with the result of `describe`


def describe(rank: int, scale: float, targets: Sequence[str]) -> str:
    return json.dumps({"rank": rank, "scale": scale, "targets": targets, "layers": [TARGETS[target] for target in targets]})


@functools.cache
def read_settings() -> dict[str, Any]:
    """Return the adapter settings, or {} for an engine without adapters."""
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
        for name, shape in zip(NAMES, _get_shapes(settings["rank"], columns, rows), strict=True):
            empty = torch.zeros(shape, dtype=layer.params_dtype)
            layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))


def _get_shapes(rank: int, columns: int, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (rank, columns), (rows, rank)


def add_to_experts(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `FusedMoE.__init__`: add adapters `[E, ...]` of this rank's E experts, with the prefix of the weights they belong to."""
    original(self, *args, **named)
    if torch.cuda.is_available() and {"gate_up_proj", "down_proj"} & set(read_settings()["layers"]):
        raise NotImplementedError("adapters of experts are not supported on a GPU, where one kernel computes all experts")
    settings, experts, hidden, ffn = read_settings(), self.num_local_experts, self.hidden_size, self.intermediate_size_per_partition
    for name, layer, columns, rows in (("w13", "gate_up_proj", hidden, 2 * ffn), ("w2", "down_proj", ffn, hidden)):
        if layer in settings["layers"]:
            for part, shape in zip(NAMES, _get_shapes(settings["rank"], columns, rows), strict=True):
                empty = torch.zeros(experts, *shape, dtype=self.params_dtype)
                self.register_parameter(f"{name}_{part}", torch.nn.Parameter(empty, requires_grad=False))


def run_column_parallel(original: Callable[..., Any], self: Any, input_: torch.Tensor) -> Any:
    """Wrap `ColumnParallelLinear.forward`: x `[T, K]` -> (y `[T, N / tp]`, bias that was not added)."""
    y, bias = original(self, input_)
    if not self.has_adapter:
        return y, bias
    if self.gather_output or not isinstance(input_, torch.Tensor):
        raise NotImplementedError("an adapter of a layer whose output is gathered, or whose input SGLang has already quantized")
    return y + project_up(project_down(input_, self.lora_A), self.lora_B, read_settings()["scale"]), bias


def adapt_experts(layer: Any, name: str, linear: ExpertLinear) -> ExpertLinear:
    """Return a layer of an engine's experts, `w13` or `w2`, with its adapters if it has any."""
    down, up = _get_experts_adapters(layer, name)
    if down is None:
        return linear
    return lambda x, expert: linear(x, expert) + project_up(project_down(x, down[expert]), up[expert], read_settings()["scale"])


def adapt_partial_sums(layer: Any, linear: ExpertLinear) -> tuple[ExpertLinear, ExpertLinear | None]:
    """Return the second layer of experts with the float32 partial sums of its adapters beside its own, `[T, N + rank]`. Also return the
    function that turns the sums of the adapters `[T, rank]` into what they add, `[T, N]`, or None without adapters."""
    down, up = _get_experts_adapters(layer, "w2")
    if down is None:
        return linear, None
    return (
        lambda x, expert: torch.cat([linear(x, expert), tree.multiply(x, down[expert])], -1),
        lambda h, expert: project_up(h, up[expert], read_settings()["scale"]),
    )


def _get_experts_adapters(layer: Any, name: str) -> Any:
    return [getattr(layer, f"{name}_{part}", None) for part in NAMES]


def add_to_row_sum(layer: Any, x: torch.Tensor, y: torch.Tensor, add_over_ranks: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Add the adapter's part to y `[T, N]` of a row-parallel layer, which has been summed over the ranks. x: `[T, K / tp]`."""
    h = add_over_ranks(tree.multiply(x, layer.lora_A), layer.tp_group, x.dtype)
    return y + project_up(h, layer.lora_B, read_settings()["scale"])


def add_to_rounded_sum(layer: Any, x: torch.Tensor, y: torch.Tensor, summed_later: bool) -> torch.Tensor:
    """Add the adapter's part to y of a row-parallel layer whose rounded parts SGLang adds up. SGLang has already done so, or, if
    `summed_later`, does so later; then add this rank's part."""
    h = project_down(x, layer.lora_A)
    if not summed_later and layer.tp_group.world_size > 1:
        h = layer.tp_group.all_reduce(h)
    return y + project_up(h, layer.lora_B, read_settings()["scale"])
