"""torch's own operators that are one kernel on CUDA, and several where a CPU build alone is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.rehearsal.kernels import require

_recorder: list[Callable[[], Any]] = []


class _FusedRmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm` keeps its input and one FP32 number a row; its backward pass gives the gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        require(
            weight is None or weight.device == x.device,
            "rms_norm",
            f"input on {x.device}, weight on {weight.device if weight is not None else ''}",
        )
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        _recorder[0]().work("other", 0, gradient, x, x, kernel="norm")
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def install(recorder: Callable[[], Any]) -> None:
    _recorder[:] = [recorder]
    plain: Any = F.rms_norm

    def rms_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        if not input.is_cuda:
            return plain(input, normalized_shape, weight, eps)
        output: torch.Tensor = _FusedRmsNorm.apply(input, weight)
        _recorder[0]().work("other", 0, input, output, kernel="norm")
        return output

    F.rms_norm = rms_norm
