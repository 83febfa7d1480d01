"""Activation quantization of the engine on an NVIDIA GPU, with the contract's quantizer instead of SGLang's, which computes other scales.

SGLang's kernels compute FP32 scales by a different formula than the trainer, and powers of two only where DeepGEMM runs a dense layer. On
Hopper, all block-FP8 layers of a release in `registry.KNOWN_VERSIONS` call one of three functions, which are replaced here
(`dispatch_block_linear` chooses the layout of their scales):

    fp8_kernel._run_per_token_group_quant_8bit_kernel   dense layers in Triton, DeepGEMM and CUTLASS; experts in Triton
    fp8_kernel.sglang_per_token_quant_fp8               the same for inputs with 128 features, whose one group is the whole token
    per_token_group_quant.per_token_group_quant         experts in Triton, if their second layer loads its input by TMA

On Blackwell, the first writes the packed scales that DeepGEMM reads there (`precision.ue8m0`).

Other calls (SwiGLU in the same kernel, other groups) raise. A layer that calls another quantizer is refused before a run
samples: `read_linear_scale_format` and `read_expert_scale_format` detect it from the live layer's code.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from parallel.formats import BLOCK

SCALE_FORMAT_VARIABLE = "MEGATRON_RL_SCALE_FORMAT"  # environment variable of the engine's processes with `precision.scale_format`
DENSE_FUNCTIONS = (
    "triton_w8a8_block_fp8_linear",
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "cutlass_w8a8_block_fp8_linear_with_fallback",
)
"""Functions of SGLang's fp8_utils that quantize only with the functions named above."""
_DENSE_MODULE = "sglang.srt.layers.quantization.fp8_utils"


@functools.cache
def get_scale_format() -> str:
    """Return the scale format of this process's quantizer, "pow2" or "fp32". Raise RuntimeError if the engine was started without one."""
    scale_format = os.environ.get(SCALE_FORMAT_VARIABLE)
    if scale_format not in ("pow2", "fp32"):
        raise RuntimeError(f"{SCALE_FORMAT_VARIABLE} is {scale_format!r}: an engine that quantizes activations needs pow2 or fp32")
    return scale_format


@torch.library.custom_op("megatron_rl::quantize_activation", mutates_args=("data", "scale"))
def quantize(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Write Q_1x128(x `[T, K]`) into `data` `[T, K]` and `scale` float32 `[T, K / 128]`; an operator into which torch.compile does not
    trace."""
    scale_format = get_scale_format()
    from megatron_rl.kernels.quantize.triton import quantize_into

    quantize_into(x, data, scale, scale_format)


def run_group_quantizer(
    x: torch.Tensor,
    x_q: torch.Tensor,
    x_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    *,
    scale_ue8m0: bool,
    fuse_silu_and_mul: bool,
    masked_m: torch.Tensor | None,
) -> None:
    """Replace `_run_per_token_group_quant_8bit_kernel`. SGLang does not set `scale_ue8m0` for all layers, so it may be False for pow2."""
    if (eps, fp8_min, fp8_max) != (AMAX_EPSILON, -E4M3_MAX, E4M3_MAX):
        raise NotImplementedError(f"blocks clamped at {eps} to {fp8_min} .. {fp8_max} are outside the precision contract")
    _check_and_quantize(x, x_q, x_s, group_size, scale_ue8m0, fuse_silu_and_mul or masked_m is not None)


def quantize_tokens(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, output_q: torch.Tensor | None = None, output_s: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `sglang_per_token_quant_fp8`, which SGLang calls if one group is a whole token."""
    data = torch.empty_like(x, dtype=dtype) if output_q is None else output_q
    scale = x.new_empty(len(x), 1, dtype=torch.float32) if output_s is None else output_s
    return _check_and_quantize(x, data, scale, x.shape[-1], False, False)


def quantize_groups(
    input: torch.Tensor,
    output_q: torch.Tensor | None = None,
    output_s: torch.Tensor | None = None,
    group_size: int = BLOCK,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: torch.Tensor | None = None,
    expected_m: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    sorted_token_ids: torch.Tensor | None = None,
    num_tokens_post_padded: torch.Tensor | None = None,
    num_valid_tokens: int = 0,
    silu_and_mul_mode: str = "legacy",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `per_token_group_quant`. Also quantizes padding rows, which SGLang's kernel may skip."""
    tokens, width = input.shape[0], input.shape[-1]
    data = torch.empty_like(input, dtype=out_dtype or torch.float8_e4m3fn) if output_q is None else output_q
    if output_s is not None:
        scale = output_s
    elif column_major_scales:  # T contiguous, with its stride padded to the 16 bytes that TMA needs
        scale = input.new_empty(width // BLOCK, -(-tokens // 4) * 4, dtype=torch.float32).t()[:tokens]
    else:
        scale = input.new_empty(tokens, width // BLOCK, dtype=torch.float32)
    return _check_and_quantize(input, data, scale, group_size, scale_ue8m0, fuse_silu_and_mul or masked_m is not None)


def dispatch_block_linear(
    original: Callable[..., Callable[..., torch.Tensor]], weight_block_size: list[int] | None = None, act_scale_ue8m0: bool = False
) -> Callable[..., torch.Tensor]:
    """Wrap `dispatch_w8a8_block_fp8_linear`: hide `act_scale_ue8m0` from SGLang, which would lay out such scales by rows on Hopper, so that
    DeepGEMM transposes them before every product. Their values are the contract's either way."""
    _check_scale_format(act_scale_ue8m0)
    return original(weight_block_size, False)


def _check_and_quantize(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, group: int, ue8m0: bool, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize and return (data, scale). Raise NotImplementedError for a quantization outside the precision contract."""
    if group != BLOCK or x.dim() != 2 or data.dtype != torch.float8_e4m3fn:
        raise NotImplementedError(f"{list(x.shape)} in {data.dtype} groups of {group} is outside the precision contract")
    if fused or (scale.dtype != torch.float32 and not ue8m0):
        raise NotImplementedError("SwiGLU and quantization in one kernel is outside the precision contract")
    _check_scale_format(ue8m0)
    quantize(x, data, scale)
    return data, scale


def _check_scale_format(ue8m0: bool) -> None:
    """Raise NotImplementedError if the checkpoint asks for other scales than the contract."""
    if ue8m0 and get_scale_format() != "pow2":
        raise NotImplementedError(f"the checkpoint asks for power-of-two scales, but precision.scale_format is {get_scale_format()}")


def read_linear_scale_format(method: Any, layer: Any) -> str:
    """Return the scale format ("pow2" or "fp32") with which a live layer with this `Fp8LinearMethod` quantizes its input. If the
    quantizer is not the contract's, return a description of the quantizer that runs instead."""
    function = method.w8a8_block_fp8_linear
    if not torch.cuda.is_available():
        return "pow2" if getattr(function, "keywords", {}).get("act_scale_ue8m0", False) else "fp32"  # cpu_kernels.apply_block_fp8_linear
    kernel = getattr(function, "func", function)
    if method.use_marlin or method.use_mxfp8 or method.block_fp8_as_mxfp8:
        return "Marlin's or MXFP8's"
    if kernel.__module__ != _DENSE_MODULE or kernel.__name__ not in DENSE_FUNCTIONS:
        return f"{kernel.__name__}'s"
    return _read_scale_format(layer.weight_scale_inv)


def read_expert_scale_format(method: Any, layer: Any) -> str:
    """Return the scale format of a live layer of experts with this `Fp8MoEMethod`, see `read_linear_scale_format`."""
    if not torch.cuda.is_available():
        return "pow2" if method.quant_config.scale_fmt == "ue8m0" else "fp32"  # cpu_moe.apply_block_fp8
    backend = method.get_moe_runner_backend(layer)
    if backend is None or not backend.is_triton():
        return f"the expert runner {getattr(backend, 'value', backend)}'s"
    return _read_scale_format(layer.w13_weight_scale_inv, layer.w2_weight_scale_inv)


def _read_scale_format(*scales: torch.Tensor) -> str:
    """Return `get_scale_format()`, or a description of the quantizer that SGLang calls on GPUs other than Hopper."""
    if torch.version.hip is not None:
        return "an AMD GPU's"
    if any(scale.dtype != torch.float32 or getattr(scale, "format_ue8m0", False) for scale in scales):
        return "packed ue8m0 (its weights were requantized)"
    return get_scale_format()
