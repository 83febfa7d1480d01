"""The Triton kernel of `kernels.rope.reference`."""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.rope.reference import Rotation

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}  # multiply-adds are fused only where the kernel calls `tl.fma`


@triton.jit
def rotate_token(
    x, result, cos, sin, positions, heads, token_stride, head_stride, sign, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS_TILE: tl.constexpr, PAIRS_TILE: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program per token: x [t, heads, WIDTH] of any strides but the last, `result` contiguous, tables [positions, PAIRS]."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, PAIRS_TILE)[None, :]
    source = x + token * token_stride + head * head_stride
    target = result + (token * heads + head) * WIDTH
    row = tl.load(positions + token).to(tl.int64) * PAIRS + pair
    c = tl.load(cos + row, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + row, mask=pair < PAIRS, other=0.0) * sign
    inside = (head < heads) & (pair < PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else PAIRS)
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    c, s = tl.broadcast_to(c, a.shape), tl.broadcast_to(s, a.shape)
    tl.store(target + first, tl.fma(a, c, -(b * s)).to(result.dtype.element_ty), mask=inside)
    tl.store(target + second, tl.fma(a, s, b * c).to(result.dtype.element_ty), mask=inside)
    if WIDTH > 2 * PAIRS:
        number = tl.arange(0, WIDTH_TILE)[None, :]
        others = (head < heads) & (number < WIDTH) & (number >= 2 * PAIRS)
        tl.store(target + number, tl.load(source + number, mask=others), mask=others)


def rotate(x: torch.Tensor, rotation: Rotation, sign: float) -> torch.Tensor:
    """Compute `kernels.rope.reference.rotate`; the result is contiguous. Raise ValueError if shapes do not match."""
    cos, sin, positions, interleaved = rotation
    (tokens, heads, width), pairs = x.shape, cos.shape[1]
    if positions.shape != (tokens,) or cos.shape != sin.shape or 2 * pairs > width:
        raise ValueError(f"x {list(x.shape)}, tables {list(cos.shape)} and positions {list(positions.shape)} do not match")
    x = x if x.stride(-1) == 1 else x.contiguous()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        rotate_token[(tokens,)](
            x, result, cos, sin, positions, heads, x.stride(0), x.stride(1), sign, WIDTH=width, PAIRS=pairs,
            INTERLEAVED=interleaved, HEADS_TILE=triton.next_power_of_2(heads), PAIRS_TILE=triton.next_power_of_2(pairs),
            WIDTH_TILE=triton.next_power_of_2(width), **LAUNCH,
        )  # fmt: skip
    return result
