"""Triton kernels of SGLang and of this project, which are looked up by name. Unknown kernels are refused."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.rehearsal.device import set_value, value_of
from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.kernels.match import Call, Kernel
from megatron_rl.rehearsal.kernels.triton import JitFunction, install_into
from rollout_sglang.rehearsal.kernels import delta, triton_attention

Given = Mapping[str, Any]


class _Constant:
    """Stands in for triton.language.constexpr."""

    def __init__(self, value: Any) -> None:
        self.value = value


def install() -> None:
    triton: Any = import_module("triton")  # the stub
    triton.language.constexpr = _Constant
    install_into(triton, _run)


def _run(function: JitFunction, given: Given) -> None:
    kernel = _KERNELS.get(function.name)
    if kernel is None:
        raise RefusedKernelError(f"the Triton kernel {function.name} of {function.fn.__module__} is not known to the rehearsal")
    kernel.run(function.name, given) if isinstance(kernel, Kernel) else kernel(Call(function.name), given)


def _fused_decode_metadata(call: Call, given: Given) -> None:
    inputs = "seq_lens [B] index (*); req_pool_indices [B] index (*); req_to_token [* *] int32 (* *)"
    call.check_all(given, f"{inputs}; cache_seqlens_int32 [B] int32 (*); page_table [B *] int32 (* *)")
    call.moved(given["seq_lens"], given["cache_seqlens_int32"], given["cu_seqlens_k"])
    known = value_of(given["seq_lens"])
    lengths = None if known is None else (known + given["SEQ_LEN_DELTA"]).int()
    set_value(given["cache_seqlens_int32"], lengths)
    set_value(given["cu_seqlens_k"], None if lengths is None else F.pad(lengths.cumsum(0), (1, 0)).int())


def _copy_small(call: Call, given: Given) -> None:
    """kernels/ops/memory/small_copy.py: several copies in one launch."""
    for source, destination in zip(given["sources"], given["destinations"], strict=True):
        destination.copy_(source)


def _forget_positions(call: Call, given: Given) -> None:
    for name in ("positions", "extend_start_loc"):
        set_value(given[name], None)


def _softcap(call: Call, given: Given) -> None:
    logits, output = given["full_logits_ptr"], given.get("output_ptr")
    call.require(logits.dtype.is_floating_point and logits.itemsize > 1, f"logits are {logits.dtype}")
    if given.get("CAST_TO_FP32"):
        call.require(output is not None and output.dtype == torch.float32 and output.shape == logits.shape, "its output is not float32")
    call.moved(logits, logits if output is None else output)


def _quantize_tile(call: Call, given: Given) -> None:
    """megatron_rl/kernels/quantize/triton.py"""
    call.check_all(given, "x [T K] float")
    outputs = []
    if given["ROWS"]:
        groups = -(-call.sizes["K"] // 128)
        scales = f"[{-(-groups // 4)} {4 * call.sizes['T']}] uint8 (* 1)" if given["PACKED"] else f"[T {groups}] float32 (* *)"
        call.check_all(given, f"row_data [T K] uint8; row_scale {scales}")
        outputs += [given["row_data"], given["row_scale"]]
    if given["COLUMNS"]:
        outputs += [given["column_data"], given["column_scale"]]
    call.moved(given["x"], *outputs)


def _check_joined_keys(call: Call, given: Given) -> None:
    """kernels/ops/attention/mla_qk_prep.py: the keys of each head next to the rotated part that all heads share."""
    nope, rope = given["k_nope_ptr"], given["k_rope_ptr"]
    call.check_all(given, f"k_ptr [T H {nope.shape[-1] + rope.shape[-1]}] half|float8_e4m3fn (* * 1)")
    sizes = (nope.shape[1], nope.shape[-1], rope.shape[-1])
    call.require(all(size & (size - 1) == 0 for size in sizes), f"heads and widths {sizes} are not powers of two")


def _multiply_tile(call: Call, given: Given) -> None:
    """megatron_rl/kernels/sums/triton.py"""
    x, weight, scaled = given["x"], given["weight"], given["SCALED"]
    kinds = "uint8|float8_e4m3fn" if scaled else "half"
    call.check_all(given, f"x [T K] {kinds}; weight [N K] {kinds}")
    scales = [given["x_scale"], given["weight_scale"]] if scaled else []
    call.multiplied("fp8" if scaled else "bf16", 2 * x.shape[0] * x.shape[1] * weight.shape[0], x, weight, given["result"], *scales)


def _normalize_rows(call: Call, given: Given) -> None:
    """megatron_rl/kernels/norm/triton.py"""
    call.check_all(given, "x [T H W] half (* * 1); weight [W] float")
    call.moved(given["x"], given["result"], *((given["residual"], given["total"]) if given["ADDS"] else ()))


def _rotate_heads(call: Call, given: Given) -> None:
    """megatron_rl/kernels/heads/triton.py"""
    sources = "query_source [T G Q D] half (* * D 1); key_source [T G 1 D] =query_source (* * * 1)"
    call.check_all(given, f"{sources}; query [T * D] =query_source; key [T G D] =query_source")
    if given["ROTATES"]:
        call.check_all(given, f"positions [T] index; cos [* {call.sizes['D'] // 2}] float32; sin [* {call.sizes['D'] // 2}] float32")
    call.moved(*(given[name] for name in ("query_source", "key_source", "query", "key")))


def _check_bias(call: Call, given: Given) -> None:
    if given["HAS_BIAS"] and not given["HAS_TOKEN_BIAS"]:
        call.check_all(given, "bias_ptr [N] float (*)")


def _check_sorted_rows(call: Call, given: Given) -> None:
    count, rows = "2" if given["WRITE_INACTIVE_PREFIX_COUNT"] else "*", given["topk_ids_ptr"].numel()
    call.check_all(given, f"num_tokens_post_pad_ptr [{count}] int32")
    call.require(call.sizes["S"] >= rows, f"{call.sizes['S']} places for {rows} rows")


def _multiply_experts(call: Call, given: Given) -> None:
    """kernels/ops/moe/fused_moe_triton_kernels.py: a [rows, K] times b [experts, N, K] of the row's expert."""
    a, b, c = given["a_ptr"], given["b_ptr"], given["c_ptr"]
    for option in ("use_int8_w8a16", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SWIGLU"):
        call.require(not given.get(option), f"{option} is not known to the rehearsal")
    kind = "fp8" if given["use_fp8_w8a8"] else "int8" if given["use_int8_w8a8"] else "bf16"
    dtype = {"fp8": "float8_e4m3fn", "int8": "int8", "bf16": "half"}[kind]
    call.check_all(given, f"a_ptr [R K] {dtype} (* 1); b_ptr [E N K] =a_ptr (* * 1)")
    n, k = call.sizes["N"], call.sizes["K"]
    call.require(c.stride(-1) == 1 and c.shape[-1] == n, f"the result is {list(c.shape)}, not [..., {n}]")
    if kind == "int8":  # a scale per row of a and per output of each expert
        call.require(given["per_channel_quant"], "INT8 without a scale for each output")
        call.check_all(given, "a_scale_ptr [R 1] float32 (* *); b_scale_ptr [E N 1] float32 (* * *)")
    if kind == "fp8":
        columns = -(-k // given["group_k"])
        weight_scales = f"[E {-(-n // given['group_n'])} {columns}] float32 (* * *)"
        call.check_all(given, f"a_scale_ptr [R {columns}] float32 (* *); b_scale_ptr {weight_scales}")
    call.check_all(given, "sorted_token_ids_ptr [*] int32; expert_ids_ptr [*] int32")
    from sglang.srt.runtime_context import get_parallel

    rows = -(-given["num_valid_tokens"] // get_parallel().moe_ep_size)
    scales = [] if kind == "bf16" else [given["a_scale_ptr"], given["b_scale_ptr"]]
    call.multiplied(kind, 2 * rows * n * k, a, *scales, b[: min(call.sizes["E"], rows)], c)


_KERNELS: dict[str, Kernel | Callable[[Call, Given], None]] = {
    "_fused_decode_metadata_kernel": _fused_decode_metadata,
    "_small_copy_kernel": _copy_small,
    "compute_position_kernel": Kernel(
        "positions [T] int64; extend_start_loc [B] int32; extend_prefix_lens [B] index; extend_seq_lens [B] index",
        "positions extend_start_loc",
        rule=_forget_positions,
    ),
    "write_req_to_token_pool_triton": Kernel(
        "req_to_token_ptr [* *] int32 (* 1); out_cache_loc [T] index; req_pool_indices [B] index; pre_lens [B] index; "
        "seq_lens [B] index; extend_lens [B] index",
        "out_cache_loc out_cache_loc",
    ),
    "_vocab_parallel_embedding_kernel": Kernel(
        "input_ptr [N] index; weight_ptr [V H] float (* 1); out_ptr [N H] =weight_ptr", "input_ptr out_ptr out_ptr"
    ),
    "softcap_inplace_logits_kernel": _softcap,
    "_router_triton_kernel": Kernel(
        "scores_ptr [T N] float (* *); out_weights_ptr [T K] float32 (* *); out_indices_ptr [T K] int32 (* *)",
        "scores_ptr out_weights_ptr out_indices_ptr",
        rule=_check_bias,
    ),
    "_moe_align_small_numel_kernel": Kernel(
        "topk_ids_ptr [T K] index; sorted_token_ids_ptr [S] int32; expert_ids_ptr [E] int32",
        "topk_ids_ptr sorted_token_ids_ptr expert_ids_ptr",
        rule=_check_sorted_rows,
    ),
    "fused_moe_kernel": _multiply_experts,
    "_moe_sum_reduce_kernel": Kernel("input_ptr [T K H] float (* * 1); output_ptr [T H] =input_ptr", "input_ptr output_ptr"),
    "concat_and_cast_mha_k_kernel": Kernel(
        "k_nope_ptr [T H N] half (* * 1); k_rope_ptr [T 1 R] half (* * 1)", "k_nope_ptr k_rope_ptr k_ptr", rule=_check_joined_keys
    ),
    "_per_token_quant_int8": Kernel("x_ptr [T K] float; xq_ptr [T K] int8; scale_ptr [T 1] float", "x_ptr xq_ptr scale_ptr"),
    "normalize_rows": _normalize_rows,
    "rotate_head_tile": _rotate_heads,
    "rotate_token": Kernel(
        "x [T H D] half (* * 1); result [T H D] =x; positions [T] index; cos [* P] float32; sin [* P] float32", "x result"
    ),
    "enter_units_row": Kernel(
        "query [T W] half (* 1); key [T V] =query (* 1); value [T V] =query (* 1); scales [2] float32",
        "query key value of_query of_key of_value",
    ),
    "normalize_row": Kernel(
        "x [T W] half; weight [W] float; result [T W] =x; row_data [T W] uint8; row_scale [T *] float32 (* *)",
        "x residual total result row_data row_scale",
    ),
    "quantize_row": Kernel("x [T W] float; row_data [T W] uint8; row_scale [T *] float32 (* *)", "x row_data row_scale"),
    "multiply_row": Kernel("x [T W] half; result [T *] =x", "x result row_data row_scale"),
    "summarize_row": Kernel("logits [N V] float; columns [N] int64; result [* N 4] float32", "logits result"),
    "quantize_tile": _quantize_tile,
    "multiply_tile": _multiply_tile,
    "add_parts": Kernel("partials [P T N] half; total [T N] =partials", "partials total"),
    **delta.KERNELS,
    **triton_attention.KERNELS,
}
