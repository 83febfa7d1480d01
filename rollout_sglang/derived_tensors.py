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
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.digest import Hash, as_byte_matrix, flat_bytes
from rollout_sglang.hooks import blackwell, dequant_cache, tree_reduction

CONSTANTS: dict[str, str] = {
    "*cos_sin_cache": "rotary embedding",
    "*.inv_freq": "rotary embedding",
    "*.[kv]_scale": "SGLang's own scale of an FP8 KV cache, which is 1 (`hooks.e4m3_cache`)",
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
COPIES_BYTES = 64 << 20
"""Bytes of float values that are recomputed after each sync. Recomputing all of a large model would take longer than the sync."""
_SEARCHED_PACKAGES = ("sglang.", "rollout_sglang.", "megatron_rl.", "parallel.", "types.", "__main__.")  # `types` has SimpleNamespace


def _absorbed(part: int, attention: Any) -> torch.Tensor:
    """Return `w_kc` (part 0) or `w_vc` (part 1): MLA's kv_b_proj `[heads, head width, latent]` in the dtype that multiplies with it. With
    DeepGEMM's products they hold FP8 bytes, with scales in `w_scale_k` and `w_scale_v`."""
    layer, deep_gemm = attention.kv_b_proj, getattr(attention, "use_deep_gemm_bmm", False)
    weight = layer.weight.detach()
    if weight.dtype == torch.float8_e4m3fn and not deep_gemm:
        weight = dequantize_weight(QuantizedWeight(weight, layer.weight_scale_inv.detach())).to(attention.w_kc.dtype)
    elif weight.dtype == torch.int8 and not deep_gemm:  # as in SGLang's `post_load_weights`
        weight = weight.to(torch.bfloat16) * layer.weight_scale.detach().to(torch.bfloat16)
    tensor = _take_part(part, weight, attention.qk_nope_head_dim, attention.v_head_dim)
    return tensor.transpose(1, 2) if bool(part) != deep_gemm else tensor


def _absorbed_scale(part: int, attention: Any) -> torch.Tensor:
    scale = attention.kv_b_proj.weight_scale_inv.detach()
    tensor = _take_part(part, scale, attention.qk_nope_head_dim // 128, attention.v_head_dim // 128)
    return tensor if part else tensor.transpose(1, 2)


def _take_part(part: int, rows: torch.Tensor, keys: int, values: int) -> torch.Tensor:
    return rows.unflatten(0, (-1, keys + values)).split([keys, values], dim=1)[part]


def refresh(model: torch.nn.Module) -> None:
    """Recompute the derived tensors that SGLang recomputes only when it loads a checkpoint."""
    for module in model.modules():
        if (recompute := getattr(module, "refresh_gemma_weight", None)) is not None:
            recompute()
    blackwell.refresh(model)
    tree_reduction.keep_cut_scales(model)


DERIVED: dict[str, Callable[[Any], torch.Tensor]] = {
    "*.gemma_weight": lambda norm: 1.0 + norm.weight.detach(),
    "*.w_kc": partial(_absorbed, 0),
    "*.w_vc": partial(_absorbed, 1),
    "*.w_scale_k": partial(_absorbed_scale, 0),
    "*.w_scale_v": partial(_absorbed_scale, 1),
    f"*.weight_scale_inv.{blackwell.PACKED}": blackwell.repack,
    f"*.weight_scale_inv.{tree_reduction.CUT}": tree_reduction.cut_scales,
}
"""Pattern of a path -> function that recomputes the tensor from the module that holds it."""


class ServedTensors:
    """Record of one rank's tensors, made when the engine is up and before its first sync."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = list(find_tensors(model))
        self._addresses = {each.path: each.tensor.data_ptr() for each in found}
        self._constants = {each.path: _fingerprint(each.tensor) for each in found if _matches(each.path, CONSTANTS)}

    def check(self, model: torch.nn.Module, proved: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the number of tensors of each kind. Raise ValueError, by name, for the first tensor that fails its check. `proved`: the
        live tensors whose bytes the sync has proved."""
        spans, counts = (
            _join_spans(_span(tensor) for tensor in proved.values() if tensor.numel()),
            {"proved": 0, "derived": 0, "constant": 0},
        )
        for found in find_tensors(model):
            if not found.tensor.numel() or _matches(found.path, SCRATCH):
                continue
            if self._addresses.setdefault(found.path, found.tensor.data_ptr()) != found.tensor.data_ptr():
                raise ValueError(f"{found.path} has moved in memory since the engine started: CUDA graphs read its old address")
            if _is_within(spans, found.tensor):
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
        counts["derived"] += dequant_cache.check_cache(partial(_is_within, spans))  # none, unless some outlived the sync
        return counts

    def check_copies(self, proved: Mapping[str, torch.Tensor]) -> int:
        """Recompute float values that layers on a CPU have kept since the sync, `COPIES_BYTES` of them in turn, and return the number of
        their weights. Raise ValueError as `check` does."""
        spans = sorted(_span(tensor) for tensor in proved.values() if tensor.numel())
        return dequant_cache.check_cache(partial(_is_within, spans), COPIES_BYTES)


def find_unknown(model: torch.nn.Module, filled: Iterable[torch.Tensor]) -> list[str]:
    """Describe the tensors that `ServedTensors.check` would refuse as unknown, even without memory. `filled`: tensors that a sync fills."""
    storages = {tensor.untyped_storage()._cdata for tensor in filled}
    return [
        _describe(found)
        for found in find_tensors(model)
        if found.tensor.numel()
        and found.tensor.untyped_storage()._cdata not in storages
        and not any(_matches(found.path, rules) for rules in (SCRATCH, DERIVED, CONSTANTS))
    ]


def find_stale(model: torch.nn.Module) -> dict[str, str]:
    """Return the derived tensors, and the weights' float copies, that differ from those derived anew from the live weights, by name with a
    description."""
    stale = {}
    for found in find_tensors(model):
        if (derive := _matches(found.path, DERIVED)) and (differing := int((found.tensor.detach() != derive(found.owner)).sum())):
            stale[found.path] = f"{differing} of its {found.tensor.numel()} values are not those derived from the live weights"
    spans = [(name, *_span(weight)) for name, weight in model.named_parameters()]
    for data, differing, size in dequant_cache.find_stale():
        name = next((name for name, first, end in spans if first <= data.data_ptr() < end), "an unknown weight")
        stale[name] = f"{differing} of the {size} values of its float copy are not those of its bytes"
    return stale


def _join_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return memory ranges, sorted, with those joined that follow each other: a tensor may be made up of several proved tensors."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            first, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((first, end))
    return joined


def _is_within(spans: Sequence[tuple[int, int]], tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies completely within one of the sorted memory ranges."""
    first, end = _span(tensor)
    place = bisect.bisect_right(spans, (first, float("inf"))) - 1
    return place >= 0 and spans[place][0] <= first and end <= spans[place][1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
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
        count = f"{int(wrong.sum())} of its {actual.numel()} values"
        raise ValueError(f"{found.path} is stale: {count} differ from those computed from the proved bytes")


def _fingerprint(tensor: torch.Tensor) -> str:
    values = Hash()
    values.update(as_byte_matrix(flat_bytes(tensor).view(1, -1)))
    return f"{tensor.dtype} {list(tensor.shape)} {values.hexdigest()}"


class FoundTensor(NamedTuple):
    path: str  # first path that leads to the tensor, such as `model.layers.0.self_attn.w_kc`
    tensor: torch.Tensor
    owner: torch.nn.Module  # the module that holds the tensor


def find_tensors(model: torch.nn.Module) -> Iterator[FoundTensor]:
    """Yield every tensor that a live model can compute with, once: parameters, buffers, plain attributes, and the contents of quantization
    methods, other engine objects, tensors, containers, partial functions and closures."""
    seen: set[int] = set()
    keep: list[Any] = []  # so that no id is reused
    pending: list[tuple[str, Any, torch.nn.Module]] = [("", model, model)]
    while pending:
        path, value, owner = pending.pop()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, torch.Tensor):
            yield FoundTensor(path, value, owner)
        owner = value if isinstance(value, torch.nn.Module) else owner
        children = [(f"{path}.{name}".removeprefix("."), child, owner) for name, child in _list_children(value)]
        pending.extend(reversed(children))


def _list_children(value: Any) -> list[tuple[str, Any]]:
    """Return the contents of an object by name."""
    if isinstance(value, torch.nn.Module):
        own = {name: child for name, child in vars(value).items() if name not in ("_parameters", "_buffers", "_modules")}
        return list({**value._parameters, **value._buffers, **value._modules, **own}.items())
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *((str(index), child) for index, child in enumerate(value.args)), *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]  # not empty
    if isinstance(value, torch.Tensor) or f"{type(value).__module__}.".startswith(_SEARCHED_PACKAGES):
        return [*getattr(value, "__dict__", {}).items(), *_list_slots(value)]
    return []


def _list_slots(value: Any) -> list[tuple[str, Any]]:
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__ if not isinstance(value, torch.Tensor)]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
