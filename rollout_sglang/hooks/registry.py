"""SGLang's general plug-in: the hooks this project needs, on the private names of releases it knows. Nothing of SGLang is edited.

All names of SGLang that are not public stand in `_HOOKS`, with the releases they were checked with. SGLang only logs a hook that
fails to apply; `verify` turns that into an error, so an engine never serves half hooked.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

KNOWN_VERSIONS = ("0.5.23",)

_LIVE = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_INT8 = "sglang.srt.layers.quantization.w8a8_int8.W8A8Int8LinearMethod."
_LLAMA = "sglang.srt.models.llama.LlamaForCausalLM.load_weights"
_GATE = "sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.check_weights"
_GPU_GROUPS = "sglang.kernels.ops.quantization.fp8_kernel._run_per_token_group_quant_8bit_kernel"
_GPU_TOKENS = "sglang.kernels.ops.quantization.fp8_kernel.sglang_per_token_quant_fp8"
_GPU_EXPERTS = "sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant"
_CPU_LINEAR = "sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear"
_CPU_EXPERTS = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply"
_CPU_FP8_EXPERTS = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply"
_CPU_INT8_EXPERTS = "sglang.srt.layers.quantization.w8a8_int8.W8A8Int8MoEMethod.apply"
_CPU_PLAIN_LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
_CPU_LM_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
_CPU_NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
_CPU_SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"
_CPU_SEEDS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_CPU_DRAW = "sglang.srt.layers.sampler.sampling_from_probs_torch"
_CPU_EXTEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
_CPU_ROUTE = "sglang.srt.layers.moe.topk.fused_topk_native"
_CPU_GATE = "sglang.srt.models.deepseek_v2.MoEGate.forward"
_CPU_DECODE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"
_CPU_MLA_FORM = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler"
_CPU_MLA_ROPE = "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper"
_CPU_MLA_KV_B = "sglang.srt.layers.quantization.fp8_utils.block_quant_to_tensor_quant"
_CPU_PINNING = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


Hook = tuple[str, Any, str]
"""(target, function, hook type)."""


def check_version() -> None:
    """Raises RuntimeError for a release of SGLang whose private names were not checked."""
    version = importlib.metadata.version("sglang")
    if version not in KNOWN_VERSIONS:
        raise RuntimeError(f"sglang {version} is not known to work here; known: {', '.join(KNOWN_VERSIONS)}")


def _list_hooks() -> list[Hook]:
    """All hooks for this machine."""
    from rollout_sglang import precision_graph, rank_handler
    from rollout_sglang.hooks import fp32_router, int8_linear, llama_block_scales

    hooks: list[Hook] = [
        (_LIVE, rank_handler.handle, "AROUND"),
        (_RUNNER, precision_graph.check_weights, "AROUND"),
        (_GATE, fp32_router.use_fp32_gate, "AROUND"),
        (_LLAMA, llama_block_scales.load_block_scales, "AROUND"),
        (_INT8 + "process_weights_after_loading", int8_linear.keep_layout, "REPLACE"),
    ]
    return hooks + (list_gpu_hooks() if torch.cuda.is_available() else list_cpu_hooks())


def list_gpu_hooks() -> list[Hook]:
    """What SGLang computes otherwise than the contract says on a GPU."""
    from rollout_sglang.hooks import gpu_activation_quant

    return [
        (_GPU_GROUPS, gpu_activation_quant.run_group_quantizer, "REPLACE"),
        (_GPU_TOKENS, gpu_activation_quant.quantize_tokens, "REPLACE"),
        (_GPU_EXPERTS, gpu_activation_quant.quantize_groups, "REPLACE"),
    ]


def list_cpu_hooks() -> list[Hook]:
    """What SGLang cannot compute on a CPU, or with other bits than the trainer."""
    from rollout_sglang.hooks import cpu_kernels, cpu_mla, cpu_moe, fp32_router, int8_linear, seeded_sampling

    return [
        (_CPU_LINEAR, cpu_kernels.dispatch_block_fp8_linear, "REPLACE"),
        (_INT8 + "apply", int8_linear.apply, "REPLACE"),
        (_CPU_EXPERTS, cpu_moe.apply_unquantized, "REPLACE"),
        (_CPU_FP8_EXPERTS, cpu_moe.apply_block_fp8, "REPLACE"),
        (_CPU_INT8_EXPERTS, cpu_moe.apply_int8, "REPLACE"),
        (_CPU_PLAIN_LINEAR, cpu_kernels.plain_linear, "AROUND"),
        (_CPU_LM_HEAD, cpu_kernels.lm_head, "AROUND"),
        (_CPU_NORM, cpu_kernels.rms_norm, "AROUND"),
        (_CPU_SAMPLER, cpu_kernels.sample, "AROUND"),
        (_CPU_SEEDS, seeded_sampling.attach_seeds, "AROUND"),
        (_CPU_DRAW, seeded_sampling.sample_tokens, "REPLACE"),
        (_CPU_ROUTE, cpu_moe.route_tokens, "AROUND"),
        (_CPU_GATE, fp32_router.compute_gate_logits, "REPLACE"),
        (_CPU_EXTEND, cpu_kernels.extend_attention, "REPLACE"),
        (_CPU_DECODE, cpu_kernels.decode_attention, "REPLACE"),
        (_CPU_MLA_FORM, cpu_mla.attention_handler, "AROUND"),
        (_CPU_MLA_ROPE, cpu_mla.rotary_embedding, "AROUND"),
        (_CPU_MLA_KV_B, cpu_mla.dequantize_kv_b, "REPLACE"),
        (_CPU_PINNING, lambda *_, **__: None, "REPLACE"),
    ]


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: registers the hooks in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    for target, function, kind in _list_hooks():
        HookRegistry.register(target, function, HookType[kind])


def verify() -> None:
    """Loads SGLang's plug-ins and raises RuntimeError, by name, for a hook that was not applied."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    check_version()
    load_plugins()
    missing = [target for target, _, _ in _list_hooks() if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"SGLang did not apply the hooks on {', '.join(missing)}")
