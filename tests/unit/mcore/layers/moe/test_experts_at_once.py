"""Grouped experts return the outputs and gradients of single experts. Kernels and DeepGEMM are faked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fp8_reference import uneven_matrix

from megatron_rl.kernels.experts.reference import weigh
from megatron_rl.kernels.experts.token_groups import TokenGroups
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.layers.moe.grouped_experts import GroupedLinear, run_experts
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8

HIDDEN, FFN = 256, 128
SENT = torch.tensor([[3, 0, 130], [1, 0, 20]])  # tokens of two ranks for three experts
TOKENS = int(SENT.sum())


pytestmark = pytest.mark.usefixtures("fake_libraries")


def make_layers(rows: int, columns: int) -> list[Any]:
    layers = []
    for seed in range(SENT.shape[1]):
        blocks = quantize_weight(uneven_matrix(rows, columns, seed) / 64, "pow2")
        weight: Any = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
        weight.main_grad = torch.ones(rows, columns)
        layer = {"weight": weight, "blocks": blocks, "scale": blocks.scale, "format": FP8, "_forward_pre_hooks": {}}
        layers.append(SimpleNamespace(config=SimpleNamespace(linear_backend="deep_gemm"), **layer))
    return layers


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def run_alone(x: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor, first: Any, second: Any) -> tuple[torch.Tensor, ...]:
    """Return (outputs, gradients of tokens, token weights, first layer, second layer) of one expert."""
    backend = make_backend("deep_gemm", FP8)
    into, out = (backend.prepare(layer.blocks, None) for layer in (first, second))
    operand = backend.quantize(x, rows=True, columns=True)
    gate_up = backend.fprop(operand, into)
    hidden = backend.quantize(swiglu.multiply_reference(gate_up), rows=True, columns=True)
    y = backend.fprop(hidden, out)
    gradient = backend.quantize(weigh(dy, weights), rows=True, columns=True)
    of_gate_up = swiglu.differentiate_reference(gate_up, backend.dgrad(gradient, out))
    slope = backend.quantize(of_gate_up, rows=True, columns=True)
    of_weights = (dy.float() * y).sum(-1)
    sums = [
        backend.wgrad(a, b, torch.ones_like(layer.weight.main_grad))
        for a, b, layer in ((slope, operand, first), (gradient, hidden, second))
    ]
    return weigh(y, weights), backend.dgrad(slope, into), of_weights, *sums


def test_grouped_experts_match_single_experts_in_the_order_of_tokens():
    first, second = make_layers(2 * FFN, HIDDEN), make_layers(HIDDEN, FFN)
    x, dy, weights = draw(TOKENS, HIDDEN), draw(TOKENS, HIDDEN).flip(0), torch.linspace(0.1, 1, TOKENS)
    inputs = x.requires_grad_(), weights.requires_grad_()
    y = run_experts(*inputs, TokenGroups.from_counts(SENT, "cpu"), GroupedLinear(first), GroupedLinear(second))
    y.backward(dy)
    experts = torch.arange(SENT.shape[1]).repeat(len(SENT)).repeat_interleave(SENT.flatten())
    for expert in SENT.sum(0).nonzero().flatten().tolist():
        mine = experts == expert
        wanted = run_alone(x.detach()[mine], weights.detach()[mine], dy[mine], first[expert], second[expert])
        found = y[mine], x.grad[mine], weights.grad[mine], first[expert].weight.main_grad, second[expert].weight.main_grad
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-4 * float(b.abs().max())), "another matmul on the CPU"
    assert torch.equal(first[1].weight.main_grad, torch.ones(2 * FFN, HIDDEN)), "no token, no gradient"


def test_sorted_tokens_and_packed_ones_have_the_same_bits():
    first, second = GroupedLinear(make_layers(2 * FFN, HIDDEN)), GroupedLinear(make_layers(HIDDEN, FFN))
    x, weights = draw(TOKENS, HIDDEN), torch.linspace(0.1, 1, TOKENS)
    experts = torch.arange(SENT.shape[1]).repeat(len(SENT)).repeat_interleave(SENT.flatten())
    order = experts.argsort(stable=True)
    with torch.no_grad():
        received = run_experts(x, weights, TokenGroups.from_counts(SENT, "cpu"), first, second)
        in_order = run_experts(x[order], weights[order], TokenGroups.from_counts(SENT.sum(0), "cpu"), first, second)
        packed = run_experts(
            first.backend.pack(x, torch.arange(TOKENS).unsqueeze(1)), weights, TokenGroups.from_counts(SENT, "cpu"), first, second
        )
    assert torch.equal(received[order], in_order) and torch.equal(received, packed)
