"""Communication of tensor-parallel ranks: bytes and scales that each rank has quantized, and heads that ranks share."""

from __future__ import annotations

import pytest
import torch
from support import tensor_parallel
from support.tensor_parallel import DIM, TOKENS

CASES = [
    ("deep_gemm", 2, 512),
    ("deep_gemm", 2, 10),
    ("deep_gemm", 4, 268),
    ("transformer_engine", 4, 512),
    ("transformer_engine", 4, 320),
]


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("backend, tp, tokens", CASES)
def test_gathered_bytes_are_those_of_the_gathered_row(worlds, backend, tp, tokens, scale_format):
    for found in worlds(tp).call(tensor_parallel.compare, backend, tokens, 384, scale_format):
        assert found == {"rows": True, "columns": True} if tokens % (128 * tp) == 0 else found == {"rows": True}


@pytest.mark.parametrize("backend", ["deep_gemm", "transformer_engine", "emulated"])
@pytest.mark.parametrize("tokens", [512, 192, 200])
def test_a_layers_bits_stay_and_half_the_bytes_travel(worlds, backend, tokens):
    for gathered, whole in worlds(2).call(tensor_parallel.with_and_without, "column", backend, tokens):
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
    for gathered, whole in worlds(2).call(tensor_parallel.with_and_without, "row", backend, tokens):
        assert all(torch.equal(gathered[name], whole[name]) for name in ("y", "dx", "dw"))
        as_bytes = backend != "emulated" and tokens % 256 == 0  # columns are quantized in whole groups on every rank
        assert gathered["sent"] == whole["sent"] * (1 + 4 / 128 if as_bytes else 1)


@pytest.mark.parametrize("tp, groups, queries", [(2, 1, 4), (4, 2, 16), (4, 1, 4), (4, 1, 8)])
def test_heads_and_gradients_are_those_of_megatrons_gather(worlds, tp, groups, queries):
    results = worlds(tp).call(tensor_parallel.exchanged_and_gathered, groups, queries)
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
