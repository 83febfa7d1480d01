"""Part `products`: FProp, DGrad and WGrad of every back end against `emulated`, and of each against the others, bit by bit.

Against `emulated` a product may be off by the tensor core's own rounding. An instruction of Hopper aligns 32 FP8 products to the largest
and drops what lies below 2^-13 of it: 2^-8 of the sum of the terms' sizes at worst; a bf16 result is rounded once more, by 2^-8 of itself.
The same bound as in tests/gpu/test_backends.py. Whether two kernels agree to the bit is told, not asked for.
"""

from __future__ import annotations

import itertools

import torch

from gpu_parts.backends import FORMATS, ordinary, usable
from gpu_parts.differences import compare
from gpu_parts.found import Machine, find
from gpu_parts.rows import Rows, run_part
from megatron_rl.precision.backends import make_backend
from megatron_rl.precision.backends.base import Fp8Backend
from megatron_rl.precision.fp8 import Fp8Weight, quantize_1x128, quantize_weight

SHAPES = ((256, 512, 384), (1000, 1536, 2048), (4096, 4096, 7168))
"""Tokens, N, K."""
_BOUND = 2**-8
Products = dict[str, torch.Tensor]


def part(rows: Rows) -> None:
    machine = find()
    check(rows, usable(machine, rows), SHAPES, "cuda", with_sglang=_has_sglang_products(machine))


def check(rows: Rows, backends: list[str], shapes: tuple[tuple[int, int, int], ...], device: str, with_sglang: bool) -> None:
    """All products in both scale formats at every shape."""
    for scale_format, (tokens, n, k) in itertools.product(FORMATS, shapes):
        x, dy = ordinary(tokens, k, device), ordinary(tokens, n, device)
        blocks = quantize_weight(ordinary(n, k, device).float(), scale_format)
        where = f"{scale_format}, T={tokens} N={n} K={k}"
        found: dict[str, Products] = {}
        for name in backends:
            with rows.guarded(f"{name}, {where}"):
                found[name] = products(make_backend(name, scale_format), blocks, x, dy)
        if with_sglang:
            with rows.guarded(f"sglang's Triton kernel, {where}"):
                found["sglang's Triton kernel"] = {"fprop": _sglang_fprop(x, blocks, scale_format)}
        against_emulated(rows, found, blocks, x, dy, scale_format, where)
        against_each_other(rows, found, where)


def products(backend: Fp8Backend, blocks: Fp8Weight, x: torch.Tensor, dy: torch.Tensor) -> Products:
    """All three of x [T, K], dy [T, N] and a weight [N, K]."""
    weight = backend.prepare(blocks, None)
    forward, gradient = (backend.quantize(value, rows=True, columns=True) for value in (x, dy))
    return {
        "fprop": backend.fprop(forward, weight),
        "dgrad": backend.dgrad(gradient, weight),
        "wgrad": backend.wgrad(gradient, forward, None),
    }


def against_emulated(
    rows: Rows, found: dict[str, Products], blocks: Fp8Weight, x: torch.Tensor, dy: torch.Tensor, scale_format: str, where: str
) -> None:
    """A row per back end and product; `of_bound` is the largest error as a share of what is allowed at its place."""
    emulated = make_backend("emulated", scale_format)
    exact = products(emulated, blocks, x.float(), dy.float())
    positive = blocks._replace(data=blocks.data.float().abs().to(blocks.data.dtype))
    sizes = products(emulated, positive, x.float().abs(), dy.float().abs())
    for name, computed in found.items():
        for what, got in computed.items():
            bound = _BOUND * (sizes[what] + (exact[what].abs() if got.dtype == torch.bfloat16 else 0))
            share = (got.float() - exact[what]).abs().div(bound.clamp_min(1e-30)).nan_to_num(nan=torch.inf)
            worst, difference = float(share.max()), compare(got.float(), exact[what])
            told = f"within the bound, at most {worst:.3f} of it" if worst <= 1 else f"{worst:.3g} times the bound"
            rows.add(
                f"{name} {what} against emulated, {where}",
                f"{told}; {difference}",
                worst <= 1,
                of_bound=worst,
                relative_l2=difference.relative,
            )


def against_each_other(rows: Rows, found: dict[str, Products], where: str) -> None:
    """Whether two back ends agree to the bit: of DeepGEMM and cuBLAS, whether the engine's kernel is the trainer's."""
    for (one, of_one), (other, of_other) in itertools.combinations(found.items(), 2):
        for what in of_one.keys() & of_other.keys():
            difference = compare(of_one[what], of_other[what])
            rows.add(f"{one} {what} against {other}, {where}", str(difference), None, differ=difference.count, values=difference.total)


def _has_sglang_products(machine: Machine) -> bool:
    return machine.has("sglang") and machine.has("triton")


def _sglang_fprop(x: torch.Tensor, blocks: Fp8Weight, scale_format: str) -> torch.Tensor:
    """What the engine computes where DeepGEMM is not installed."""
    from sglang.kernels.ops.gemm.fp8_kernel import w8a8_block_fp8_matmul_triton

    data, scale = quantize_1x128(x, scale_format)
    return w8a8_block_fp8_matmul_triton(data, blocks.data, scale, blocks.scale, [128, 128], torch.bfloat16)


if __name__ == "__main__":
    run_part(part)
