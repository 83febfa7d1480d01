"""Hooks on what SGLang does on Blackwell only (`is_blackwell`): the engine computes with the bytes that the sync sent.

SGLang quantizes block-FP8 weights again when it loads them, because DeepGEMM reads scales in UE8M0 there. It takes the maximum of a block
from its bytes: where that has become 224 or less of 448, the block gets half the scale and other bytes, and a block whose maximum is below
1e-4 a larger scale than the contract's. The contract's scales are powers of two, so nothing needs to be quantized: `weight` and
`weight_scale_inv` stay as they are, and `PACKED`, an attribute of the scales, has the same scales in DeepGEMM's layout. It is a derived
tensor in the proof of a sync (`derived_tensors`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_rl.errors import UserError
from megatron_rl.kernels.blackwell import is_blackwell
from megatron_rl.precision.ue8m0 import pack_scales

PACKED = "packed_ue8m0"
ATTENTION = "triton"
SERVER_OPTIONS = {
    "fp8-gemm-backend": "deep_gemm",
    "moe-runner-backend": "triton",
    "attention-backend": ATTENTION,
    "bf16-gemm-backend": "torch",
}
"""SGLang's arguments on Blackwell, where its defaults are refused (`REFUSED`), or in BF16 choose a kernel by the number of tokens."""
_SHUFFLES = "shuffles the weights of experts, which a sync does not, and quantizes activations by its own formula"
_PAGES = "sets pages of {} tokens, with which the hooks on scheduling and the proof of live tokens have not been tested"
REFUSED: dict[str, dict[str, str]] = {
    "attention_backend": {
        "trtllm_mha": _PAGES.format(64),
        "trtllm_mla": _PAGES.format(64),
        "cutedsl_mla": _PAGES.format(64),
        "flashmla": _PAGES.format(64),
        "fa4": _PAGES.format(128),
        "fa3": "has no kernels for Blackwell",
    },
    "moe_runner_backend": {
        "flashinfer_trtllm": _SHUFFLES,
        "flashinfer_trtllm_routed": _SHUFFLES,
        "flashinfer_cutlass": "quantizes activations by its own formula",
        "flashinfer_cutedsl": "is for NVFP4 weights",
        "cutlass": "quantizes activations by its own formula",
        "deep_gemm": "quantizes the activations of experts and SwiGLU in one kernel of its own",
    },
    "fp8_gemm_runner_backend": {
        "flashinfer_trtllm": "reads FP32 scales that its own quantizer lays out",
        "flashinfer_cutlass": "reads FP32 scales that its own quantizer lays out",
        "flashinfer_deepgemm": "has kernels for Hopper only",
        "cutlass": "has block-scaled kernels for Hopper and SM120 only",
    },
}
"""SGLang's argument -> its values that break the contract or the proof on Blackwell, with the reason. `triton` is accepted for each
argument, `deep_gemm` for dense layers, and `flashinfer` for attention with a cache in E4M3."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for the first of SGLang's arguments (`[rollout.sglang]`) that `REFUSED` refuses on this machine's GPU."""
    for name, value in options.items() if is_blackwell() else ():
        if reason := REFUSED.get(name, {}).get(str(value)):
            raise UserError(f"rollout.sglang.{name}", value, f"{reason} (on Blackwell)", "leave it out")


def keep_bytes(
    original: Callable[..., bool],
    weight: torch.nn.Parameter,
    weight_scale: torch.nn.Parameter,
    weight_block_size: list[int] | None,
    use_deepgemm_runner: bool,
    output_dtype: torch.dtype | None = None,
    weight_shape: Any = None,
    *,
    grouped_moe: bool = False,
) -> bool:
    """Wrap `requant_block_scale_ue8m0_for_deepgemm`: add the packed scales instead of quantizing again, where SGLang would. Return False,
    as for weights that stay as they are. Raise NotImplementedError for experts in DeepGEMM, whose activations SGLang quantizes, and
    ValueError for scales that are not powers of two."""
    from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0

    layer = {"output_dtype": output_dtype, "weight_shape": weight_shape, "grouped_moe": grouped_moe}
    if not use_deepgemm_runner or not should_deepgemm_weight_requant_ue8m0(weight_block_size=weight_block_size, **layer):
        return False
    if grouped_moe:
        raise NotImplementedError(f"the expert runner deep_gemm {REFUSED['moe_runner_backend']['deep_gemm']}")
    setattr(weight_scale, PACKED, pack_scales(weight_scale.detach(), weight.shape[-2]))
    return False


def refresh(model: torch.nn.Module) -> None:
    """Pack the scales again that a sync has replaced, in place, because CUDA graphs read their address."""
    for module in model.modules():
        packed = getattr(getattr(module, "weight_scale_inv", None), PACKED, None)
        if packed is not None:
            packed.copy_(repack(module))


def repack(layer: Any) -> torch.Tensor:
    """Return the packed scales of a live layer, computed from its `weight_scale_inv`."""
    return pack_scales(layer.weight_scale_inv.detach(), layer.weight.shape[-2])


def multiply_packed(
    original: Callable[..., torch.Tensor],
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Wrap `w8a8_block_fp8_matmul_deepgemm`: multiply with the packed scales of the weight."""
    return original(A, B, As, getattr(Bs, PACKED, Bs), block_size, output_dtype)


def activate_alone(self: Any, x: torch.Tensor, act_fn: Callable[[torch.Tensor], torch.Tensor], down_proj: Any) -> torch.Tensor:
    """Replace `DenseSiluAndMulQuant.forward_decode`, which quantizes SwiGLU's result in the same kernel, by SGLang's formula."""
    return act_fn(x)


def multiply_alone(self: Any, gate_up_proj: Any, hidden_size: int) -> None:
    """Replace `DualGemm._select_mode`, which lets one kernel multiply and activate batches of up to 16 tokens in BF16. It does not round
    gates before SwiGLU, so a token's bits would depend on the batch."""
