"""Builds the policy as a real Megatron-Core GPTModel, and starts the process groups it lives in."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    model_parallel_cuda_manual_seed,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig

from megatron_rl.architecture import rope_theta, traits_of
from megatron_rl.mcore import adam, cpu
from megatron_rl.mcore.layers import block_spec
from megatron_rl.mcore.weights import set_row_orders
from megatron_rl.precision import PrecisionContract
from parallel.geometry import ModelGeometry
from parallel.layout import Layout

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration plus what the FP8 linear layers read: the contract's scale format, and who computes."""

    fp8_scale_format: str = "pow2"
    fp8_backend: str = "emulated"


def start_megatron(layout: Layout, seed: int) -> None:
    """Joins the process group (gloo on a CPU, NCCL on a GPU) and makes Megatron's groups for `layout`.

    Rank and world size come from torchrun's environment; without it, this is a world of one process.
    """
    cpu.install()
    adam.install()
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)
    model_parallel_cuda_manual_seed(seed)


def stop_megatron() -> None:
    """Leaves the process groups."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_model(hf_config: Mapping[str, Any], layout: Layout, contract: PrecisionContract) -> GPTModel:
    """This rank's part of the model of a Hugging Face config.json, with uninitialised weights (see `weights.load_checkpoint`).

    Linear layers compute in FP8 where `contract.train_fp8`; everything else has the contract's high-precision dtype.
    """
    dtype, traits = _DTYPES[contract.high], traits_of(hf_config)
    config = PolicyConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        ffn_hidden_size=hf_config["intermediate_size"],
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config["rms_norm_eps"],
        qk_layernorm=traits.head_norms,
        add_bias_linear=False,
        add_qkv_bias=traits.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,  # both fusions compile with torch.compile and a C++ compiler
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,  # apex's kernel; the FP8 layers accumulate in place by themselves
        moe_token_dispatcher_type="alltoall",  # Megatron checks it even for dense models of variable sequence length
        variable_seq_lengths=layout.pp > 1,  # pipeline stages must tell each other the length
        fp8_scale_format=contract.scale_format,
        fp8_backend=contract.backend,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, fp8=contract.train_fp8),
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
        parallel_output=True,
    )
    _tag_shards(model)
    set_row_orders(model, ModelGeometry.from_hf_config(hf_config), layout)
    return model


def _tag_shards(model: GPTModel) -> None:
    """Marks the weights that tensor-parallel ranks share out, as Megatron's own initialisation would: the gradient norm counts an
    untagged one on the first rank only."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)
