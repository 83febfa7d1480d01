"""What packed attention on a GPU needs of the installed packages. Imports torch only inside, because `doctor` runs without it."""

import inspect
from collections.abc import Iterable

from parallel.attention import AttentionKind, SoftmaxAttention

_ARGUMENTS = ("scale", "window_size", "enable_gqa")  # of `varlen_attn` that `kernels.attention.reference.flash_attention` passes
HEAD_WIDTHS = (128,)
"""Head widths for which, by reading, FlashAttention 3 adds keys in the same blocks in the trainer, in prefills and in decoding."""
SPLIT_WIDTHS = (64, 128, 256)
"""Head widths of `kernels.split_attention`, the kernel of this project for what FlashAttention 3 does not compute with the same bits."""
INSTALL_HINT = "install torch 2.12 or newer: bash launch/install_gpu.sh"


def choose_shared(kinds: Iterable[AttentionKind], backend: str | None) -> str:
    """Return the attention of trainer and engine on a GPU with `precision.reduction = "ranks"`, by SGLang's name of the backend: `backend`
    (`rollout.sglang.attention_backend`) if it is given; otherwise "fa3", FlashAttention 3, for models with only heads that it computes with
    the same bits, without sinks or windows; and "triton" for others, which means `kernels.split_attention`."""
    exact = all(type(kind) is SoftmaxAttention and kind.head_dim in HEAD_WIDTHS for kind in kinds)
    return backend or ("fa3" if exact else "triton")


def takes_splits(width: int, window: int) -> bool:
    """Return whether `kernels.split_attention` takes heads of this width. With 256 numbers, a window would not leave enough registers."""
    return width in SPLIT_WIDTHS and not (window and width > 128)


def find_attention_problem() -> str:
    """Return what keeps the installed torch from computing packed attention in BF16 on a GPU, or "" if nothing does."""
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    accepted = inspect.signature(varlen_attn).parameters
    lacking = [name for name in _ARGUMENTS if name not in accepted]
    return f"varlen_attn of torch {torch.__version__} does not accept {', '.join(lacking)}" if lacking else ""
