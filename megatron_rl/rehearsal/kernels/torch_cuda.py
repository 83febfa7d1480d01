"""torch operators that are one kernel on CUDA, but several operators in a CPU build."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.rehearsal.kernels import count, require


class _FusedRmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm`, which keeps its input and one FP32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        on = x.device if weight is None else weight.device
        require(on == x.device, "rms_norm", f"input on {x.device}, weight on {on}")
        ctx.save_for_backward(x, weight, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        count("other", 0, gradient, x, x, kernel="norm")
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def install() -> None:
    plain: Any = F.rms_norm

    def rms_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        if not input.is_cuda:
            return plain(input, normalized_shape, weight, eps)
        output: torch.Tensor = _FusedRmsNorm.apply(input, weight)
        count("other", 0, input, output, kernel="norm")
        return output

    F.rms_norm = rms_norm
