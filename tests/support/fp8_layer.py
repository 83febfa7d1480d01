"""One FP8 layer of Megatron alone, run in the ranks of a `World`: what goes in and what comes out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.mcore.layers.fp8_linear import FP8ColumnParallelLinear, FP8RowParallelLinear
from megatron_rl.mcore.model import FP8TransformerConfig
from support.trainer import start


def build(kind: str, scale_format: str, sequence_parallel: bool, weight: torch.Tensor, **more: Any) -> Any:
    """This rank's layer of a "column" (N split over ranks) or "row" (K split) kind, with its part of weight [N, K], quantised."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    config = FP8TransformerConfig(
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
    how = dict(config=config, init_method=torch.nn.init.zeros_, bias=False) | {"skip_bias_add": False} | more
    column = kind == "column"
    make = FP8ColumnParallelLinear if column else FP8RowParallelLinear
    layer = make(weight.shape[1], weight.shape[0], **how, **({"gather_output": False} if column else {"input_is_parallel": True}))
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(tp, dim=0 if column else 1)[rank])
    layer.quantize("weight")
    return layer


def accumulated(sequence_parallel: bool, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """WGrad of a column-parallel layer on this rank: "once" of all tokens, x [s, 1, K] and dy [s, 1, N], and "added" to a gradient
    buffer in two halves. Checks Megatron's protocol: the buffer is used, its flag set, and what autograd gets is no gradient."""
    layer = build("column", "pow2", sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()

    def backward(x: torch.Tensor, dy: torch.Tensor) -> None:
        mine = x.chunk(tp)[rank] if sequence_parallel else x
        layer(mine.clone().requires_grad_(True))[0].backward(dy.chunk(tp, dim=2)[rank].contiguous())

    backward(x, dy)
    once, layer.weight.grad = layer.weight.grad, None
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    for half in zip(x.chunk(2), dy.chunk(2), strict=True):
        layer.weight.grad_added_to_main_grad = False
        backward(*half)
        assert layer.weight.grad_added_to_main_grad
    return {"once": once, "added": layer.weight.main_grad}


def experts(kind: str, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, dx and dw of this rank's part of an expert, whose tokens the dispatcher has exchanged already: the layer itself must neither
    gather nor sum. x [T, K of the rank], dy [T, N of the rank]; the results are this rank's."""
    layer = build(kind, "pow2", dist.get_world_size() > 1, weight, is_expert=True, skip_bias_add=True)
    x = x.clone().requires_grad_(True)
    y, _ = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def products(kind: str, scale_format: str, sequence_parallel: bool, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> Any:
    """FProp, DGrad and WGrad of the whole layer, put together from all ranks: y [s, b, N], dx [s, b, K], dw [N, K], on every rank.

    `kind`: "column" (N split over ranks) or "row" (K split). weight [N, K], x [s, b, K], dy [s, b, N] are those of the whole layer.
    """
    layer = build(kind, scale_format, sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()
    column = kind == "column"
    split, whole = (0, 1) if column else (1, 0)

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
