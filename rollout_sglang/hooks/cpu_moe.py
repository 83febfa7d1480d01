"""Mixture of experts on a CPU, replacing SGLang's Triton kernels and its CPU path, which has no expert parallelism:

    y = sum over the chosen experts e of  p_e * (silu(x G_e^T) * (x U_e^T)) D_e^T

w13 `[E, 2I, H]` holds [G ; U] of every expert of this rank, w2 `[E, H, I]` holds D. An expert's output is rounded to x's dtype, weighted
and rounded again, as in SGLang's GPU kernels and in Megatron. Tokens are quantized before w13 and again before w2.

With `precision.reduction = "tree"`, ranks that shard an expert (SGLang's moe_tp) first add their float32 parts of its output, then ranks
that share the experts (moe_ep) add their float32 sums, both by the trainer's trees. SGLang all-reduces later, so the first rank returns the
sum and all other ranks return zeros. Otherwise each rank adds its experts in ascending order in float32 and rounds once, and SGLang's
all-reduce adds up over ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import InvariantRouting
from megatron_rl.kernels.experts.expert_sum import sum_experts
from megatron_rl.kernels.swiglu.clamped import ALPHA, clamped_swiglu
from megatron_rl.precision import int8
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK
from rollout_sglang.hooks import adapters, gpu_activation_quant, tree_reduction
from rollout_sglang.hooks.adapters import ExpertLinear
from rollout_sglang.hooks.cpu_kernels import multiply_block_fp8, multiply_plain
from rollout_sglang.hooks.dequant_cache import get_float_weight


def _silu_and_multiply(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    num_experts: int,
    tree: bool,
    up: ExpertLinear | None = None,
    activate: Callable[[torch.Tensor], torch.Tensor] = _silu_and_multiply,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the tensor that SGLang adds up over ranks, `[T, H]` in the dtype of x `[T, H]`: this rank's part, or with `tree` the whole sum
    on the first rank. `weights`: float32 `[T, k]`. `experts`: chosen experts `[T, k]` in this rank's numbering, or -1 for another rank's
    expert. With `tree`, `down` returns float32 partial sums, beside which those of its adapters lie for `up`
    (`hooks.adapters.adapt_partial_sums`). `bias` `[E, H]` is added to the experts' outputs."""
    chosen, choice = experts.flatten().long().sort(stable=True)
    chosen, choice = chosen[chosen >= 0], choice[chosen >= 0]
    tokens, counts = choice // experts.shape[1], torch.bincount(chosen, minlength=num_experts).tolist()
    parts = []
    for expert, rows in enumerate(tokens.split(counts)):
        if len(rows):
            parts.append(down(activate(gate_up(x[rows], expert)), expert))
    y = torch.cat(parts) if parts else x.new_empty(0, x.shape[1])
    ranks = get_ranks() if tree else None
    if ranks is not None:
        y = tree_reduction.add_over_ranks(y.float(), ranks.moe_tp_group, x.dtype)
    if up is not None:
        y, h = y[:, : x.shape[1]], y[:, x.shape[1] :].split(counts)
        y = y + torch.cat([y[:0], *(up(part, expert) for expert, part in enumerate(h) if len(part))])
    if bias is not None and (tree or get_ranks().moe_tp_group.rank_in_group == 0):
        y = y + bias[chosen]
    weighted = (y.float() * weights.flatten()[choice, None]).to(x.dtype)
    if ranks is None:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, tokens, weighted.float()).to(x.dtype)
    summed = sum_experts(weighted, tokens, chosen, len(x), num_experts, torch.float32)
    return tree_reduction.keep_on_first_rank(tree_reduction.add_over_ranks(summed, ranks.moe_ep_group, x.dtype), ranks.tp_group)


def route_tokens(
    original: Callable[..., Any], hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrap `fused_topk_native`; return (weights float32 `[T, k]`, experts `[T, k]`). Renormalized weights are the softmax over the
    chosen experts, as in Megatron. SGLang divides the softmax over all experts by the sum over the chosen ones."""
    bias, scoring = named.get("correction_bias"), named.get("scoring_func", "softmax")
    if renormalize and bias is not None and scoring == "sigmoid":
        with InvariantRouting():
            weights, experts = original(hidden_states, gating_output.float(), topk, False, **named)
        return sort_by_choice(weights, experts, bias, renormalize)
    if not renormalize or bias is not None or scoring != "softmax":
        return original(hidden_states, gating_output, topk, renormalize, **named)
    scores, experts = gating_output.float().topk(topk, dim=-1)
    return scores.softmax(-1), experts


def route_tokens_with_bias(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    *groups: int,
    apply_routed_scaling_factor_on_output: bool = False,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrap `biased_grouped_topk_impl`, sigmoid routing; return as `route_tokens` does. Like Megatron, add up the chosen scores in the
    order of choice, best first. SGLang leaves this order open, and with it the last bit of the weights."""
    with InvariantRouting():
        weights, experts = original(hidden_states, gating_output, correction_bias, topk, False, *groups, **named)
    weights, experts = sort_by_choice(weights, experts, correction_bias, renormalize)
    return weights * named["routed_scaling_factor"] if apply_routed_scaling_factor_on_output else weights, experts


def sort_by_choice(
    weights: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and experts `[T, k]` with the best choice first, normalized in this order."""
    order = (weights + bias[experts.long()]).argsort(-1, descending=True)
    weights, experts = weights.gather(1, order), experts.gather(1, order)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalize else weights, experts


def scale_routing_weights(original: Callable[..., Any], moe_layer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap constructors of GLM-4.5's and DeepSeek-V3's layers: scale a token's weights, as Megatron does, not the experts' rounded sum."""
    original(moe_layer, *args, **kwargs)
    moe_layer.topk.topk_config.apply_routed_scaling_factor_on_output = True
    moe_layer.routed_scaling_factor = 1.0


def apply_block_fp8(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Replace `Fp8MoEMethod.apply`."""
    if not self.block_quant or self.weight_block_size != [BLOCK, BLOCK]:
        raise NotImplementedError(f"experts in FP8 blocks of {self.weight_block_size} are outside the precision contract")
    scale_format = gpu_activation_quant.read_expert_scale_format(self, layer)

    def multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return multiply_block_fp8(x, QuantizedWeight(weight, scale), scale_format)

    return _apply_experts(self, layer, dispatch_output, multiply, "weight_scale_inv")


def apply_int8(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Replace `W8A8Int8MoEMethod.apply`: w13_weight int8 `[E, 2I, H]` with w13_weight_scale float32 `[E, 2I, 1]`, and w2 likewise."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return int8.int8_matmul(x, get_float_weight(weight, weight.float), scale)

    return _apply_experts(self, layer, dispatch_output, multiply, "weight_scale")


def apply_unquantized(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Replace `UnquantizedFusedMoEMethod.apply`."""
    return _apply_experts(self, layer, dispatch_output, multiply_plain)


def _apply_experts(method: Any, layer: Any, dispatch_output: Any, multiply: Callable[..., torch.Tensor], *parts: str) -> Any:
    """Apply experts whose products with x are `multiply(x, weight, *parts)`, such as scales."""

    def linear(name: str) -> ExpertLinear:
        tensors = [getattr(layer, f"{name}_{part}") for part in ("weight", *parts)]
        return lambda x, expert: multiply(x, *(tensor[expert] for tensor in tensors))

    gate_up, down = linear("w13"), linear("w2")
    config = method.moe_runner_config
    swiglu = config.activation == "silu" and config.is_gated and not config.apply_router_weight_on_input and not config.no_combine
    with_bias = getattr(method, "with_bias", False)  # SGLang's INT8 method lacks this attribute
    clamped, activate, of_down = config.gemm1_alpha == ALPHA and config.gemm1_clamp_limit is not None, _silu_and_multiply, None
    plain = not with_bias and config.gemm1_alpha is None
    if not swiglu or config.swiglu_limit is not None or not (plain or (clamped and with_bias)):
        raise NotImplementedError("experts other than silu(gate) * up, or those of gpt-oss, are not supported on the CPU tier")
    routing, by_tree = dispatch_output.topk_output, tree_reduction.sums_by_tree()

    def down_in_parts(x: torch.Tensor, expert: int) -> torch.Tensor:
        with tree_reduction.partial_sums():
            return down(x, expert)

    first = adapters.adapt_experts(layer, "w13", gate_up)
    if with_bias:
        first, of_down = (lambda x, expert: gate_up(x, expert) + layer.w13_weight_bias[expert]), layer.w2_weight_bias
        activate = partial(clamped_swiglu, limit=config.gemm1_clamp_limit)
    last, up = adapters.adapt_partial_sums(layer, down_in_parts) if by_tree else (adapters.adapt_experts(layer, "w2", down), None)
    x, weights = dispatch_output.hidden_states, routing.topk_weights.float()
    return make_combine_input(
        run_experts(x, weights, routing.topk_ids, first, last, config.num_local_experts, by_tree, up, activate, of_down)
    )


def get_ranks() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def make_combine_input(y: torch.Tensor) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    return StandardCombineInput(hidden_states=y)
