"""SGLang's general plug-in: registers every hook of this project by SGLang's private names, which were checked with `KNOWN_VERSIONS`.
SGLang only logs a hook that cannot be applied; `verify` raises, so that an engine never serves with missing hooks. SGLang loads the plug-in
in each of its processes in this Python environment, also in those that this project did not start. These stay as they are."""

import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

KNOWN_VERSIONS = ("0.5.23",)
_ENGINE_VARIABLE = "MEGATRON_RL_ENGINE"  # environment variable of this project's engines and their child processes

_ATTENTION = "sglang.srt.layers.radix_attention.RadixAttention."
_BACKEND_REGISTRY = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry."
_DELTA_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend."
_DELTA_SPLIT = "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat"
_CUSTOM_ALL_REDUCE = "sglang.srt.distributed.device_communicators.custom_all_reduce_v2.CustomAllReduceV2."
_COLUMN_LINEAR = "sglang.srt.layers.linear.ColumnParallelLinear."
_FREEZE = "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup"
_INT8_LINEAR = "sglang.srt.layers.quantization.w8a8_int8.W8A8Int8LinearMethod."
_KV_POOLS = "sglang.srt.mem_cache.memory_pool."
_LATENT_ATTENTION = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin."
_MINIMAX = "sglang.srt.models.minimax_m2."
_OPENAI = "sglang.srt.entrypoints.openai."
_TORCH_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend."

Hook = tuple[str, Any, str]  # (target, function, hook type)


def check_version() -> None:
    """Raise RuntimeError if the private names of the installed SGLang release were not checked."""
    version = importlib.metadata.version("sglang")
    if version not in KNOWN_VERSIONS:
        raise RuntimeError(f"sglang {version} is not a supported version; supported: {', '.join(KNOWN_VERSIONS)}")


def _list_hooks() -> list[Hook]:
    from rollout_sglang import access, answering, rank_handler, serving
    from rollout_sglang.hooks import adapters, e4m3_cache, fp32_router, no_positions, scheduling, special_text, startup, tree_reduction

    hooks: list[Hook] = [
        ("sglang.srt.entrypoints.http_server.serve_generate_request", answering.answer_in_columns, "AROUND"),
        (_OPENAI + "serving_chat.OpenAIServingChat._render_and_encode_chat_template", special_text.render, "AROUND"),
        (_OPENAI + "parallel_prompt_encode.parallel_prompt_encode", special_text.encode, "AROUND"),
        (_OPENAI + "serving_chat.OpenAIServingChat._get_reasoning_from_request", serving.opens_thought, "AROUND"),
        (_OPENAI + "serving_chat.OpenAIServingChat._process_tool_calls", serving.keep_text_without_calls, "AROUND"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.check_weights", rank_handler.handle, "AROUND"),
        ("sglang.srt.managers.scheduler.Scheduler.init_tokenizer", rank_handler.remember_tokenizer, "AROUND"),
        ("sglang.srt.layers.linear.RowParallelLinear.forward", tree_reduction.run_row_parallel, "AROUND"),
        (_ATTENTION + "__init__", e4m3_cache.add_scales, "AROUND"),
        (_ATTENTION + "forward", e4m3_cache.attend_in_units, "AROUND"),
        ("sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__", fp32_router.use_fp32_gate, "AROUND"),
        ("sglang.srt.models.qwen2_moe.Qwen2MoeSparseMoeBlock.__init__", fp32_router.use_fp32_gate, "AROUND"),
        ("sglang.srt.models.gpt_oss.GptOssSparseMoeBlock.__init__", fp32_router.use_fp32_gate, "AROUND"),
        (_MINIMAX + "MiniMaxM2MoE.__init__", fp32_router.use_model_dtype_and_fp32, "AROUND"),
        ("sglang.srt.models.glm4_moe.Glm4MoeGate.__init__", fp32_router.use_model_dtype, "AROUND"),
        ("sglang.srt.models.glm4_moe.Glm4MoeGate.forward", fp32_router.compute_gate_logits, "REPLACE"),
        ("sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__", startup.set_latent_epsilon, "AROUND"),
        ("sglang.srt.configs.qwen3_next.Qwen3NextConfig.__init__", startup.keep_layer_types, "AROUND"),
        ("sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet.__init__", startup.widen_decay, "AROUND"),
        ("sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet.__init__", startup.widen_decay, "AROUND"),
        ("sglang.srt.models.llama.LlamaDecoderLayer.__init__", no_positions.leave_out, "AROUND"),
        ("sglang.srt.models.llama.LlamaForCausalLM.load_weights", startup.load_block_scales, "AROUND"),
        ("sglang.srt.models.qwen3_5_text.Qwen3_5ForCausalLM.load_weights", startup.load_decoder, "AROUND"),
        ("sglang.srt.managers.load_snapshot.shm_path_for", startup.place_load_file, "REPLACE"),
        ("sglang.srt.model_loader.loader.initialize_dummy_weights", startup.make_up_weights, "AROUND"),
        (_INT8_LINEAR + "process_weights_after_loading", startup.keep_int8_layout, "REPLACE"),
        ("sglang.srt.managers.schedule_batch.Req._stop_match_tail_len", scheduling.count_tail_tokens, "REPLACE"),
        ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", scheduling.add_request, "AROUND"),
        ("sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info", scheduling.use_whole_context, "AROUND"),
    ]
    if adapters.read_settings():
        hooks += [
            (_COLUMN_LINEAR + "_initialize_partition", adapters.add_to_column_layer, "AROUND"),
            (_COLUMN_LINEAR + "forward", adapters.run_column_parallel, "AROUND"),
            ("sglang.srt.layers.linear.RowParallelLinear.__init__", adapters.add_to_row_layer, "AROUND"),
            ("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__", adapters.add_to_experts, "AROUND"),
            ("sglang.srt.model_loader.loader.DefaultModelLoader.load_model", startup.load_adapters, "AROUND"),
        ]
    if torch.cuda.is_available():
        return [*hooks, (_FREEZE, access.freeze_with_key, "REPLACE"), *list_gpu_hooks()]
    return hooks + list_cpu_hooks()


def list_gpu_hooks() -> list[Hook]:
    """Return the hooks on GPU code of SGLang that does not follow the precision contract, or adds in another order than the trainer."""
    from rollout_sglang.hooks import blackwell, gated_delta, gpu_kernels, quantized_rows, tree_reduction
    from rollout_sglang.hooks import gpu_activation_quant as quant

    shared = list_delta_hooks() if gated_delta.SHARED_VARIABLE in os.environ else []
    shared += list_blackwell_hooks() if blackwell.is_blackwell() else []
    shared += list_all_reduce_hooks() if tree_reduction.count_parts() > 1 else []
    shared += list_rank_hooks() if tree_reduction.sums_by_ranks() else []
    return [
        ("sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear", quant.dispatch_block_linear, "AROUND"),
        ("sglang.kernels.ops.quantization.fp8_kernel._run_per_token_group_quant_8bit_kernel", quant.run_group_quantizer, "REPLACE"),
        ("sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_quant_fp8", quant.quantize_tokens, "REPLACE"),
        ("sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant", quant.quantize_groups, "REPLACE"),
        ("sglang.srt.layers.quantization.fp8.Fp8LinearMethod.apply", quantized_rows.apply_linear, "AROUND"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", quantized_rows.load_model, "AROUND"),
        ("sglang.srt.layers.layernorm.RMSNorm.forward_cuda", gpu_kernels.apply_rms_norm, "AROUND"),
        ("sglang.srt.models.utils.apply_qk_norm", gpu_kernels.apply_head_norms, "AROUND"),
        ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", gpu_kernels.rotate, "AROUND"),
        ("sglang.srt.models.qwen3.Qwen3Attention.forward_prepare_native", gpu_kernels.prepare_heads, "AROUND"),
        ("sglang.srt.models.qwen3_moe.Qwen3MoeAttention.apply_qk_norm_rope", gpu_kernels.prepare_expert_heads, "REPLACE"),
        ("sglang.srt.layers.activation.SiluAndMul.forward_cuda", gpu_kernels.multiply_by_gate, "REPLACE"),
        ("sglang.srt.layers.sampler.Sampler.forward", gpu_kernels.sample, "AROUND"),
        *shared,
    ]


def list_all_reduce_hooks() -> list[Hook]:
    """Return the hooks on sums over ranks for `precision.reduction = "ranks"`."""
    from rollout_sglang.hooks import gpu_all_reduce

    return [
        (_CUSTOM_ALL_REDUCE + "__init__", gpu_all_reduce.leave_out_multicast, "AROUND"),
        ("sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce", gpu_all_reduce.all_reduce, "AROUND"),
    ]


def list_rank_hooks() -> list[Hook]:
    """Return the hooks on products, attention and rotary tables with `precision.reduction = "ranks"`."""
    from rollout_sglang.hooks import rank_kernels, split_attention, tree_reduction

    flash, triton = "sglang.srt.layers.attention.flashattention_backend.", "sglang.srt.layers.attention.triton_backend.TritonAttnBackend."
    attention: list[Hook] = [
        (flash + "FlashAttentionBackend.__init__", rank_kernels.start_attention, "AROUND"),
        ("sglang.kernels.ops.attention.flash_attention.flash_attn_with_kvcache", rank_kernels.attend, "AROUND"),
    ]
    if os.environ[split_attention.BACKEND_VARIABLE] == "triton":
        attention = [
            (triton + "__init__", split_attention.start, "AROUND"),
            (triton + "forward_extend", split_attention.extend, "REPLACE"),
            (triton + "forward_decode", split_attention.decode, "REPLACE"),
        ]
    fp8, plain = "sglang.srt.layers.quantization.fp8_utils.", "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod."
    return [
        ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", rank_kernels.load_model, "AROUND"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.load_model", tree_reduction.load_model, "AROUND"),
        (fp8 + "dispatch_w8a8_block_fp8_linear", rank_kernels.require_deep_gemm, "AROUND"),
        (fp8 + "triton_w8a8_block_fp8_linear", rank_kernels.refuse_fallback, "REPLACE"),
        (plain + "apply", rank_kernels.apply_plain_linear, "REPLACE"),
        (plain + "apply_with_addend", rank_kernels.refuse_product, "REPLACE"),
        (plain + "apply_into", rank_kernels.refuse_product, "REPLACE"),
        ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", rank_kernels.compute_lm_head, "REPLACE"),
        *attention,
        ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding._compute_cos_sin_cache", rank_kernels.make_cos_sin, "REPLACE"),
    ]


def list_blackwell_hooks() -> list[Hook]:
    """Return the hooks on what SGLang does on Blackwell only."""
    from rollout_sglang.hooks import blackwell

    return [
        ("sglang.srt.layers.quantization.fp8_utils.requant_block_scale_ue8m0_for_deepgemm", blackwell.keep_bytes, "AROUND"),
        ("sglang.srt.layers.quantization.fp8_utils.w8a8_block_fp8_matmul_deepgemm", blackwell.multiply_packed, "AROUND"),
        ("sglang.srt.layers.quantization.fp8_activation.DenseSiluAndMulQuant.forward_decode", blackwell.activate_alone, "REPLACE"),
        ("sglang.srt.layers.dual_gemm.DualGemm._select_mode", blackwell.multiply_alone, "REPLACE"),
    ]


def list_cpu_hooks() -> list[Hook]:
    """Return the hooks on code of SGLang that does not run on a CPU, or computes different bits than the trainer."""
    from rollout_sglang.hooks import (
        all_heads,
        cpu_kernels,
        cpu_moe,
        e4m3_cache,
        fp32_router,
        gated_delta,
        gpt_oss,
        seeded_sampling,
        startup,
    )

    return [
        ("sglang.srt.entrypoints.engine._set_envs_and_config", startup.fork_children, "AROUND"),
        (_FREEZE, startup.skip_freezing, "REPLACE"),
        ("sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear", cpu_kernels.dispatch_block_fp8_linear, "REPLACE"),
        (_INT8_LINEAR + "apply", cpu_kernels.apply_int8_linear, "REPLACE"),
        ("sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply", cpu_moe.apply_unquantized, "REPLACE"),
        ("sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply", cpu_moe.apply_block_fp8, "REPLACE"),
        ("sglang.srt.layers.quantization.w8a8_int8.W8A8Int8MoEMethod.apply", cpu_moe.apply_int8, "REPLACE"),
        ("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", cpu_kernels.apply_plain_linear, "REPLACE"),
        ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", cpu_kernels.compute_lm_head, "AROUND"),
        ("sglang.srt.layers.layernorm.RMSNorm.forward_native", cpu_kernels.apply_rms_norm, "AROUND"),
        (_MINIMAX + "MiniMaxM2QKRMSNorm.forward", all_heads.normalize_heads, "REPLACE"),
        (_MINIMAX + "MiniMaxM2RMSNormTP.forward", all_heads.apply_norm, "REPLACE"),
        ("sglang.srt.layers.sampler.Sampler.forward", cpu_kernels.sample, "AROUND"),
        ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", seeded_sampling.attach_seeds, "AROUND"),
        ("sglang.srt.layers.sampler.sampling_from_probs_torch", seeded_sampling.sample_tokens, "REPLACE"),
        ("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", seeded_sampling.sample_truncated, "REPLACE"),
        ("sglang.srt.layers.moe.topk.fused_topk_native", cpu_moe.route_tokens, "AROUND"),
        ("sglang.srt.layers.moe.topk.biased_grouped_topk_impl", cpu_moe.route_tokens_with_bias, "AROUND"),
        ("sglang.srt.models.glm4_moe.Glm4MoeSparseMoeBlock.__init__", cpu_moe.scale_routing_weights, "AROUND"),
        ("sglang.srt.models.deepseek_v2.DeepseekV2MoE.__init__", cpu_moe.scale_routing_weights, "AROUND"),
        ("sglang.srt.models.deepseek_v2.MoEGate.forward", fp32_router.compute_gate_logits, "REPLACE"),
        (_KV_POOLS + "MHATokenToKVPool._create_buffers", e4m3_cache.create_buffers, "AROUND"),
        (_KV_POOLS + "MHATokenToKVPool._kv_buffer_shapes", e4m3_cache.get_buffer_shapes, "AROUND"),
        (_KV_POOLS + "MHATokenToKVPool.set_kv_buffer", e4m3_cache.set_keys_and_values, "AROUND"),
        (_KV_POOLS + "MLATokenToKVPool._create_buffers", e4m3_cache.create_latent_buffers, "AROUND"),
        (_KV_POOLS + "MLATokenToKVPool.set_kv_buffer", e4m3_cache.set_latents, "AROUND"),
        (_KV_POOLS + "MLATokenToKVPool.get_value_buffer", e4m3_cache.get_latents, "AROUND"),
        ("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", gpt_oss.allow_torch_attention, "AROUND"),
        ("sglang.srt.models.gpt_oss.GptOssDecoderLayer.__init__", gpt_oss.keep_dtypes, "AROUND"),
        (_TORCH_ATTENTION + "forward_extend", gpt_oss.take_sinks, "AROUND"),
        (_TORCH_ATTENTION + "forward_decode", gpt_oss.take_sinks, "AROUND"),
        (_TORCH_ATTENTION + "_run_sdpa_forward_extend", cpu_kernels.run_extend_attention, "REPLACE"),
        (_TORCH_ATTENTION + "_run_sdpa_forward_decode", cpu_kernels.run_decode_attention, "REPLACE"),
        (_BACKEND_REGISTRY + "get_handler", cpu_kernels.get_handler, "AROUND"),
        (_LATENT_ATTENTION + "forward_absorb_prepare", cpu_kernels.multiply_invariantly, "AROUND"),
        (_LATENT_ATTENTION + "forward_absorb_core", cpu_kernels.multiply_invariantly, "AROUND"),
        ("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", cpu_kernels.get_rotary_embedding, "AROUND"),
        ("sglang.srt.layers.quantization.fp8_utils.block_quant_to_tensor_quant", cpu_kernels.dequantize_kv_b, "REPLACE"),
        ("sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp", cpu_kernels.keep_heads, "REPLACE"),
        ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *_, **__: None, "REPLACE"),
        (_DELTA_SPLIT + "_contiguous", gated_delta.split_contiguous, "REPLACE"),
        (_DELTA_SPLIT, gated_delta.split_grouped, "REPLACE"),
        ("sglang.srt.layers.layernorm.GemmaRMSNorm.forward_native", gated_delta.apply_zero_centered_norm, "REPLACE"),
        ("sglang.srt.models.qwen3_next.Qwen3HybridAttentionDecoderLayer.self_attention", gated_delta.attend_with_gate, "REPLACE"),
        ("sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.self_attention", gated_delta.attend_with_gate, "REPLACE"),
        ("sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", gated_delta.add_gated_shared_expert, "REPLACE"),
        *list_delta_hooks(),
    ]


def list_delta_hooks() -> list[Hook]:
    """Return the hooks on the delta rule, with which it is the trainer's."""
    from rollout_sglang.hooks import gated_delta

    return [
        (_DELTA_BACKEND + "forward_extend", gated_delta.extend, "REPLACE"),
        (_DELTA_BACKEND + "forward_decode", gated_delta.decode, "REPLACE"),
        ("sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward", gated_delta.gate_norm, "REPLACE"),
        ("sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward", gated_delta.gate_norm, "REPLACE"),
    ]


def register() -> None:
    """Register the hooks in this process if it belongs to an engine. This is the entry point of the group `sglang.srt.plugins`."""
    if _ENGINE_VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    for target, function, hook_type in _list_hooks():
        HookRegistry.register(target, function, HookType[hook_type])


def verify() -> None:
    """Make this process and its child processes an engine's, and load SGLang's plug-ins. Raise RuntimeError for hooks that were not
    applied, with their names and the errors that SGLang only logs."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    check_version()
    os.environ[_ENGINE_VARIABLE] = "1"
    errors = _ErrorCollector()
    plugins = logging.getLogger("sglang.srt.plugins")
    plugins.addHandler(errors)
    try:
        load_plugins()
    finally:
        plugins.removeHandler(errors)
    missing = [target for target, _, _ in _list_hooks() if target not in HookRegistry._patched]
    if missing:
        found = [error for target in missing if (error := find_import_error(target))] or errors.found
        raise RuntimeError(explain_missing(missing, found)) from next(iter(found), None)


class _ErrorCollector(logging.Handler):
    """Keeps the exceptions that SGLang logs while it loads plug-ins."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])


def find_import_error(target: str) -> BaseException | None:
    """Import the modules of a hook's target `module.class.function`. Return the error of the first that cannot be imported, which SGLang
    reports as a missing attribute, or None if there is no such module."""
    names = target.split(".")
    for module in (".".join(names[:end]) for end in range(1, len(names))):
        try:
            importlib.import_module(module)
        except Exception as error:
            parent = sys.modules.get(module.rpartition(".")[0])
            is_class = isinstance(error, ModuleNotFoundError) and error.name == module and parent and not hasattr(parent, "__path__")
            return None if is_class else error
    return None


def explain_missing(hooks: Iterable[str], errors: Iterable[BaseException]) -> str:
    """Return the message about hooks that were not applied, with each distinct error once."""
    reasons = dict.fromkeys(f"{type(error).__name__}: {error}" for error in errors)
    return f"SGLang did not apply the hooks on {', '.join(hooks)}" + (f", because of {'; '.join(reasons)}" if reasons else "")
