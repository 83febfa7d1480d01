"""FlashAttention 3 of SGLang's sgl-kernel on Hopper, which trainer and engine share with `precision.reduction = "ranks"`.

By reading of FlashAttention's `hopper/` (nothing was run), a row's bits do not depend on its batch: with one split, blocks of 128 keys
begin at multiples of 128 and are added from the last to the first by 64-row instructions. A block that is masked for a row multiplies its
sums by 1 and adds 0. For one query, the kernel drops the causal mask and takes other blocks, unless heads are 128 wide and keys are paged,
so both sides announce at least `MIN_QUERIES`. The backward pass is FlashAttention 2's of torch, from the output and log-sum-exp of this
kernel.
"""

from typing import Any

import torch

from megatron_rl.errors import RunError
from megatron_rl.kernels.attention.gradients import differentiate_by_flash_attention
from megatron_rl.kernels.attention.requirements import HEAD_WIDTHS

KERNEL = "sgl_kernel.flash_attn"
ORDER = "one split, blocks of 128 keys descending from multiples of 128, causal"
MIN_QUERIES = 2


def check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise RunError for heads whose bits are not known to agree between packed sequences, chunks, and decoded tokens."""
    widths = {x.shape[-1] for x in (query, key, value)}
    if not widths <= {*HEAD_WIDTHS} or not query.dtype == key.dtype == value.dtype == torch.bfloat16:
        found = f"{query.dtype}, keys {key.dtype}, heads of {' and '.join(map(str, sorted(widths)))}"
        raise RunError(f"FlashAttention 3 with the same bits in trainer and engine needs bfloat16 and heads of {HEAD_WIDTHS}, not {found}")


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Return the attention of packed sequences, with gradient; arguments as in `reference.flash_attention`. Raise RunError for heads that
    `check_heads` refuses."""
    check_heads(query, key, value)
    return _FlashAttention3.apply(query, key, value, starts, longest, query.shape[-1] ** -0.5 if scale is None else scale)


class _FlashAttention3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        most, options = max(longest, MIN_QUERIES), {"softmax_scale": scale, "causal": True, "num_splits": 1, "return_softmax_lse": True}
        output, log_sums, *_ = flash_attn_varlen_func(query, key, value, starts, starts, most, most, **options)
        ctx.save_for_backward(query, key, value, output, log_sums, starts)
        ctx.longest, ctx.scale = longest, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, starts = ctx.saved_tensors
        found = differentiate_by_flash_attention(gradient, saved, starts, ctx.longest, ctx.scale)
        return *found, None, None, None
