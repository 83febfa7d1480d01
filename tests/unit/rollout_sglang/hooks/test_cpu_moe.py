"""The engine's experts on a CPU compared with a slow loop over tokens and choices."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.kernel_tests import random

from megatron_rl.kernels.linear.reference import fprop
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight
from megatron_rl.precision.int8 import int8_matmul, quantize_int8_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from rollout_sglang.hooks import cpu_moe, dequant_cache, tree_reduction

EXPERTS, WIDTH, HIDDEN = 3, 128, 256
CHOSEN = torch.tensor([[0, 2], [2, -1], [-1, -1], [2, 0], [0, -1]])  # nobody chooses expert 1; -1 is another rank's
WEIGHTS = random(*CHOSEN.shape, seed=1).softmax(-1)
X = random(len(CHOSEN), HIDDEN, seed=2)


def slow_mixture(gate_up, down) -> torch.Tensor:
    y = torch.zeros(X.shape)
    for token, (experts, shares) in enumerate(zip(CHOSEN.tolist(), WEIGHTS, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if expert >= 0:
                both = gate_up(X[token : token + 1], expert)
                y[token] += share * down(F.silu(both[:, :WIDTH]) * both[:, WIDTH:], expert)[0]
    return y


def quantized(weight: torch.Tensor, quantize: Callable[[torch.Tensor], QuantizedWeight]) -> QuantizedWeight:
    """Return each expert's matrix quantized: data `[E, N, K]`, scales `[E, ...]`."""
    return QuantizedWeight(*map(torch.stack, zip(*map(quantize, weight), strict=True)))


@pytest.fixture(autouse=True)
def nothing_kept():
    dequant_cache.clear_cache()
    yield
    dequant_cache.clear_cache()


@pytest.fixture
def run(monkeypatch):
    """Call a replacement of SGLang's methods. SGLang's result type is a plain namespace."""
    monkeypatch.setattr(cpu_moe, "make_combine_input", lambda y: SimpleNamespace(hidden_states=y))

    def apply(function, layer: SimpleNamespace, **method: object) -> torch.Tensor:
        config = SimpleNamespace(activation="silu", is_gated=True, gemm1_alpha=None, swiglu_limit=None, num_local_experts=EXPERTS)
        config.apply_router_weight_on_input = config.no_combine = False
        chosen = SimpleNamespace(topk_weights=WEIGHTS, topk_ids=CHOSEN)
        given = SimpleNamespace(hidden_states=X, topk_output=chosen)
        return function(SimpleNamespace(moe_runner_config=config, with_bias=False, **method), layer, given).hidden_states

    return apply


@pytest.mark.parametrize("scale_format, scale_fmt", [("pow2", "ue8m0"), ("fp32", None)])
def test_fp8_experts_are_two_block_products_each(run, scale_format, scale_fmt):
    weights = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=3), random(EXPERTS, HIDDEN, WIDTH, seed=4)
    w13, w2 = (quantized(weight, partial(quantize_weight, scale_format=scale_format)) for weight in weights)
    layer = SimpleNamespace(w13_weight=w13.data, w13_weight_scale_inv=w13.scale, w2_weight=w2.data, w2_weight_scale_inv=w2.scale)
    method = {"block_quant": True, "weight_block_size": [128, 128], "quant_config": SimpleNamespace(scale_fmt=scale_fmt)}
    y = run(cpu_moe.apply_block_fp8, layer, **method)

    def product(blocks: QuantizedWeight):
        return lambda x, expert: fprop(x, dequantize_weight(QuantizedWeight(blocks.data[expert], blocks.scale[expert])), scale_format)

    # sums of 256 float32 products in another order, of magnitude 10^2
    torch.testing.assert_close(y, slow_mixture(product(w13), product(w2)), rtol=1e-4, atol=1e-2)
    assert y.abs().mean() > 1
    assert not y[2].any()  # all its experts are elsewhere
    with pytest.raises(NotImplementedError, match=r"blocks of \[32, 32\]"):
        run(cpu_moe.apply_block_fp8, layer, **method | {"weight_block_size": [32, 32]})


def test_int8_experts_quantize_tokens_before_each_of_their_two_products(run):
    """Bitwise, since integer sums have no order."""
    w13, w2 = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=3), random(EXPERTS, HIDDEN, WIDTH, seed=4)
    (data13, scale13), (data2, scale2) = (quantized(weight, quantize_int8_weight) for weight in (w13, w2))
    assert (data13.dtype, scale13.shape, scale2.shape) == (torch.int8, (EXPERTS, 2 * WIDTH, 1), (EXPERTS, HIDDEN, 1))
    y = run(cpu_moe.apply_int8, SimpleNamespace(w13_weight=data13, w13_weight_scale=scale13, w2_weight=data2, w2_weight_scale=scale2))

    def product(data: torch.Tensor, scale: torch.Tensor):
        return lambda x, expert: int8_matmul(x, data[expert].float(), scale[expert])

    assert torch.equal(y, slow_mixture(product(data13, scale13), product(data2, scale2)))
    assert y.abs().mean() > 1 and not y[2].any()
    y = run(cpu_moe.apply_unquantized, SimpleNamespace(w13_weight=w13, w2_weight=w2))  # without quantization
    torch.testing.assert_close(y, slow_mixture(lambda x, e: x @ w13[e].t(), lambda x, e: x @ w2[e].t()), rtol=1e-4, atol=1e-2)


def unordered_choice(_, logits, bias, topk, renormalize, groups, used, *, routed_scaling_factor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what SGLang's function gives without renormalization: sigmoids of the chosen experts in any order."""
    assert (renormalize, groups, used, routed_scaling_factor) == (False, 1, 1, 2.5)
    scores = logits.sigmoid()
    experts = (scores + bias).topk(topk).indices.flip(-1)
    return scores.gather(1, experts), experts.int()


def test_weights_of_biased_routing_are_summed_best_first_and_scaled_instead_of_the_sum_of_experts():
    """Bitwise, also for a single token: the order of a sum of eight decides its last bit."""
    logits, bias = random(64, 16, seed=8), random(16, seed=9)
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(8).indices
    raw = scores.gather(1, chosen)
    expected = raw / (raw.sum(-1, keepdim=True) + 1e-20)

    def route(logits: torch.Tensor, renormalize: bool, scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        named = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": scaled}
        return cpu_moe.route_tokens_with_bias(unordered_choice, logits, logits, bias, 8, renormalize, 1, 1, **named)

    weights, experts = route(logits, True, True)
    assert torch.equal(experts, chosen.int()) and torch.equal(weights, expected * 2.5)
    assert torch.equal(route(logits[:1], True, True)[0], weights[:1])
    assert torch.equal(route(logits, True, False)[0], expected) and torch.equal(route(logits, False, False)[0], raw)
    backwards = raw / (raw.flip(-1).sum(-1, keepdim=True) + 1e-20)
    assert not torch.equal(backwards, expected)
    layer = SimpleNamespace(topk=SimpleNamespace(topk_config=SimpleNamespace(apply_routed_scaling_factor_on_output=False)))
    cpu_moe.scale_routing_weights(lambda block, factor: setattr(block, "routed_scaling_factor", factor), layer, 2.5)
    assert layer.routed_scaling_factor == 1.0 and layer.topk.topk_config.apply_routed_scaling_factor_on_output


def test_values_are_kept_up_to_a_limit_and_forgotten(monkeypatch):
    """Changed bytes are seen only after `clear_cache`, unless they did not fit."""
    first, second = (quantize_weight(random(128, 128, seed=seed), "pow2") for seed in (5, 6))

    def get(blocks: QuantizedWeight) -> torch.Tensor:
        return dequant_cache.get_float_weight(blocks.data, lambda: dequantize_weight(blocks))

    monkeypatch.setattr(dequant_cache, "MAX_CACHED_BYTES", first.data.numel() * 4)
    cached, too_large = get(first), get(second)
    torch.testing.assert_close(cached, dequantize_weight(first), rtol=0, atol=0)
    assert get(first) is cached
    assert get(second) is not too_large
    dequant_cache.clear_cache()
    assert get(second) is get(second)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_by_the_tree_the_first_rank_returns_the_sum_of_all(monkeypatch, tp_rank):
    """Outputs are rounded when the parts of ranks are added, when they are weighted, and when the ranks' sums of experts are added. All
    other ranks have the same numbers as this one."""
    added = []

    def add(partial: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
        added.append((group, partial.dtype, len(partial)))
        return (partial * group).to(dtype)

    ranks = SimpleNamespace(moe_tp_group=2, moe_ep_group=4, tp_group=SimpleNamespace(rank_in_group=tp_rank))
    monkeypatch.setattr(cpu_moe, "get_ranks", lambda: ranks)
    monkeypatch.setattr(tree_reduction, "add_over_ranks", add)
    x, experts = X.bfloat16(), torch.tensor([[3, 0, 2], [1, -1, 3], [-1, -1, -1], [2, 1, 0], [0, 3, -1]])
    weights = random(*experts.shape, seed=7).softmax(-1)

    def down(rows: torch.Tensor, expert: int) -> torch.Tensor:
        return rows.float() * (expert + 1.1)

    y = cpu_moe.run_experts(x, weights, experts, lambda rows, _: rows.repeat(1, 2), down, 4, True)
    assert y.dtype == torch.bfloat16 and added == [(2, torch.float32, 10), (4, torch.float32, 5)]
    if tp_rank:
        assert not y.any()
        return
    outputs = torch.zeros(4, *x.shape)
    for token, choice in (experts >= 0).nonzero().tolist():
        expert = experts[token, choice]
        output = (2 * down(F.silu(x[token]) * x[token], expert)).bfloat16()
        outputs[expert, token] = (output.float() * weights[token, choice]).bfloat16().float()
    assert torch.equal(y, (4 * ((outputs[0] + outputs[1]) + (outputs[2] + outputs[3]))).bfloat16())


def test_weighted_outputs_are_rounded_before_they_are_summed():
    """In BF16, as the trainer's experts do. The sum of unrounded outputs is different."""
    x, ones = X.bfloat16(), torch.tensor([[0, 1, 2]]).expand(len(X), -1)
    weights = random(len(X), 3, seed=7).softmax(-1)
    outputs = [x * (expert + 1) for expert in range(3)]
    y = cpu_moe.run_experts(x, weights, ones, lambda rows, _: rows.repeat(1, 2), lambda _, expert: outputs[expert], 3, False)
    rounded = [(output.float() * weights[:, e, None]).bfloat16() for e, output in enumerate(outputs)]
    assert torch.equal(y, sum(part.float() for part in rounded).bfloat16())
    assert not torch.equal(y, sum(output.float() * weights[:, e, None] for e, output in enumerate(outputs)).bfloat16())
