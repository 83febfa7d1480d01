"""LoRA in the trainer: adapters beside Megatron's linear layers. Only adapters have gradients, masters and optimizer state.

A layer's blocks stay as loaded. A forward hook adds the adapter's output after the layer's own product and bias, as the engine does
(`rollout_sglang.hooks.adapters`).
"""

import hashlib
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.config.lora import LoraConfig
from megatron_rl.kernels.linear.reference import project_down, project_up
from megatron_rl.mcore.base.names import ModelChunks, freeze, get_model_chunks, global_name, iter_modules
from megatron_rl.mcore.base.weight_gradient import take_weight
from megatron_rl.mcore.layers.linear.row_parallel import PartialSum, TreeProduct
from parallel.adapters import NAMES


def install_adapters(model: ModelChunks, lora: LoraConfig, seed: int) -> None:
    """Freeze a loaded model and add adapters to its layers, before it gets an optimizer. A is uniform as in PEFT, B is zero. A is drawn by
    the layer's name, so it is the same in every layout."""
    freeze(model)
    for chunk in get_model_chunks(model):
        dtype = chunk.config.params_dtype
        for name, layer in chunk.named_modules():
            if name.rsplit(".", 1)[-1] in lora.targets:
                _install(layer, global_name(chunk, name), lora, dtype, seed)
        if chunk.config.recompute_granularity and hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(_start_gradients)


def _start_gradients(_: Any, __: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Make the output of the frozen embedding require gradients: recomputation drops the gradients of parts whose inputs require none."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


def _install(layer: Any, name: str, lora: LoraConfig, dtype: torch.dtype, seed: int) -> None:
    rows, columns = layer.weight.shape
    by_columns, group = isinstance(layer, RowParallelLinear), layer.tp_group
    parts, part = (group.size(), group.rank()) if by_columns else (1, 0)
    whole = _draw(f"{seed} {name}", lora.rank, columns * parts)
    down = whole[:, part * columns : (part + 1) * columns].to(device=layer.weight.device, dtype=dtype).clone()
    layer.lora_A = torch.nn.Parameter(down)
    layer.lora_B = torch.nn.Parameter(torch.zeros(rows, lora.rank, device=layer.weight.device, dtype=dtype))
    cut, whole_one, axis = (layer.lora_A, layer.lora_B, 1) if by_columns else (layer.lora_B, layer.lora_A, 0)
    set_tensor_model_parallel_attributes(cut, True, axis, 1)
    if layer.is_expert:  # ranks hold different experts: the gradient norm counts the parameters of each, but on one rank only
        cut.allreduce = whole_one.allreduce = False
        whole_one.tensor_model_parallel, whole_one.shared = True, group.rank() > 0
    else:
        whole_one.sequence_parallel = layer.sequence_parallel  # its gradient covers this rank's tokens; Megatron sums it over the ranks
    layer.adapter_enabled, layer.adapter_scale = True, lora.scale
    layer.register_forward_hook(_add_by_row_sum if by_columns else _add)


def _draw(key: str, rank: int, columns: int) -> torch.Tensor:
    """Return float32 [rank, columns], uniform in +-1 / sqrt(columns): `kaiming_uniform_` with a = sqrt(5), as in PEFT."""
    numbers = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
    return (torch.rand(rank, columns, generator=numbers) * 2 - 1) / math.sqrt(columns)


def _add(layer: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Add the adapter of a column-parallel layer. Under sequence parallelism, h is gathered, which is narrower than x. The ranks of an
    expert hold the same tokens already; x's gradient is summed behind the layer, so A's gradient is summed here."""
    if not layer.adapter_enabled:
        return output
    group, down, up = layer.tp_group, take_weight(layer.lora_A), take_weight(layer.lora_B)
    if layer.is_expert and group.size() > 1:
        down = copy_to_tensor_model_parallel_region(down, group=group)
    h = project_down(inputs[0], down)
    if not layer.is_expert and group.size() > 1:
        widen = gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
        h = widen(h, group=group)
    return output[0] + project_up(h, up, layer.adapter_scale), output[1]


def _add_by_row_sum(layer: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Add the adapter of a row-parallel layer; partial sums of h are added like those of y. If `mcore.layers.moe.experts` adds the partial
    sums of y, float32 [T, N], append those of h: [T, N + rank]. If Megatron sums rounded parts of y, it also sums those of an expert's
    adapter."""
    if not layer.adapter_enabled:
        return output
    row_sum, group = layer.choose_sum(inputs[0].dtype), layer.tp_group
    if isinstance(row_sum, PartialSum):
        return torch.cat([output[0], TreeProduct.apply(inputs[0], layer.lora_A, row_sum)], -1), output[1]
    up = take_weight(layer.lora_B)
    if row_sum is not None and row_sum.by_tree:
        h = TreeProduct.apply(inputs[0], layer.lora_A, row_sum)
    else:
        h = project_down(inputs[0], take_weight(layer.lora_A))
        if group.size() > 1 and layer.is_expert:
            up = copy_to_tensor_model_parallel_region(up, group=group)
        elif group.size() > 1:
            add_up = reduce_scatter_to_sequence_parallel_region if layer.sequence_parallel else reduce_from_tensor_model_parallel_region
            h = add_up(h, group=group)
    return output[0] + project_up(h, up, layer.adapter_scale), output[1]


def list_adapted_layers(model: ModelChunks) -> list[tuple[Any, str, Any]]:
    """Return (chunk, name, layer) of every layer with an adapter; [] without LoRA."""
    return [found for found in iter_modules(model) if hasattr(found[2], "adapter_scale")]


def shard_adapters(chunk: Any) -> dict[str, Any]:
    """Return the sharded adapters of a chunk for a checkpoint, by name; {} without LoRA."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded: dict[str, Any] = {}
    for _, name, layer in list_adapted_layers(chunk):
        axes = {"lora_A": 1} if isinstance(layer, RowParallelLinear) else {"lora_B": 0}
        tensors = {each: getattr(layer, each) for each in NAMES}
        prefix, experts = _stack_experts(chunk, f"{global_name(chunk, name)}.")
        group = parallel_state.get_expert_data_parallel_group() if experts else replicas
        own = make_sharded_tensors_for_checkpoint(tensors, prefix, axes, experts, tp_group=layer.tp_group, dp_cp_group=group)
        if name.endswith("linear_fc1"):  # [gate ; up] on each rank
            own[f"{prefix}lora_B"] = apply_swiglu_sharded_factory(own[f"{prefix}lora_B"], experts)
        elif name.endswith("in_proj_qkvz"):  # [q ; k ; v ; z] on each rank
            delta_net = chunk.get_submodule(name.rpartition(".")[0])
            own[f"{prefix}lora_B"] = delta_net.place_rows("in_proj_qkvz", own[f"{prefix}lora_B"])
        sharded |= {f"{name}.{each}": own[f"{prefix}{each}"] for each in NAMES}
    return sharded


def _stack_experts(chunk: Any, prefix: str) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    """Return (the stored prefix, sharded offsets). Megatron stores the experts of a layer as one stacked tensor."""
    before, of_expert, after = prefix.partition(".local_experts.")
    if not of_expert:
        return prefix, ()
    expert, _, layer = after.partition(".")
    return f"{before}.experts.{layer}", ((0, int(expert), chunk.config.num_moe_experts),)
