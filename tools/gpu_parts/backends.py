"""Which back ends this machine can try, and the values that parts compute with."""

from __future__ import annotations

import torch

from gpu_parts.found import Machine
from gpu_parts.rows import Rows

GPU_BACKENDS = {"deep_gemm": ("hopper", "triton", "nvcc", "deep_gemm"), "transformer_engine": ("hopper", "transformer-engine")}
FORMATS = ("pow2", "fp32")


def usable(machine: Machine, rows: Rows | None = None) -> list[str]:
    """The GPU back ends whose packages are here, of known versions or not: that they work is what is to be found out."""
    found = []
    for name, wants in GPU_BACKENDS.items():
        lacks = machine.lacks(wants)
        if not lacks:
            found.append(name)
        elif rows is not None:
            rows.add(f"back end {name}", f"left out, without {', '.join(lacks)}")
    return found


def ordinary(tokens: int, width: int, device: str) -> torch.Tensor:
    """bf16 [tokens, width]: normal values times 2^-6 to 2^6 by token, so that no two blocks share a scale by chance."""
    generator = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=generator)
    values *= torch.exp2(torch.randint(-6, 7, (tokens, 1), generator=generator).float())
    return values.bfloat16().to(device)


def extreme(tokens: int, width: int, device: str) -> torch.Tensor:
    """bf16 [tokens, width]: blocks of zeros, of values below 1e-4, of large ones; exact ties between two E4M3 values."""
    values = ordinary(tokens, width, "cpu").float()
    values *= torch.exp2(torch.arange(tokens).remainder(41)[:, None].float() - 24)
    values[:, ::7] = values[:, ::7].sign() * torch.exp2(values[:, ::7].abs().clamp_min(1e-30).log2().round()) * 1.0625
    values[: tokens // 8] = 0.0
    return values.bfloat16().to(device)
