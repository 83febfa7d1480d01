"""The Triton kernel that computes what all columns of the recurrence read: normalized queries and keys, decays, and betas."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.gated_delta import NORM_EPS, DeltaHeads, DeltaWeights


class Prepared(NamedTuple):
    """Inputs of the recurrence, float32, as `scan.Inputs`, but with one query and key for the value heads of a key head."""

    q: torch.Tensor  # [t, k, k_dim]
    k: torch.Tensor  # [t, k, k_dim]
    decay: torch.Tensor  # [t, v]
    beta: torch.Tensor  # [t, v]


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def load_gates(a, b, a_log, dt_bias, a_place, b_place, head, inside):
    """Return (rate, softplus, its input, decay, beta) of tokens and a head."""
    total = tl.load(a + a_place, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    rate, grown = tl.exp(tl.load(a_log + head).to(tl.float32)), _softplus(total)
    beta = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(b + b_place, mask=inside, other=0.0).to(tl.float32)))
    return rate, grown, total, tl.exp(-(rate * grown)), beta


@triton.jit
def _normalize(x, result, factor, K_DIM: tl.constexpr, K_TILE: tl.constexpr, EPS: tl.constexpr):
    """Write factor times a query or key, divided by sqrt(sum of squares + EPS)."""
    row = tl.arange(0, K_TILE)
    values = tl.load(x + row, mask=row < K_DIM, other=0.0).to(tl.float32)
    norm = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=0) + EPS))
    tl.store(result + row, values * norm * factor, mask=row < K_DIM)


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def prepare_token(
    x, a, b, a_log, dt_bias, q, k, decays, betas, a_stride, b_stride, SCALE: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One program for a key head of a token and its value heads. Tokens of a and b are `a_stride` and `b_stride` apart."""
    token, k_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own, result = x + token * (2 * K_HEADS * K_DIM + V_HEADS * V_DIM) + k_head * K_DIM, (token * K_HEADS + k_head) * K_DIM
    _normalize(own, q + result, SCALE, K_DIM, K_TILE, EPS)
    _normalize(own + K_HEADS * K_DIM, k + result, 1.0, K_DIM, K_TILE, EPS)
    for share in tl.static_range(V_HEADS // K_HEADS):
        head = k_head * (V_HEADS // K_HEADS) + share
        _, _, _, decay, beta = load_gates(a, b, a_log, dt_bias, token * a_stride + head, token * b_stride + head, head, True)
        tl.store(decays + token * V_HEADS + head, decay)
        tl.store(betas + token * V_HEADS + head, beta)


def prepare(weights: DeltaWeights, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Prepared:
    """Return the inputs of the recurrence for the convolution's result `[t, c]`. Tokens of a and b may be columns of wider tensors."""
    heads, sizes = weights.heads, ((len(x), weights.heads.k, weights.heads.k_dim), (len(x), weights.heads.v))
    result = Prepared(*(torch.empty(sizes[number // 2], device=x.device) for number in range(4)))
    prepare_token[(len(x), heads.k)](
        x, a, b, weights.a_log, weights.dt_bias, *result, a.stride(0), b.stride(0), SCALE=heads.k_dim**-0.5, EPS=NORM_EPS,
        **name_sizes(heads), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return result


def name_sizes(heads: DeltaHeads) -> dict[str, Any]:
    """Return compile-time constants that all kernels of the recurrence share."""
    sizes = {"K_HEADS": heads.k, "V_HEADS": heads.v, "K_DIM": heads.k_dim, "V_DIM": heads.v_dim}
    return {**sizes, "K_TILE": triton.next_power_of_2(heads.k_dim)}
