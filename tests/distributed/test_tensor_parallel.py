"""Communication of tensor-parallel ranks: bytes and scales that each rank has quantized, and heads that ranks share."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, mappings
from support import fake_gpu_libraries
from support.fp8_reference import uneven
from support.trainer import build_quantized_layer, start

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.mcore.layers.attention.self_attention import exchange_heads
from megatron_rl.mcore.layers.linear import quantized_matmul
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedRowParallelLinear
from parallel.formats import FP8

CASES = [("deep_gemm", 2, 512), ("deep_gemm", 2, 10), ("deep_gemm", 4, 268), ("transformer_engine", 4, 512), ("transformer_engine", 4, 320)]


def compare(name, tokens, width, scale_format):
    """Return whether gathered rows and columns equal those of all tokens: bytes, scales and strides."""
    start()
    x, rank, group = uneven(tokens, width, torch.bfloat16), dist.get_rank(), dist.group.WORLD
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        backend = make_backend(name, FP8.with_scales(scale_format))
        own, whole = (backend.quantize(part, rows=True, columns=True) for part in (x.chunk(dist.get_world_size())[rank], x))
        gathered = backend.start_gather(Operand(own.tokens, rows=own.rows), group)()
        result["rows"] = gathered.tokens == tokens and _same(gathered.rows, whole.rows)
        if own.tokens % 128 == 0:
            gathered = backend.start_gather(Operand(own.tokens, columns=own.columns), group)()
            result["columns"] = gathered.tokens == tokens and _same(gathered.columns, whole.columns)
    return result


def _same(pair, other):
    data = torch.equal(pair[0].view(torch.uint8), other[0].view(torch.uint8)) and pair[0].stride() == other[0].stride()
    return data and torch.equal(pair[1], other[1]) and pair[1].stride() == other[1].stride()


def run_layer(kind, backend, tokens, gathers):
    """Return a layer's results under sequence parallelism, with plain sums, and the bytes that this rank contributes to all-gathers.
    With `gathers`, operands are gathered; otherwise activations, which every rank quantizes, and a "row" layer's gradients by
    Megatron."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    weight, (x, dy) = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)), (uneven(tokens, 256, torch.bfloat16) for _ in "xd")
    sent, gather = [], dist.all_gather_into_tensor

    def count(output, input, *args, **options):
        sent.append(input.numel() * input.itemsize)
        return gather(output, input, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(dist, "all_gather_into_tensor", count)
        patch.setattr(mappings, "dist_all_gather_func", count)
        if not gathers:
            patch.setattr(quantized_matmul, "can_gather", lambda backend, tokens: False)
            patch.setattr(QuantizedRowParallelLinear, "choose_sum", lambda *_: None)
        layer = build_quantized_layer(kind, "pow2", True, weight)
        layer.config.linear_backend, layer.config.sums_by_tree = backend, False
        column = kind == "column"
        own = (x.chunk(tp)[rank] if column else x.chunk(tp, 1)[rank]).unsqueeze(1).clone().requires_grad_()
        y, _ = layer(own)
        y.backward((dy[:, : y.shape[-1]] if column else dy.chunk(tp)[rank]).unsqueeze(1).contiguous())
    return {"y": y.detach(), "dx": own.grad, "dw": layer.weight.main_grad, "sent": sum(sent)}


def with_and_without(kind, backend, tokens):
    return [run_layer(kind, backend, tokens, gathers) for gathers in (True, False)]


DIM, TOKENS = 8, 5


def exchanged_and_gathered(groups, queries):
    """Return this rank's result and gradient, by exchange and by gather, for `groups` key-value heads with `queries` query heads each,
    and the number of elements sent."""
    start()
    size = dist.get_world_size()
    rank, ranks, group = dist.get_rank(), size // groups, dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    mixed = torch.randn(TOKENS, 1, (queries + 2) * DIM // ranks, generator=generator).bfloat16()
    gradient = torch.randn(TOKENS, 1, (queries // ranks + 2) * DIM, generator=generator).bfloat16()

    def gather(x):
        """Gather as `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors` does."""
        whole = all_gather_last_dim_from_tensor_parallel_region(x).chunk(groups, -1)[rank // ranks]
        query, key_value = whole.split([queries * DIM, 2 * DIM], -1)
        return torch.cat([query.chunk(ranks, -1)[rank % ranks], key_value], -1)

    results = []
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
        for compute in (lambda x: exchange_heads(x, queries, DIM, ranks, group), gather):
            x = mixed.clone().requires_grad_()
            y = compute(x)
            y.backward(gradient)
            results.append({"y": y.detach(), "dx": x.grad})
    results[0]["sent"] = [call.args[1].numel() for call in sent.call_args_list]
    return results


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("backend, tp, tokens", CASES)
def test_gathered_bytes_are_those_of_the_gathered_row(worlds, backend, tp, tokens, scale_format):
    for found in worlds(tp).call(compare, backend, tokens, 384, scale_format):
        assert found == {"rows": True, "columns": True} if tokens % (128 * tp) == 0 else found == {"rows": True}


@pytest.mark.parametrize("backend", ["deep_gemm", "transformer_engine", "emulated"])
@pytest.mark.parametrize("tokens", [512, 192, 200])
def test_a_layers_bits_stay_and_half_the_bytes_travel(worlds, backend, tokens):
    for gathered, whole in worlds(2).call(with_and_without, "column", backend, tokens):
        assert all(torch.equal(gathered[name], whole[name]) for name in ("y", "dx", "dw"))
        share = gathered["sent"] / whole["sent"]
        if backend == "emulated" or (backend == "transformer_engine" and tokens == 200):  # 100 tokens are not 16s
            assert share == 1
        elif tokens % 256 == 0:  # columns, too, are quantized in whole groups on every rank
            assert share == (1 + 4 / 128) / 2
        else:
            assert share == (2 + 1 + 4 / 128) / 4


@pytest.mark.parametrize(
    "backend, tokens", [("deep_gemm", 512), ("transformer_engine", 512), ("transformer_engine", 192), ("emulated", 512)]
)
def test_gradients_of_row_parallel_layers_are_gathered_as_bytes(worlds, backend, tokens):
    """They have the bits of Megatron's layer, which gathers BF16: DGrad's rows and WGrad's columns together are as many bytes."""
    for gathered, whole in worlds(2).call(with_and_without, "row", backend, tokens):
        assert all(torch.equal(gathered[name], whole[name]) for name in ("y", "dx", "dw"))
        as_bytes = backend != "emulated" and tokens % 256 == 0  # columns are quantized in whole groups on every rank
        assert gathered["sent"] == whole["sent"] * (1 + 4 / 128 if as_bytes else 1)


@pytest.mark.parametrize("tp, groups, queries", [(2, 1, 4), (4, 2, 16), (4, 1, 4), (4, 1, 8)])
def test_heads_and_gradients_are_those_of_megatrons_gather(worlds, tp, groups, queries):
    results = worlds(tp).call(exchanged_and_gathered, groups, queries)
    for exchanged, gathered in results:
        assert torch.equal(exchanged["y"], gathered["y"])
        if tp == 2 * groups:  # of two addends
            assert torch.equal(exchanged["dx"], gathered["dx"])
        else:  # Megatron rounds after every addition
            assert torch.allclose(exchanged["dx"], gathered["dx"], rtol=2**-6, atol=2**-5)
        assert (exchanged["dx"] != 0).float().mean() > 0.99
    ranks = tp // groups
    own = [sum(exchanged["sent"]) for exchanged, _ in results]
    # forward and backward: keys and values for the other ranks of the head, and queries that lie with another
    assert sum(own) < 2 * groups * TOKENS * DIM * (2 * (ranks - 1) + queries)
    assert sum(own) < 2 * tp * (tp - 1) * TOKENS * (queries + 2) * DIM // ranks
