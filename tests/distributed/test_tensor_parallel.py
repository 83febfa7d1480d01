"""Communication of tensor-parallel ranks: bytes and scales that each rank has quantized, and heads that ranks share."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, mappings
from support import fake_gpu_libraries
from support.fp8_reference import uneven
from support.trainer import build_quantized_layer, start

from megatron_rl.mcore.layers.attention.self_attention import exchange_heads
from megatron_rl.mcore.layers.linear import quantized_matmul
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedRowParallelLinear


def run_layer(kind, backend, tokens, scale_format, gathers):
    """Return a layer's results under sequence parallelism, with plain sums or, for the kind "ranks", a row-parallel layer's sums in the
    order of ranks, and the bytes that this rank contributes to all-gathers. With `gathers`, operands are gathered; otherwise activations,
    which every rank quantizes, and a "row" layer's gradients by Megatron."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    weight, (x, dy) = (
        torch.randn(128 * tp, 256, generator=torch.Generator().manual_seed(0)),
        (uneven(tokens, 256, torch.bfloat16) for _ in "xd"),
    )
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
            if kind == "row":
                patch.setattr(QuantizedRowParallelLinear, "choose_sum", lambda *_: None)
        layer = build_quantized_layer("row" if kind == "ranks" else kind, scale_format, True, weight)
        layer.config.linear_backend, layer.config.sums_by_tree = backend, False
        layer.config.row_parts = tp if kind == "ranks" else 1
        column = kind == "column"
        own = (x.chunk(tp)[rank] if column else x.chunk(tp, 1)[rank]).unsqueeze(1).clone().requires_grad_()
        y, _ = layer(own)
        y.backward((dy[:, : y.shape[-1]] if column else dy.chunk(tp)[rank]).unsqueeze(1).contiguous())
    return {"y": y.detach(), "dx": own.grad, "dw": layer.weight.main_grad, "sent": sum(sent)}


def with_and_without(*case):
    return [run_layer(*case, gathers) for gathers in (True, False)]


DIM, TOKENS = 8, 5


def exchanged_and_gathered(groups, queries, gated):
    """Return this rank's result and gradient, by exchange and by gather, for `groups` key-value heads with `queries` query heads each,
    and as many gates if `gated`, and the number of elements sent."""
    start()
    size = dist.get_world_size()
    rank, ranks, group = dist.get_rank(), size // groups, dist.group.WORLD
    shared = [queries] * (1 + gated)
    generator = torch.Generator().manual_seed(rank)
    mixed = torch.randn(TOKENS, 1, (sum(shared) + 2) * DIM // ranks, generator=generator).bfloat16()
    gradient = torch.randn(TOKENS, 1, (sum(shared) // ranks + 2) * DIM, generator=generator).bfloat16()

    def gather(x):
        """Gather as `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors` does."""
        whole = all_gather_last_dim_from_tensor_parallel_region(x).chunk(groups, -1)[rank // ranks]
        *heads, key_value = whole.split([*(count * DIM for count in shared), 2 * DIM], -1)
        return torch.cat([*(part.chunk(ranks, -1)[rank % ranks] for part in heads), key_value], -1)

    results = []
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
        for compute in (lambda x: exchange_heads(x, shared, DIM, ranks, group), gather):
            x = mixed.clone().requires_grad_()
            y = compute(x)
            y.backward(gradient)
            results.append({"y": y.detach(), "dx": x.grad})
    results[0]["sent"] = [call.args[1].numel() for call in sent.call_args_list]
    return results


CASES = [
    *(("column", backend, 2, tokens) for backend in ("deep_gemm", "transformer_engine", "emulated") for tokens in (512, 192, 200)),
    *(("column", backend, 4, tokens) for backend, tokens in (("deep_gemm", 268), ("transformer_engine", 512), ("transformer_engine", 320))),
    ("column", "deep_gemm", 2, 10),
    *(("row", backend, 2, 512) for backend in ("deep_gemm", "transformer_engine", "emulated")),
    ("row", "transformer_engine", 2, 192),
    *(("ranks", "deep_gemm", 2, tokens) for tokens in (512, 192)),
]


@pytest.mark.parametrize("kind, backend, tp, tokens", CASES)
def test_a_layers_bits_stay_and_half_the_bytes_travel(worlds, kind, backend, tp, tokens):
    """Gradients of row-parallel layers have the bits of Megatron's layer, which gathers BF16: DGrad's rows and WGrad's columns together
    are as many bytes."""
    for scale_format in ("pow2", "fp32"):
        for gathered, whole in worlds(tp).call(with_and_without, kind, backend, tokens, scale_format):
            assert all(torch.equal(gathered[name], whole[name]) for name in ("y", "dx", "dw"))
            share = gathered["sent"] / whole["sent"]
            whole_groups = tokens % (128 * tp) == 0  # columns, too, are quantized in whole groups on every rank
            if backend == "emulated" or (backend == "transformer_engine" and tokens == 200):  # 100 tokens are not 16s
                assert share == 1
            elif kind != "column":
                assert share == (1 + 4 / 128 if whole_groups else 1)
            else:
                assert share == ((1 + 4 / 128) / 2 if whole_groups else (2 + 1 + 4 / 128) / 4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tp, groups, queries", [(2, 1, 4), (4, 2, 16), (4, 1, 4), (4, 1, 8)])
def test_heads_and_gradients_are_those_of_megatrons_gather(worlds, tp, groups, queries, gated):
    results = worlds(tp).call(exchanged_and_gathered, groups, queries, gated)
    for exchanged, gathered in results:
        assert torch.equal(exchanged["y"], gathered["y"])
        if tp == 2 * groups:  # of two addends
            assert torch.equal(exchanged["dx"], gathered["dx"])
        else:  # Megatron rounds after every addition
            assert torch.allclose(exchanged["dx"], gathered["dx"], rtol=2**-6, atol=2**-5)
        assert (exchanged["dx"] != 0).float().mean() > 0.99
    ranks, shared = tp // groups, queries * (1 + gated)
    own = [sum(exchanged["sent"]) for exchanged, _ in results]
    # forward and backward: keys and values for the other ranks of the head, and queries and gates that lie with another
    assert sum(own) < 2 * groups * TOKENS * DIM * (2 * (ranks - 1) + shared)
    assert sum(own) < 2 * tp * (tp - 1) * TOKENS * (shared + 2) * DIM // ranks
