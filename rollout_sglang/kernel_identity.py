"""Which kernels the engine's live modules compute with (`precision.graph.kernels`): read from the methods that SGLang has chosen for each
module, and from the hooks that its `HookRegistry` has put around them. A method without a hook is a kernel of SGLang's own."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.kernels import batch_invariant, plain
from megatron_rl.kernels.attention import flash3
from megatron_rl.kernels.experts import expert_sum
from megatron_rl.kernels.gated_delta import reference as delta
from megatron_rl.kernels.gates import reference as gates
from megatron_rl.kernels.heads import reference as heads
from megatron_rl.kernels.linear import reference as linear
from megatron_rl.kernels.norm import heads as norm_heads
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.kernels.split_attention import ORDER
from megatron_rl.kernels.split_attention import reference as split_kernel
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.swiglu import clamped
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.kernels.vocabulary import reference as vocabulary
from megatron_rl.precision import int8
from megatron_rl.precision.graph.kernels import (
    BLOCKS_OF_K,
    LOOKUP,
    ROUNDED_ROTATION,
    ROUNDED_SILU,
    SUMS_BY_EXPERT,
    VOCABULARY_TREE,
    Kernel,
    find_package,
    identify,
    in_parts,
    unwrap,
)
from megatron_rl.precision.graph.reader import digest_table
from rollout_sglang.hooks import (
    all_heads,
    cpu_kernels,
    cpu_moe,
    fp32_router,
    gated_delta,
    gpu_all_reduce,
    gpu_kernels,
    no_positions,
    rank_kernels,
    split_attention,
    tree_reduction,
)

COMPUTES: dict[Any, Callable[..., Any]] = {
    cpu_kernels.apply_block_fp8_linear: linear.fprop,
    cpu_kernels.apply_int8_linear: int8.int8_matmul,
    cpu_kernels.apply_plain_linear: batch_invariant.invariant_matmul,
    cpu_kernels.apply_rms_norm: batch_invariant.rms_norm,
    cpu_kernels.compute_lm_head: batch_invariant.invariant_matmul,
    cpu_kernels.multiply_invariantly: batch_invariant.multiply_heads,
    cpu_kernels.run_extend_attention: batch_invariant.attention,
    cpu_kernels.run_decode_attention: batch_invariant.attention,
    cpu_moe.apply_block_fp8: linear.fprop,
    cpu_moe.apply_int8: int8.int8_matmul,
    cpu_moe.apply_unquantized: batch_invariant.invariant_matmul,
    all_heads.apply_norm: norm_heads.normalize,
    fp32_router.compute_gate_logits: batch_invariant.invariant_matmul,
    gated_delta.add_gated_shared_expert: gates.gate,
    gated_delta.apply_zero_centered_norm: batch_invariant.rms_norm,
    gated_delta.attend_with_gate: gates.gate,
    gated_delta.decode: delta.advance,
    gated_delta.extend: delta.advance,
    gated_delta.gate_norm: gates.gate_norm,
    gpu_kernels.apply_head_norms: heads.normalize_heads,
    gpu_kernels.apply_rms_norm: norm.normalize,
    gpu_kernels.multiply_by_gate: swiglu.multiply,
    gpu_kernels.rotate: heads.turn_heads,
    rank_kernels.apply_plain_linear: plain.multiply,
    rank_kernels.compute_lm_head: plain.multiply,
    split_attention.decode: split_kernel.attend,
    split_attention.extend: split_kernel.attend,
}
"""Function of this project in the engine -> the trainer's function that it computes with."""
_OF_COMPUTED: dict[Any, str] = {plain.multiply: plain.ORDER, split_kernel.attend: ORDER}
_BY_TREE: dict[Any, Any] = {linear.fprop: linear.fprop_by_tree, batch_invariant.invariant_matmul: tree.multiply}
"""Product on a CPU -> the same with sums by the tree."""
_ORDERS = {"SiluAndMul.forward_native": ROUNDED_SILU, "SiluAndMul.forward_cpu": ROUNDED_SILU}
_ROUNDED_ROTATIONS = ("RotaryEmbedding.forward_native", "DeepseekScalingRotaryEmbedding.forward_native")
_DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"


def find_hook(function: Any) -> Any:
    """Return the function that SGLang's `HookRegistry` calls in place of, or around, a patched function; None if it is not patched."""
    code = getattr(function, "__code__", None)
    if code is None or "hook" not in code.co_freevars or "hook_registry" not in code.co_filename:
        return None
    return function.__closure__[code.co_freevars.index("hook")].cell_contents


def identify_live(function: Any, order: str = "") -> Kernel:
    """Return what a live method of SGLang computes with."""
    function, on_gpu = unwrap(function), torch.cuda.is_available()
    hook = find_hook(function) or function
    computes = COMPUTES.get(hook, hook)
    known = _OF_COMPUTED.get(computes) or _ORDERS.get(hook.__qualname__, "")
    return identify(computes, order or known, on_gpu)


def find_method(module: Any) -> Any:
    """Return the method that computes the forward pass of a module."""
    if hasattr(module, "_forward_method"):  # an operator that SGLang dispatches at its first call, or that torch.compile has replaced
        return module._forward_method or module._resolve_forward_method()
    return type(module).forward


def identify_norm(name: str, module: Any) -> Kernel:
    """Return what computes a norm. On a GPU, a function of SGLang calls the norms of queries and keys."""
    if torch.cuda.is_available() and name in ("attention.q_norm", "attention.k_norm"):
        from sglang.srt.models import utils

        return identify_live(utils.apply_qk_norm)
    return identify_live(find_method(module))


def get_mlp(layer: Any) -> Any:
    """Return the module of a layer with its MLP or its experts, whose name is that of the checkpoint."""
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def identify_linear(module: Any, by_tree: bool) -> Kernel:
    """Return what computes the products of a linear layer, an embedding, or experts."""
    method = module.quant_method
    name = type(method).__name__
    if name == "UnquantizedEmbeddingMethod":
        return identify(F.embedding, LOOKUP)
    if name == "Fp32RouterMethod":
        return identify(batch_invariant.invariant_matmul)
    function = unwrap(getattr(method, "w8a8_block_fp8_linear", None) or type(method).apply)
    if function.__name__ == _DEEP_GEMM and find_hook(function) is None and not by_tree:
        pow2 = getattr(getattr(method, "quant_config", None), "scale_fmt", None) == "ue8m0"
        return Kernel("deep_gemm.fp8_gemm_nt", find_package("deep_gemm"), BLOCKS_OF_K if pow2 else "")
    computes: Any = COMPUTES.get(find_hook(function) or function)
    if by_tree and torch.cuda.is_available():
        product: Any = tree.multiply if name == "UnquantizedLinearMethod" else tree.multiply_blocks
        return identify(product, on_gpu=True)
    return identify(_BY_TREE[computes]) if by_tree and computes in _BY_TREE else identify_live(function)


def identify_row_parallel(layer: Any, product: Kernel) -> Kernel:
    """Return the identity of a row-parallel layer with this product: that of the product, and how its parts are added."""
    if (parts := tree_reduction.count_parts()) == 1:
        return product
    if tree_reduction.count_slices(layer.tp_group.world_size):
        return in_parts(product, parts) if find_hook(type(layer).forward) is tree_reduction.run_row_parallel else product
    in_order = find_hook(type(layer.tp_group).all_reduce) is gpu_all_reduce.all_reduce
    return in_parts(product, parts) if in_order else product


def identify_ends(model: Any, runner: Any) -> tuple[Kernel, Kernel]:
    """Return what computes logits and log-probs."""
    sampler = unwrap(type(runner.sampler).forward)
    scores: Any = {cpu_kernels.sample: tree.log_softmax, gpu_kernels.sample: vocabulary.summarize}.get(find_hook(sampler))
    head = type(model.logits_processor)._compute_lm_head
    on_gpu = torch.cuda.is_available()
    return identify_live(head), identify(scores, VOCABULARY_TREE, on_gpu) if scores else identify_live(sampler)


def identify_score() -> Kernel:
    """Return what computes the logit of a shared expert's gate, which one function of SGLang does together with the gate."""
    from sglang.kernels.ops.elementwise import elementwise

    live = identify_live(elementwise.fused_gate_sigmoid_mul_add)
    return identify(batch_invariant.invariant_matmul) if live == identify(gates.gate) else live


def identify_attention(backend: Any) -> Kernel:
    """Return what computes the attention of prompts and of decoded tokens with a live backend."""
    kind = type(backend)
    if hasattr(backend, "num_splits"):  # FlashAttention 3
        live = getattr(sys.modules.get(kind.__module__), "flash_attn_with_kvcache", None)
        shared = find_hook(live) is rank_kernels.attend and backend.num_splits == backend.decode_num_splits == 1
        return Kernel(flash3.KERNEL, find_package("sgl_kernel"), flash3.ORDER if shared else f"{backend.num_splits} splits")
    names = [name for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode") if hasattr(kind, name)]
    kernels = {identify_live(getattr(kind, name)) for name in names or ("forward_extend", "forward_decode") if hasattr(kind, name)}
    found = sorted(kernels, key=str)
    return found[0] if len(found) == 1 else Kernel(" and ".join(kernel.name for kernel in found), find_package("sglang"))


def identify_rest(layer: Any, backend: Any, by_tree: bool, dtype: torch.dtype) -> dict[str, Kernel]:
    """Return what computes the operators of a layer that are no layers with weights, by kind or name."""
    attention, mlp = getattr(layer, "self_attn", layer), get_mlp(layer)
    kernels: dict[str, Kernel] = {}
    activations = {"mlp.swiglu": mlp, "mlp.shared_experts.swiglu": getattr(mlp, "shared_experts", getattr(mlp, "shared_expert", None))}
    kernels |= {name: identify_live(find_method(each.act_fn)) for name, each in activations.items() if hasattr(each, "act_fn")}
    if hasattr(mlp, "experts"):
        kernels |= _identify_experts(mlp.experts, by_tree)
        from sglang.kernels.ops.elementwise import elementwise

        kernels["mlp.shared_experts.gate"] = identify_live(elementwise.fused_gate_sigmoid_mul_add)
    if getattr(attention, "attn_output_gate", False):
        kernels["attention.gate"] = identify_live(type(attention).self_attention)
    if (delta_net := getattr(layer, "linear_attn", None)) is not None:
        kind = type(getattr(backend, "linear_attn_backend", backend))
        found = {identify_live(getattr(kind, name)) for name in ("forward_extend", "forward_decode")}
        return kernels | dict.fromkeys(
            ("causal_conv", "gated_delta"), found.pop() if len(found) == 1 else identify_live(type(delta_net).forward)
        )
    unrotated = isinstance(attention.rotary_emb, no_positions.Unrotated)
    return kernels if unrotated else kernels | {"rope": identify_rotation(attention.rotary_emb, dtype)}


def _identify_experts(experts: Any, by_tree: bool) -> dict[str, Kernel]:
    function = unwrap(type(experts.quant_method).apply)
    if find_hook(function) not in (cpu_moe.apply_block_fp8, cpu_moe.apply_unquantized, cpu_moe.apply_int8):
        return dict.fromkeys(("mlp.experts.swiglu", "weighted_sum"), identify_live(function))
    clamps = experts.quant_method.moe_runner_config.gemm1_alpha is not None
    activation = identify(clamped.clamped_swiglu) if clamps else identify(cpu_moe._silu_and_multiply, ROUNDED_SILU)
    sums = identify(expert_sum.sum_experts) if by_tree else identify(cpu_moe.run_experts, SUMS_BY_EXPERT)
    return {"mlp.experts.swiglu": activation, "weighted_sum": sums}


def identify_rotation(embedding: Any, dtype: torch.dtype) -> Kernel:
    """Return what rotates queries and keys, with the live table."""
    cos, sin = embedding.cos_sin_cache.chunk(2, -1)
    method = unwrap(find_method(embedding))
    if torch.cuda.is_available():
        return identify_live(method, digest_table(cos, sin, torch.float32))
    rounds = method.__qualname__ in _ROUNDED_ROTATIONS and find_hook(method) is None
    table = digest_table(cos, sin, dtype)
    return identify_live(method, f"{ROUNDED_ROTATION}, {table}" if rounds else table)
