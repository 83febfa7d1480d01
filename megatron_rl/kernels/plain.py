"""BF16 products on a GPU whose rows have the same bits among any number of rows: DeepGEMM's `bf16_gemm_nt` in its deterministic mode.

Without that mode, DeepGEMM passes the product to cuBLASLt, whose algorithm follows the number of rows. A release that cannot be asked for
the mode is refused; sgl-deep-gemm 0.2.3 has it. The kernel adds blocks of 64 terms one after another with wgmma, 64 rows at a time. It
was never run on a GPU by this project.
"""

from __future__ import annotations

import torch

from megatron_rl.errors import RunError

ORDER = "DeepGEMM, deterministic: blocks of 64 of K in order, rounded once"
_ATOM = 8  # BF16 numbers in the 16 bytes in which the tensor memory accelerator counts strides
_shared = False


def share_products() -> None:
    """Make the products of this process those that trainer and engine share, if `precision.reduction = "ranks"` runs on a GPU. Raise
    RunError if DeepGEMM does not keep its deterministic mode."""
    import deep_gemm

    global _shared
    if hasattr(deep_gemm, "use_deterministic_algorithms"):
        deep_gemm.use_deterministic_algorithms(True)
    check_mode()
    _shared = True


def check_mode() -> None:
    """Raise RunError if DeepGEMM multiplies, or may multiply, in an order that follows the number of rows."""
    import deep_gemm

    if not hasattr(deep_gemm, "get_deterministic_algorithms"):
        raise RunError("deep_gemm has no deterministic mode, so its order of sums is not known; install sgl-deep-gemm 0.2.3 or newer")
    if not deep_gemm.get_deterministic_algorithms():
        raise RunError("deep_gemm is not in its deterministic mode, so its order of sums depends on the number of rows")


def is_shared() -> bool:
    """Return whether the products of this process are shared with the other side."""
    return _shared


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a product of x `[..., K]` and weight `[N, K]` is shared with the other side."""
    return _shared and x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x . W^T, BF16 `[..., N]`, without gradient. x `[..., K]` and weight `[N, K]` are BF16, K is a multiple of 8."""
    import deep_gemm

    rows = align(x.reshape(-1, x.shape[-1]))
    columns = len(weight)
    result = rows.new_empty(len(rows), -(-columns // _ATOM) * _ATOM)[:, :columns]
    if len(rows):
        deep_gemm.bf16_gemm_nt(rows, align(weight), result)
    return result.contiguous().unflatten(0, x.shape[:-1])


def align(x: torch.Tensor) -> torch.Tensor:
    """Return x `[n, K]`, or a contiguous copy if the tensor memory accelerator cannot read x where it is."""
    readable = x.stride(1) == 1 and x.stride(0) % _ATOM == 0 and x.data_ptr() % (_ATOM * x.itemsize) == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)
