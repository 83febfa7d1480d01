"""One FP8 layer of Megatron alone, run in the ranks of a `World`: what goes in and what comes out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.mcore.linear import FP8ColumnParallelLinear, FP8RowParallelLinear
from megatron_rl.mcore.model import PolicyConfig
from support.trainer import start


def products(kind: str, scale_format: str, sequence_parallel: bool, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> Any:
    """FProp, DGrad and WGrad of the whole layer, put together from all ranks: y [s, b, N], dx [s, b, K], dw [N, K], on every rank.

    `kind`: "column" (N split over ranks) or "row" (K split). weight [N, K], x [s, b, K], dy [s, b, N] are those of the whole layer.
    """
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    config = PolicyConfig(
        num_layers=1,
        hidden_size=weight.shape[1],
        num_attention_heads=2,
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        fp8_scale_format=scale_format,
    )
    how = dict(config=config, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False)
    column = kind == "column"
    make = FP8ColumnParallelLinear if column else FP8RowParallelLinear
    layer = make(weight.shape[1], weight.shape[0], **how, **({"gather_output": False} if column else {"input_is_parallel": True}))
    split, whole = (0, 1) if column else (1, 0)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(tp, dim=split)[rank])
    layer.quantize("weight")

    def part(tensor: torch.Tensor, along_features: bool) -> torch.Tensor:
        """This rank's part of an activation: of its features, or of its sequence under sequence parallelism, or all of it."""
        if along_features:
            return tensor.chunk(tp, dim=2)[rank].contiguous()
        return tensor.chunk(tp, dim=0)[rank].contiguous() if sequence_parallel else tensor

    def joined(tensor: torch.Tensor, along_features: bool) -> torch.Tensor:
        if not along_features and not sequence_parallel:
            return tensor
        return _gather(tensor, 2 if along_features else 0)

    mine = part(x, along_features=not column).clone().requires_grad_(True)
    y, _ = layer(mine)
    y.backward(part(dy, along_features=column))
    assert layer.weight.shape[whole] == weight.shape[whole]
    return (
        joined(y.detach(), along_features=column),
        joined(mine.grad, along_features=not column),
        _gather(layer.weight.grad, split),
    )


def _gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)
