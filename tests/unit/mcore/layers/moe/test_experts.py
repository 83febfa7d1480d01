"""The GPU dispatcher selects tokens in Megatron's order without waiting for the device, and sums outputs with a single rounding."""

from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from megatron_rl.kernels.experts.reference import scatter_tokens
from megatron_rl.mcore.layers.moe.experts import EvenDispatcher

TOKENS, EXPERTS, K, HIDDEN = 37, 8, 3, 16


def make_dispatcher() -> EvenDispatcher:
    dispatcher = object.__new__(EvenDispatcher)
    dispatcher.config, dispatcher.shared_experts = SimpleNamespace(moe_router_topk=K), None
    dispatcher.experts = SimpleNamespace(scatter_tokens=scatter_tokens)
    dispatcher.preprocess = lambda routing_map: None
    return dispatcher


def test_it_selects_as_megatron_does_and_sums_in_fp32(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights, chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(K)
    probs = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    x = torch.randn(TOKENS, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
    wanted, wanted_probs, order = permute(x.detach().view(TOKENS, HIDDEN), probs > 0, probs=probs, num_out_tokens=TOKENS * K)
    for name in ("nonzero", "masked_select", "item", "tolist", "__bool__"):  # each of them would wait for a GPU
        monkeypatch.setattr(torch.Tensor, name, lambda *_: (_ for _ in ()).throw(AssertionError("waits for the device")))
    dispatcher = make_dispatcher()
    rows, permuted_probs = dispatcher.dispatch_preprocess(x, probs > 0, probs)
    outputs = (torch.randn(rows.shape, generator=generator) * 3).bfloat16().requires_grad_()
    summed = dispatcher.combine_postprocess(outputs)
    gradient = torch.randn(rows.shape, generator=generator).bfloat16()
    rows.backward(gradient)
    summed.backward(x.detach())
    monkeypatch.undo()

    assert torch.equal(rows, wanted) and torch.equal(permuted_probs, wanted_probs)
    exact = unpermute(outputs.detach().float(), order, (TOKENS, HIDDEN))
    assert torch.equal(summed.view(TOKENS, HIDDEN), exact.bfloat16()) or (summed.view(TOKENS, HIDDEN) - exact).abs().max() < 2**-6
    assert torch.equal(outputs.grad, x.detach().view(TOKENS, HIDDEN)[order])
    of_input = unpermute(gradient.float(), order, (TOKENS, HIDDEN))
    assert torch.allclose(x.grad.view(TOKENS, HIDDEN).float(), of_input, rtol=2**-8, atol=1e-6)
