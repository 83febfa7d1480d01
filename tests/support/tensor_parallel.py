"""What tensor-parallel ranks gather or exchange, against what Megatron gathers. `fake_gpu_libraries` stands in for DeepGEMM."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, mappings

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.mcore.layers.attention.shared_heads import exchange_heads
from megatron_rl.mcore.layers.linear import quantized_matmul
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedRowParallelLinear
from parallel.formats import FP8
from support import fake_gpu_libraries
from support.fp8_reference import uneven
from support.megatron_models import build
from support.trainer import start


def compare(name: str, tokens: int, width: int, scale_format: str) -> dict[str, bool]:
    """Return whether gathered rows and columns equal those of all tokens: bytes, scales and strides."""
    start()
    x, rank, group = uneven(tokens, width, torch.bfloat16), dist.get_rank(), dist.group.WORLD
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        backend: Any = make_backend(name, FP8.with_scales(scale_format))
        own, whole = (backend.quantize(part, rows=True, columns=True) for part in (x.chunk(dist.get_world_size())[rank], x))
        gathered = backend.start_gather(Operand(own.tokens, rows=own.rows), group)()
        result["rows"] = gathered.tokens == tokens and _same(gathered.rows, whole.rows)
        if own.tokens % 128 == 0:
            gathered = backend.start_gather(Operand(own.tokens, columns=own.columns), group)()
            result["columns"] = gathered.tokens == tokens and _same(gathered.columns, whole.columns)
    return result


def _same(pair: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    data = torch.equal(pair[0].view(torch.uint8), other[0].view(torch.uint8)) and pair[0].stride() == other[0].stride()
    return data and torch.equal(pair[1], other[1]) and pair[1].stride() == other[1].stride()


def run_layer(kind: str, backend: str, tokens: int, gathers: bool) -> dict[str, Any]:
    """Return a layer's results under sequence parallelism, with plain sums, and the bytes that this rank contributes to all-gathers.
    With `gathers`, operands are gathered; otherwise activations, which every rank quantizes, and a "row" layer's gradients by
    Megatron."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    weight, (x, dy) = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)), (uneven(tokens, 256, torch.bfloat16) for _ in "xd")
    sent, gather = [], dist.all_gather_into_tensor

    def count(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(input.numel() * input.itemsize)
        return gather(output, input, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(dist, "all_gather_into_tensor", count)
        patch.setattr(mappings, "dist_all_gather_func", count)
        if not gathers:
            patch.setattr(quantized_matmul, "can_gather", lambda backend, tokens: False)
            patch.setattr(QuantizedRowParallelLinear, "choose_sum", lambda *_: None)
        layer = build(kind, "pow2", True, weight)
        layer.config.linear_backend, layer.config.sums_by_tree = backend, False
        column = kind == "column"
        own = (x.chunk(tp)[rank] if column else x.chunk(tp, 1)[rank]).unsqueeze(1).clone().requires_grad_()
        y, _ = layer(own)
        y.backward((dy[:, : y.shape[-1]] if column else dy.chunk(tp)[rank]).unsqueeze(1).contiguous())
    return {"y": y.detach(), "dx": own.grad, "dw": layer.weight.main_grad, "sent": sum(sent)}


def with_and_without(kind: str, backend: str, tokens: int) -> list[dict[str, Any]]:
    return [run_layer(kind, backend, tokens, gathers) for gathers in (True, False)]


DIM, TOKENS = 8, 5


def exchanged_and_gathered(groups: int, queries: int) -> list[dict[str, Any]]:
    """Return this rank's result and gradient, by exchange and by gather, for `groups` key-value heads with `queries` query heads each,
    and the number of elements sent."""
    start()
    size = dist.get_world_size()
    rank, ranks, group = dist.get_rank(), size // groups, dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    mixed = torch.randn(TOKENS, 1, (queries + 2) * DIM // ranks, generator=generator).bfloat16()
    gradient = torch.randn(TOKENS, 1, (queries // ranks + 2) * DIM, generator=generator).bfloat16()

    def gather(x: torch.Tensor) -> torch.Tensor:
        """Gather as `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors` does."""
        whole = all_gather_last_dim_from_tensor_parallel_region(x).chunk(groups, -1)[rank // ranks]
        query, key_value = whole.split([queries * DIM, 2 * DIM], -1)
        return torch.cat([query.chunk(ranks, -1)[rank % ranks], key_value], -1)

    results: list[dict[str, Any]] = []
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
        for compute in (lambda x: exchange_heads(x, queries, DIM, ranks, group), gather):
            x = mixed.clone().requires_grad_()
            y = compute(x)
            y.backward(gradient)
            results.append({"y": y.detach(), "dx": x.grad})
    results[0]["sent"] = [call.args[1].numel() for call in sent.call_args_list]
    return results
