"""Triton's kernels of SGLang and of this project: launched by their names, and refused where they are not known."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.rehearsal.device import set_value, value_of
from megatron_rl.rehearsal.kernels import RefusedKernelError, require
from rollout_sglang.rehearsal.kernels.match import HALF, INDEX, Call


class _Kernel:
    """A function with `@triton.jit`."""

    def __init__(self, function: Any) -> None:
        self.name, self.__name__ = function.__name__, function.__name__
        self.names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.fn = function

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            if self.name not in _KERNELS:
                raise RefusedKernelError(f"the Triton kernel {self.name} of {self.fn.__module__} is not known to the rehearsal")
            given = dict(zip(self.names, args, strict=False)) | options
            for name, value in given.items():
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        on = tensor.device.type
                        require(on == "cuda", f"triton {self.name}", f"{name} {list(tensor.shape)} is on the {on}")
            sizes = grid(given) if callable(grid) else grid
            fits = all(size > 0 for size in sizes) and all(size <= 65535 for size in sizes[1:])
            require(fits, f"triton {self.name}", f"the grid is {tuple(sizes)}")
            _KERNELS[self.name](given)

        return launch

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RefusedKernelError(f"the Triton function {self.name} is called on the host")


class _Constant:
    """triton.language.constexpr."""

    def __init__(self, value: Any) -> None:
        self.value = value


def install() -> None:
    triton: Any = import_module("triton")  # its stub
    triton.language.constexpr = _Constant

    triton.jit = lambda function=None, **_: _Kernel(function) if function is not None else _Kernel
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()


def _fused_decode_metadata(given: dict[str, Any]) -> None:
    call = Call("SGLang decode metadata")
    call.check("seq_lens", given["seq_lens"], "B", INDEX, "*")
    call.check("req_pool_indices", given["req_pool_indices"], "B", INDEX, "*")
    call.check("cache_seqlens_int32", given["cache_seqlens_int32"], "B", torch.int32, "*")
    call.check("req_to_token", given["req_to_token"], "* *", torch.int32, "* *")
    call.check("page_table", given["page_table"], "B *", torch.int32, "* *")
    call.moved(given["seq_lens"], given["cache_seqlens_int32"], given["cu_seqlens_k"])
    known = value_of(given["seq_lens"])
    lengths = None if known is None else (known + given["SEQ_LEN_DELTA"]).int()
    set_value(given["cache_seqlens_int32"], lengths)
    set_value(given["cu_seqlens_k"], None if lengths is None else F.pad(lengths.cumsum(0), (1, 0)).int())


def _copy_small(given: dict[str, Any]) -> None:
    """kernels/ops/memory/small_copy.py: several copies in one launch."""
    for source, destination in zip(given["sources"], given["destinations"], strict=True):
        destination.copy_(source)


def _find_positions(given: dict[str, Any]) -> None:
    call = Call("SGLang compute_position")
    call.check("positions", given["positions"], "T", torch.int64)
    call.check("extend_start_loc", given["extend_start_loc"], "B", torch.int32)
    for name in ("extend_prefix_lens", "extend_seq_lens"):
        call.check(name, given[name], "B", INDEX)
    _forget(call, given["positions"], given["extend_start_loc"])


def _write_requests(given: dict[str, Any]) -> None:
    """kernels/ops/memory/common.py: which slots of the cache the tokens of each request have."""
    call = Call("SGLang write_req_to_token_pool")
    call.check("req_to_token", given["req_to_token_ptr"], "* *", torch.int32, "* 1")
    call.check("out_cache_loc", given["out_cache_loc"], "T", INDEX)
    for name in ("req_pool_indices", "pre_lens", "seq_lens", "extend_lens"):
        call.check(name, given[name], "B", INDEX)
    call.moved(given["out_cache_loc"], given["out_cache_loc"])


def _forget(call: Call, *tensors: torch.Tensor) -> None:
    """Count tensors that a kernel fills with numbers that nobody follows."""
    call.moved(*tensors)
    for tensor in tensors:
        set_value(tensor, None)


def _embed(given: dict[str, Any]) -> None:
    call = Call("SGLang vocab_parallel_embedding")
    call.check("input_ptr", given["input_ptr"], "N", INDEX)
    call.check("weight_ptr", given["weight_ptr"], "V H", _FLOATS, "* 1")
    call.check("out_ptr", given["out_ptr"], "N H", given["weight_ptr"].dtype)
    call.moved(given["input_ptr"], given["out_ptr"], given["out_ptr"])


def _softcap(given: dict[str, Any]) -> None:
    logits, output = given["full_logits_ptr"], given.get("output_ptr")
    call = Call("SGLang softcap_inplace_logits")
    call.require(logits.dtype in _FLOATS, f"logits are {logits.dtype}")
    if given.get("CAST_TO_FP32"):
        call.require(output is not None and output.dtype == torch.float32 and output.shape == logits.shape, "its output is not float32")
    call.moved(logits, logits if output is None else output)


def _quantize_int8(given: dict[str, Any]) -> None:
    """kernels/ops/quantization/int8_kernel.py: every token has a scale."""
    call = Call("SGLang per_token_quant_int8")
    call.check("x", given["x_ptr"], "T K", _FLOATS)
    call.check("xq", given["xq_ptr"], "T K", torch.int8)
    call.check("scale", given["scale_ptr"], "T 1", _FLOATS)
    call.moved(given["x_ptr"], given["xq_ptr"], given["scale_ptr"])


def _quantize_tile(given: dict[str, Any]) -> None:
    """megatron_rl/kernels/quantize/triton.py"""
    call = Call("quantize_tile")
    call.check("x", given["x"], "T K", _FLOATS)
    outputs = []
    if given["ROWS"]:
        call.check("row_data", given["row_data"], "T K", torch.uint8)
        call.check("row_scale", given["row_scale"], f"T {-(-call.sizes['K'] // 128)}", torch.float32, "* *")
        outputs += [given["row_data"], given["row_scale"]]
    if given["COLUMNS"]:
        outputs += [given["column_data"], given["column_scale"]]
    call.moved(given["x"], *outputs)


def _join_keys(given: dict[str, Any]) -> None:
    """kernels/ops/attention/mla_qk_prep.py: each head's keys and the rotated part that all share, side by side."""
    k, nope, rope = given["k_ptr"], given["k_nope_ptr"], given["k_rope_ptr"]
    call = Call("SGLang concat_and_cast_mha_k")
    call.check("k_nope", nope, "T H N", HALF, "* * 1")
    call.check("k_rope", rope, "T 1 R", HALF, "* * 1")
    call.check("k", k, f"T H {nope.shape[-1] + rope.shape[-1]}", (*HALF, torch.float8_e4m3fn), "* * 1")
    sizes = (nope.shape[1], nope.shape[-1], rope.shape[-1])
    call.require(all(size & (size - 1) == 0 for size in sizes), f"heads and widths {sizes} are no powers of two")
    call.moved(nope, rope, k)


def _multiply_tile(given: dict[str, Any]) -> None:
    """megatron_rl/kernels/sums/triton.py"""
    x, weight = given["x"], given["weight"]
    call = Call("multiply_tile")
    kinds = (torch.uint8, torch.float8_e4m3fn) if given["SCALED"] else HALF
    call.check("x", x, "T K", kinds)
    call.check("weight", weight, "N K", kinds)
    tensors = [x, weight, given["result"]]
    if given["SCALED"]:
        tensors += [given["x_scale"], given["weight_scale"]]
    call.multiplied("fp8" if given["SCALED"] else "bf16", 2 * x.shape[0] * x.shape[1] * weight.shape[0], *tensors)


def _route(given: dict[str, Any]) -> None:
    """kernels/ops/moe/moe_fused_gate.py: scores [T, experts] to weights and experts [T, k], as routers spread tokens: evenly."""
    call = Call("SGLang router")
    call.check("scores", given["scores_ptr"], "T N", _FLOATS, "* *")
    call.check("weights", given["out_weights_ptr"], "T K", torch.float32, "* *")
    call.check("experts", given["out_indices_ptr"], "T K", torch.int32, "* *")
    if given["HAS_BIAS"] and not given["HAS_TOKEN_BIAS"]:
        call.check("bias", given["bias_ptr"], "N", _FLOATS, "*")
    call.moved(given["scores_ptr"], given["out_weights_ptr"], given["out_indices_ptr"])


def _sort_few_experts(given: dict[str, Any]) -> None:
    """kernels/ops/moe/moe_align_small_numel.py: as `sgl_kernel.moe_align_block_size`, by one block of threads."""
    call = Call("SGLang moe_align_small_numel")
    call.check("topk_ids", given["topk_ids_ptr"], "T K", INDEX)
    call.check("sorted_token_ids", given["sorted_token_ids_ptr"], "S", torch.int32)
    call.check("expert_ids", given["expert_ids_ptr"], "E", torch.int32)
    call.check("num_tokens_post_pad", given["num_tokens_post_pad_ptr"], "2" if given["WRITE_INACTIVE_PREFIX_COUNT"] else "*", torch.int32)
    rows = given["topk_ids_ptr"].numel()
    call.require(call.sizes["S"] >= rows, f"{call.sizes['S']} places for {rows} rows")
    call.moved(given["topk_ids_ptr"], given["sorted_token_ids_ptr"], given["expert_ids_ptr"])


def _gather_slots(given: dict[str, Any]) -> None:
    """kernels/ops/attention/kv_indices.py: the slots of the cache of all requests, one after the other."""
    call = Call("SGLang create_flashinfer_kv_indices")
    call.check("req_to_token", given["req_to_token_ptr"], "* *", torch.int32, "* 1")
    call.check("req_pool_indices", given["req_pool_indices_ptr"], "B", INDEX, "*")
    call.check("page_kernel_lens", given["page_kernel_lens_ptr"], "B", INDEX, "*")
    call.check("kv_indptr", given["kv_indptr"], f"{call.sizes['B'] + 1}", torch.int32, "*")
    call.check("kv_indices", given["kv_indices_ptr"], "*", torch.int32)
    call.require(
        given.get("kv_start_idx") is None and given.get("token_mapping") is None, "a window or a map is not known to the rehearsal"
    )
    known = value_of(given["page_kernel_lens_ptr"])
    moved = given["kv_indices_ptr"][: None if known is None else int(known.sum())]
    call.moved(moved, moved)


def _multiply_experts(given: dict[str, Any]) -> None:
    """kernels/ops/moe/fused_moe_triton_kernels.py: A [T, K], or [T * k, K], times B [experts, N, K] of its expert."""
    a, b, c, fp8 = given["a_ptr"], given["b_ptr"], given["c_ptr"], given["use_fp8_w8a8"]
    call = Call("SGLang fused_moe_kernel")
    for option in ("use_int8_w8a16", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SWIGLU"):
        call.require(not given.get(option), f"{option} is not known to the rehearsal")
    kind = torch.float8_e4m3fn if fp8 else torch.int8 if given["use_int8_w8a8"] else HALF
    call.check("A", a, "R K", kind, "* 1")
    call.check("B", b, "E N K", a.dtype, "* * 1")
    call.require(c.stride(-1) == 1 and c.shape[-1] == call.sizes["N"], f"the result is {list(c.shape)}, not [..., {call.sizes['N']}]")
    operands = [a]
    if given["use_int8_w8a8"]:  # a scale for each token, and for each of an expert's outputs
        call.require(given["per_channel_quant"], "INT8 without a scale for each output")
        call.check("A_scale", given["a_scale_ptr"], "R 1", torch.float32, "* *")
        call.check("B_scale", given["b_scale_ptr"], "E N 1", torch.float32, "* * *")
        operands += [given["a_scale_ptr"], given["b_scale_ptr"]]
    if fp8:
        columns = -(-call.sizes["K"] // given["group_k"])
        call.check("A_scale", given["a_scale_ptr"], f"R {columns}", torch.float32, "* *")
        call.check("B_scale", given["b_scale_ptr"], f"E {-(-call.sizes['N'] // given['group_n'])} {columns}", torch.float32, "* * *")
        operands += [given["a_scale_ptr"], given["b_scale_ptr"]]
    call.check("sorted_token_ids", given["sorted_token_ids_ptr"], "*", torch.int32)
    call.check("expert_ids", given["expert_ids_ptr"], "*", torch.int32)
    from sglang.srt.runtime_context import get_parallel

    rows = -(-given["num_valid_tokens"] // get_parallel().moe_ep_size)
    used = b[: min(call.sizes["E"], rows)]
    form = "fp8" if fp8 else "int8" if given["use_int8_w8a8"] else "bf16"
    call.multiplied(form, 2 * rows * call.sizes["N"] * call.sizes["K"], *operands, used, c)


def _sum_experts(given: dict[str, Any]) -> None:
    """kernels/ops/moe/fused_moe_triton_kernels.py: [T, k, H] to [T, H]."""
    call = Call("SGLang moe_sum_reduce")
    call.check("input", given["input_ptr"], "T K H", _FLOATS, "* * 1")
    call.check("output", given["output_ptr"], "T H", given["input_ptr"].dtype)
    call.moved(given["input_ptr"], given["output_ptr"])


_FLOATS = (*HALF, torch.float32)
_KERNELS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_fused_decode_metadata_kernel": _fused_decode_metadata,
    "_small_copy_kernel": _copy_small,
    "compute_position_kernel": _find_positions,
    "write_req_to_token_pool_triton": _write_requests,
    "_vocab_parallel_embedding_kernel": _embed,
    "softcap_inplace_logits_kernel": _softcap,
    "_router_triton_kernel": _route,
    "_moe_align_small_numel_kernel": _sort_few_experts,
    "create_flashinfer_kv_indices_triton": _gather_slots,
    "fused_moe_kernel": _multiply_experts,
    "_moe_sum_reduce_kernel": _sum_experts,
    "concat_and_cast_mha_k_kernel": _join_keys,
    "_per_token_quant_int8": _quantize_int8,
    "quantize_tile": _quantize_tile,
    "multiply_tile": _multiply_tile,
}
