"""Check of every tensor that an engine rank can compute with, after a sync has proved bytes and before anything is served.

A tensor belongs to one of these kinds; any other tensor is refused by name:

    proved      it lies in memory that the sync filled and hashed
    derived     `DERIVED`: derived from proved bytes, recomputed here by the contract's formulas and compared bitwise
    constant    `CONSTANTS`: it never changes; its digest equals that of the engine's start
    scratch     `SCRATCH`: it is written before it is read, at every use

A new model family that keeps another tensor needs one line in one of these tables. No tensor may move, because a captured CUDA graph reads
the address at which it lay when it was captured.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.digest import Hash, as_byte_matrix, flat_bytes
from rollout_sglang.hooks import dequant_cache
from rollout_sglang.tensor_walk import FoundTensor, find_tensors

Derive = Callable[[Any], torch.Tensor]  # recomputes a tensor from the module that holds it


def _unfold_kv_b(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and value parts of MLA's kv_b_proj, `[heads, head width, latent]`, in the dtype that multiplies with them. INT8 as
    in SGLang's `post_load_weights`: BF16 values, each multiplied by its row's scale in BF16."""
    layer = attention.kv_b_proj
    weight = layer.weight.detach()
    if weight.dtype == torch.float8_e4m3fn:
        weight = dequantize_weight(QuantizedWeight(weight, layer.weight_scale_inv.detach())).to(attention.w_kc.dtype)
    elif weight.dtype == torch.int8:
        weight = weight.to(torch.bfloat16) * layer.weight_scale.detach().to(torch.bfloat16)
    return _split_heads(weight, attention.qk_nope_head_dim, attention.v_head_dim)


def _split_heads(rows: torch.Tensor, keys: int, values: int) -> tuple[torch.Tensor, torch.Tensor]:
    key_part, value_part = rows.unflatten(0, (-1, keys + values)).split([keys, values], dim=1)
    return key_part, value_part


def _absorbed(part: int, attention: Any) -> torch.Tensor:
    """Return `w_kc` (part 0) or `w_vc` (part 1). With DeepGEMM's products they hold FP8 bytes, with scales in `w_scale_k` and
    `w_scale_v`."""
    deep_gemm = getattr(attention, "use_deep_gemm_bmm", False)
    if deep_gemm:
        parts = _split_heads(attention.kv_b_proj.weight.detach(), attention.qk_nope_head_dim, attention.v_head_dim)
    else:
        parts = _unfold_kv_b(attention)
    return parts[part].transpose(1, 2) if bool(part) != deep_gemm else parts[part]


def _absorbed_scale(part: int, attention: Any) -> torch.Tensor:
    scale = attention.kv_b_proj.weight_scale_inv.detach()
    tensor = _split_heads(scale, attention.qk_nope_head_dim // 128, attention.v_head_dim // 128)[part]
    return tensor if part else tensor.transpose(1, 2)


DERIVED: dict[str, Derive] = {
    "*.w_kc": partial(_absorbed, 0),
    "*.w_vc": partial(_absorbed, 1),
    "*.w_scale_k": partial(_absorbed_scale, 0),
    "*.w_scale_v": partial(_absorbed_scale, 1),
}
"""Pattern of a path -> function that recomputes the tensor."""
CONSTANTS: dict[str, str] = {
    "*cos_sin_cache": "rotary embedding",
    "*.inv_freq": "rotary embedding",
    "*.[kv]_scale": "SGLang's own scale of an FP8 KV cache, which is 1 (`hooks.kv_cache_scales`)",
    "*._fused_[kv]_scale": "the same for SGLang's fused Qwen3 kernel",
    "*.expert_mask_gpu": "which experts this rank has",
    "*.local_expert_mapping": "which experts this rank has",
    "*.ab_strides[12]": "CUTLASS's experts",
    "*.c_strides[12]": "CUTLASS's experts",
    "*.active_ranks*": "of a process group",
}
"""Pattern of a path -> description of the tensor."""
SCRATCH: dict[str, str] = {
    "*.quant_method.workspace": "CUTLASS's experts",
    "*.quant_method.*_ptr*": "CUTLASS's experts",
    "*.quant_method.expert_offsets": "CUTLASS's experts",
    "*.quant_method.problem_sizes[12]": "CUTLASS's experts",
    "*.ca_comm.*": "buffers of a process group",
    "*.pynccl_comm.*": "buffers of a process group",
}
"""Pattern of a path -> description of the tensor's user."""


class ServedTensors:
    """Record of one rank's tensors, made when the engine is up and before its first sync."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = list(find_tensors(model))
        self._addresses = {each.path: each.tensor.data_ptr() for each in found}
        self._constants = {each.path: _fingerprint(each.tensor) for each in found if _matches(each.path, CONSTANTS)}

    def check(self, model: torch.nn.Module, proved: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the number of tensors of each kind. Raise ValueError, by name, for the first tensor that fails its check. `proved`: the
        live tensors whose bytes the sync has proved."""
        memory, counts = ProvedMemory(proved), {"proved": 0, "derived": 0, "constant": 0}
        for found in find_tensors(model):
            if not found.tensor.numel() or _matches(found.path, SCRATCH):
                continue
            self._check_address(found)
            if memory.holds(found.tensor):
                kind = "proved"
            elif derive := _matches(found.path, DERIVED):
                kind = "derived"
                _compare(found, derive(found.owner))
            elif _matches(found.path, CONSTANTS):
                kind, fingerprint = "constant", _fingerprint(found.tensor)
                if self._constants.setdefault(found.path, fingerprint) != fingerprint:
                    raise ValueError(f"{found.path} is a constant, but has changed since the engine started")
            else:
                raise ValueError(f"{_describe(found)} is neither filled by the sync nor known to rollout_sglang/derived_tensors.py")
            counts[kind] += 1
        counts["derived"] += dequant_cache.check_cache(memory.holds)
        return counts

    def _check_address(self, found: FoundTensor) -> None:
        if self._addresses.setdefault(found.path, found.tensor.data_ptr()) != found.tensor.data_ptr():
            raise ValueError(f"{found.path} has moved in memory since the engine started: CUDA graphs read its old address")


def find_unknown(model: torch.nn.Module, filled: Iterable[torch.Tensor]) -> list[str]:
    """Describe the tensors that `ServedTensors.check` would refuse as unknown. Works for tensors without memory. `filled`: tensors that
    a sync fills."""
    storages = {tensor.untyped_storage()._cdata for tensor in filled}
    return [
        _describe(found)
        for found in find_tensors(model)
        if found.tensor.numel()
        and found.tensor.untyped_storage()._cdata not in storages
        and not any(_matches(found.path, rules) for rules in (SCRATCH, DERIVED, CONSTANTS))
    ]


class ProvedMemory:
    """The memory ranges of proved tensors."""

    def __init__(self, proved: Mapping[str, torch.Tensor]) -> None:
        self._spans = sorted(_span(tensor) for tensor in proved.values() if tensor.numel())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies completely within one of the ranges."""
        first, end = _span(tensor)
        place = bisect.bisect_right(self._spans, (first, float("inf"))) - 1
        return place >= 0 and self._spans[place][0] <= first and end <= self._spans[place][1]


def _span(tensor: torch.Tensor) -> tuple[int, float]:
    """Return the address of a tensor's first byte, and the address after its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _describe(found: FoundTensor) -> str:
    return f"{found.path} ({str(found.tensor.dtype).removeprefix('torch.')} {list(found.tensor.shape)})"


def _matches(path: str, rules: Mapping[str, Any]) -> Any:
    """Return the value of the first matching rule, or None if no rule matches."""
    return next((value for pattern, value in rules.items() if fnmatchcase(path, pattern)), None)


def _compare(found: FoundTensor, expected: torch.Tensor) -> None:
    actual = found.tensor.detach()
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        raise ValueError(f"{found.path} is {actual.dtype} {list(actual.shape)}, recomputed {expected.dtype} {list(expected.shape)}")
    wrong = (flat_bytes(actual) != flat_bytes(expected)).view(actual.numel(), -1).any(1)
    if wrong.any():
        raise ValueError(
            f"{found.path} is stale: {int(wrong.sum())} of its {actual.numel()} values differ from those computed from the proved bytes"
        )


def _fingerprint(tensor: torch.Tensor) -> str:
    values = Hash()
    values.update(as_byte_matrix(flat_bytes(tensor).view(1, -1)))
    return f"{tensor.dtype} {list(tensor.shape)} {values.hexdigest()}"
