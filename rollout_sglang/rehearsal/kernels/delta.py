"""Triton kernels for gated delta nets: SGLang's around the delta rule, and this project's own (`megatron_rl.kernels.gated_delta`)."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.rehearsal.kernels.match import Call, Kernel


def _check_gated_heads(call: Call, given: Mapping[str, Any]) -> None:
    """kernels/ops/attention/fused_qk_rmsnorm_rope_gate.py"""
    heads, kv_heads, width = given["NUM_Q_HEADS"], given["NUM_KV_HEADS"], given["HEAD_DIM"]
    gates = "gate_out_ptr [T * *] =q_gate_ptr" if given["HAS_GATE"] else "gate_out_ptr [T *] =q_gate_ptr"
    rows = f"q_gate_ptr [T {heads * (1 + given['HAS_GATE']) * width}] half (* 1); k_ptr [T {kv_heads * width}] =q_gate_ptr (* 1)"
    norms = f"q_weight_ptr [{width}] =q_gate_ptr; k_weight_ptr [{width}] =q_gate_ptr"
    call.check_all(given, f"{rows}; {norms}; {gates}; cos_sin_cache_ptr [* {given['ROTARY_DIM']}] float (* 1); positions_ptr [T] index")


def _prepare(call: Call, given: Mapping[str, Any]) -> None:
    """kernels/gated_delta/triton_inputs.py"""
    k_heads, heads, k_dim, v_dim = (given[name] for name in ("K_HEADS", "V_HEADS", "K_DIM", "V_DIM"))
    call.check_all(given, f"x [T {2 * k_heads * k_dim + heads * v_dim}] float; a [T {heads}] =x (* 1); b [T {heads}] =x (* 1)")
    call.check_all(
        given, f"a_log [{heads}] float32; dt_bias [{heads}] float32; q [T {k_heads} {k_dim}] float32; k [T {k_heads} {k_dim}] =q"
    )
    call.check_all(given, f"decays [T {heads}] float32; betas [T {heads}] float32")
    call.moved(*(given[name] for name in ("x", "a", "b", "q", "k", "decays", "betas")))


def _advance(call: Call, given: Mapping[str, Any]) -> None:
    """Count the state of each sequence, which is one of the pool's, once for reading and once for writing."""
    k_heads, heads, k_dim, v_dim = (given[name] for name in ("K_HEADS", "V_HEADS", "K_DIM", "V_DIM"))
    call.check_all(given, f"x [T {2 * k_heads * k_dim + heads * v_dim}] float; q [T {k_heads} {k_dim}] float32; k [T {k_heads} {k_dim}] =q")
    call.check_all(given, f"decays [T {heads}] float32; betas [T {heads}] float32; states [* {heads} {k_dim} {v_dim}] float32")
    call.check_all(given, f"out [T {heads} {v_dim}] =x; slots [N] int32; starts [*] int32; span_starts [*] int32")
    own = given["states"][: len(given["slots"])]
    call.moved(*(given[name] for name in ("x", "q", "k", "decays", "betas", "out")), own, own)


_PROJECTED = "mixed_qkvz [T *] half (* 1); mixed_ba [T *] half (* 1); mixed_qkv [T *] =mixed_qkvz; z [T H *] =mixed_qkvz"
_SPLIT = Kernel(f"{_PROJECTED}; b [T H] =mixed_ba; a [T H] =mixed_ba", "mixed_qkvz mixed_ba mixed_qkv z b a")
KERNELS: dict[str, Kernel | Callable[[Call, Mapping[str, Any]], None]] = {
    "_fused_slot_copy_kernel": Kernel("feat_arr [C] int64; src_arr [N] int64; dst_arr [N] int64", "src_arr dst_arr"),
    "_fused_slot_clear_kernel": Kernel("feat_arr [C] int64; index_arr [N] int64", "index_arr"),
    "_fused_replay_state_indices_kernel": Kernel(
        "req_pool_indices_ptr [B] index; mamba_map_ptr [*] int32; out_ptr [B] int32", "req_pool_indices_ptr out_ptr"
    ),
    "fused_qkvzba_split_reshape_cat_kernel": _SPLIT,
    "fused_qkvzba_split_reshape_cat_contiguous_kernel": _SPLIT,
    "_fused_qk_rmsnorm_rope_gate_kernel": Kernel(
        "q_out_ptr [T *] =q_gate_ptr; k_out_ptr [T *] =q_gate_ptr",
        "q_gate_ptr k_ptr q_out_ptr k_out_ptr gate_out_ptr",
        rule=_check_gated_heads,
    ),
    "_fused_sigmoid_mul_kernel": Kernel(
        "attn_output_ptr [T *] half; output_ptr [T *] =attn_output_ptr", "attn_output_ptr gate_ptr output_ptr"
    ),
    "_fused_gate_sigmoid_mul_add_kernel": Kernel(
        "hidden_states_ptr [T H] half; gate_weight_ptr [H] =hidden_states_ptr; shared_output_ptr [T H] =hidden_states_ptr; "
        "output_ptr [T H] =hidden_states_ptr",
        "hidden_states_ptr shared_output_ptr output_ptr output_ptr",
    ),
    "convolve_token": Kernel(
        "mixed [T C] float (* 1); windows [* C *] =mixed; slots [N] int32; weight [C *] =mixed; result [T C] =mixed; "
        "sequences [T] int32; starts [*] int32",
        "mixed windows:N result",
    ),
    "move_window": Kernel("mixed [* C] float (* 1); windows [* C *] =mixed; slots [N] int32; starts [*] int32", "windows:N windows:N"),
    "prepare_token": _prepare,
    "advance_state": _advance,
    "gate_norm_rows": Kernel("x [* V] float; z [* V] =x; weight [V] float; result [* V] =x", "x z result"),
}
