"""Part `quantisers`: the bytes and scales of every library's quantiser against the project's reference, bit by bit, in both scale formats.

The reference has Transformer Engine's formula. SGLang's and DeepGEMM's FP32 scales are rounded in another order, so in `fp32` they are
only told; DeepGEMM's helpers clamp a block's largest value at 1e-4, so for extreme values they are only told too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_parts.backends import FORMATS, extreme, ordinary
from gpu_parts.differences import compare
from gpu_parts.found import Machine, find
from gpu_parts.rows import Rows, run_part
from megatron_rl.precision.backends import make_backend
from megatron_rl.precision.fp8 import quantize_1x128, quantize_128x1, quantize_weight

Pair = tuple[torch.Tensor, torch.Tensor]
"""E4M3 or uint8 data, float32 scales, in the reference's shapes."""
Quantiser = Callable[[torch.Tensor, str], Pair]
VALUES = {"ordinary": ordinary, "extreme": extreme}
TOKENS, WIDTH = 1024, 2048
REFERENCES: dict[str, Quantiser] = {"1x128": quantize_1x128, "128x1": quantize_128x1, "128x128": quantize_weight}


def must_agree(library: str, scale_format: str, values: str) -> bool:
    """Whether a difference is a fault, not a known property of the library."""
    if library == "deep_gemm":
        return scale_format == "pow2" and values == "ordinary"
    return library != "sglang" or scale_format == "pow2"


def part(rows: Rows) -> None:
    machine = find()
    check(rows, quantisers(machine), "cuda")


def check(rows: Rows, found: dict[tuple[str, str], Quantiser], device: str) -> None:
    """Every quantiser, by (library, granularity), in both formats on both sorts of values."""
    for scale_format in FORMATS:
        for sort, make in VALUES.items():
            x = make(TOKENS, WIDTH, device)
            for (library, granularity), quantise in found.items():
                what = f"{library} {granularity}, {scale_format}, {sort} values"
                with rows.guarded(what):
                    wanted = REFERENCES[granularity](x.cpu(), scale_format)
                    compare_pairs(rows, what, quantise(x, scale_format), wanted, must_agree(library, scale_format, sort))


def compare_pairs(rows: Rows, what: str, got: Pair, wanted: Pair, must: bool) -> None:
    """One row: data as E4M3 bytes, scales as FP32 bits."""
    data = compare(*(pair[0].cpu().view(torch.float8_e4m3fn) for pair in (got, wanted)))
    scale = compare(got[1].cpu(), wanted[1].cpu())
    told = str(data) if data.same and scale.same else f"bytes: {data}; scales: {scale}"
    agrees = (data.same and scale.same) if must else None
    rows.add(what, told, agrees, bytes_differ=data.count, scales_differ=scale.count, values=data.total)


def quantisers(machine: Machine) -> dict[tuple[str, str], Quantiser]:
    """Those that this machine has; what they lack is told by gpu_check."""
    found: dict[tuple[str, str], Quantiser] = {("reference on the GPU", name): function for name, function in REFERENCES.items()}
    if machine.has("triton"):
        found |= {("our kernel", "1x128"): _kernel_rows, ("our kernel", "128x1"): _kernel_columns}
    if machine.has("transformer-engine"):
        found |= {("transformer_engine", name): function for name, function in TRANSFORMER_ENGINE.items()}
    if machine.has("sglang") and machine.has("triton"):
        found["sglang", "1x128"] = _sglang
    if machine.has("deep_gemm"):
        found |= {("deep_gemm", name): function for name, function in DEEP_GEMM.items()}
    return found


def _kernel_rows(x: torch.Tensor, scale_format: str) -> Pair:
    from megatron_rl.precision.backends.triton_quantize import quantize_activation

    rows, _ = quantize_activation(x, scale_format, rows=True, columns=False)
    assert rows is not None
    return rows


def _kernel_columns(x: torch.Tensor, scale_format: str) -> Pair:
    from megatron_rl.precision.backends.triton_quantize import quantize_activation

    _, columns = quantize_activation(x, scale_format, rows=False, columns=True)
    assert columns is not None
    return columns[0].view(torch.uint8).t()[: len(x)], columns[1].t()


def _te_rows(x: torch.Tensor, scale_format: str) -> Pair:
    data, scale = make_backend("transformer_engine", scale_format).quantize(x, rows=True, columns=False).rows
    return data[: len(x)], scale[:, : len(x)].t()


def _te_columns(x: torch.Tensor, scale_format: str) -> Pair:
    data, scale = make_backend("transformer_engine", scale_format).quantize(x, rows=False, columns=True).columns
    return data[:, : len(x)].t(), scale[:, : x.shape[1]]


def _te_blocks(x: torch.Tensor, scale_format: str) -> Pair:
    backend: Any = make_backend("transformer_engine", scale_format)
    held = backend._weights(x).get_metadata()  # the project itself quantises weights by the reference only
    return held["rowwise_data"], held["rowwise_scale_inv"][:, : -(-x.shape[1] // 128)]


def _sglang(x: torch.Tensor, scale_format: str) -> Pair:
    """SGLang's own kernel: in this process the engine's plug-in is not loaded."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    return sglang_per_token_group_quant_fp8(x, 128, scale_ue8m0=scale_format == "pow2")


def _deep_gemm_rows(x: torch.Tensor, scale_format: str) -> Pair:
    from deep_gemm.utils.math import per_token_cast_to_fp8

    return per_token_cast_to_fp8(x, use_ue8m0=scale_format == "pow2")


def _deep_gemm_blocks(x: torch.Tensor, scale_format: str) -> Pair:
    from deep_gemm.utils.math import per_block_cast_to_fp8

    return per_block_cast_to_fp8(x, use_ue8m0=scale_format == "pow2")


TRANSFORMER_ENGINE: dict[str, Quantiser] = {"1x128": _te_rows, "128x1": _te_columns, "128x128": _te_blocks}
DEEP_GEMM: dict[str, Quantiser] = {"1x128": _deep_gemm_rows, "128x128": _deep_gemm_blocks}

if __name__ == "__main__":
    run_part(part)
