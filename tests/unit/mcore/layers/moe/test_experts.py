"""Grouped experts match single experts, and the GPU dispatcher matches Megatron's without waiting for the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from support.fp8_reference import uneven_matrix
from support.kernel_tests import random

from megatron_rl.kernels.experts.reference import scatter_tokens, weigh
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.layers.moe.experts import EvenDispatcher
from megatron_rl.mcore.layers.moe.grouped_experts import GroupedLinear, run_experts
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8

HIDDEN, FFN = 256, 128
SENT = torch.tensor([[3, 0, 130], [1, 0, 20]])  # tokens of two ranks for three experts
TOKENS = int(SENT.sum())
SENT_TO = torch.arange(SENT.shape[1]).repeat(len(SENT)).repeat_interleave(SENT.flatten())  # the expert of each token

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


def run_alone(x: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor, first: Any, second: Any) -> tuple[torch.Tensor, ...]:
    """Return (outputs, gradients of tokens, token weights, first layer, second layer) of one expert."""
    backend = make_backend("deep_gemm", FP8)
    into, out = (backend.prepare(layer.blocks, None) for layer in (first, second))
    operand = backend.quantize(x, rows=True, columns=True)
    gate_up = backend.fprop(operand, into)
    hidden = backend.quantize(swiglu.multiply(gate_up), rows=True, columns=True)
    y = backend.fprop(hidden, out)
    gradient = backend.quantize(weigh(dy, weights), rows=True, columns=True)
    of_gate_up = swiglu.differentiate(gate_up, backend.dgrad(gradient, out))
    slope = backend.quantize(of_gate_up, rows=True, columns=True)
    of_weights = (dy.float() * y).sum(-1)
    of_layers = (slope, operand, first), (gradient, hidden, second)
    sums = [backend.wgrad(a, b, torch.ones_like(layer.weight.main_grad)) for a, b, layer in of_layers]
    return weigh(y, weights), backend.dgrad(slope, into), of_weights, *sums


def test_grouped_experts_match_single_experts_in_the_order_of_tokens():
    first, second = make_layers(2 * FFN, HIDDEN), make_layers(HIDDEN, FFN)
    x, dy = (random(TOKENS, HIDDEN, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    weights = torch.linspace(0.1, 1, TOKENS)
    inputs = x.requires_grad_(), weights.requires_grad_()
    y = run_experts(*inputs, TokenGroups.from_counts(SENT, "cpu"), GroupedLinear(first), GroupedLinear(second))
    y.backward(dy)
    for expert in SENT.sum(0).nonzero().flatten().tolist():
        mine = expert == SENT_TO
        wanted = run_alone(x.detach()[mine], weights.detach()[mine], dy[mine], first[expert], second[expert])
        found = y[mine], x.grad[mine], weights.grad[mine], first[expert].weight.main_grad, second[expert].weight.main_grad
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-4 * float(b.abs().max())), "another matmul on the CPU"
    assert torch.equal(first[1].weight.main_grad, torch.ones(2 * FFN, HIDDEN)), "no token, no gradient"


def test_sorted_tokens_and_packed_ones_have_the_same_bits():
    first, second = GroupedLinear(make_layers(2 * FFN, HIDDEN)), GroupedLinear(make_layers(HIDDEN, FFN))
    x, weights = random(TOKENS, HIDDEN, seed=0, dtype=torch.bfloat16), torch.linspace(0.1, 1, TOKENS)
    order, groups = SENT_TO.argsort(stable=True), TokenGroups.from_counts(SENT, "cpu")
    with torch.no_grad():
        received = run_experts(x, weights, groups, first, second)
        in_order = run_experts(x[order], weights[order], TokenGroups.from_counts(SENT.sum(0), "cpu"), first, second)
        packed = run_experts(first.backend.pack(x, torch.arange(TOKENS).unsqueeze(1)), weights, groups, first, second)
    assert torch.equal(received[order], in_order) and torch.equal(received, packed)


COUNT, EXPERTS, K, WIDTH = 37, 8, 3, 16


def test_it_selects_as_megatron_does_and_sums_in_fp32(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights, chosen = torch.rand(COUNT, EXPERTS, generator=generator).topk(K)
    probs = torch.zeros(COUNT, EXPERTS).scatter(1, chosen, weights)
    x = torch.randn(COUNT, 1, WIDTH, generator=generator).bfloat16().requires_grad_()
    wanted, wanted_probs, order, *_ = permute(x.detach().view(COUNT, WIDTH), probs > 0, probs=probs, num_out_tokens=COUNT * K)
    for name in ("nonzero", "masked_select", "item", "tolist", "__bool__"):  # each of them would wait for a GPU
        monkeypatch.setattr(torch.Tensor, name, lambda *_: (_ for _ in ()).throw(AssertionError("waits for the device")))
    dispatcher = object.__new__(EvenDispatcher)
    dispatcher.config = SimpleNamespace(moe_router_topk=K)
    dispatcher.experts, dispatcher.preprocess = SimpleNamespace(scatter_tokens=scatter_tokens), lambda routing_map: None
    dispatcher.parts = None
    rows, permuted_probs = dispatcher.dispatch_preprocess(x, probs > 0, probs)
    outputs = (torch.randn(rows.shape, generator=generator) * 3).bfloat16().requires_grad_()
    summed = dispatcher.combine_postprocess(outputs)
    gradient = torch.randn(rows.shape, generator=generator).bfloat16()
    rows.backward(gradient)
    summed.backward(x.detach())
    monkeypatch.undo()

    assert torch.equal(rows, wanted) and torch.equal(permuted_probs, wanted_probs)
    exact = unpermute(outputs.detach().float(), order, (COUNT, WIDTH))
    assert torch.equal(summed.view(COUNT, WIDTH), exact.bfloat16()) or (summed.view(COUNT, WIDTH) - exact).abs().max() < 2**-6
    assert torch.equal(outputs.grad, x.detach().view(COUNT, WIDTH)[order])
    of_input = unpermute(gradient.float(), order, (COUNT, WIDTH))
    assert torch.allclose(x.grad.view(COUNT, WIDTH).float(), of_input, rtol=2**-8, atol=1e-6)
