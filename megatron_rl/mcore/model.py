"""Builds the policy as a real Megatron-Core GPTModel, and starts the process groups it lives in."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.utils import configure_nvtx_profiling

from megatron_rl.config import TrainConfig
from megatron_rl.errors import as_user_error
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.checkpoint.rng import seed_python_and_numpy
from megatron_rl.mcore.layers.linear.output_layer import install_output_layer
from megatron_rl.mcore.layers.linear.plain import install_embedding
from megatron_rl.mcore.layers.linear.value_head import install_value_head
from megatron_rl.mcore.layers.mtp import LookaheadModel
from megatron_rl.mcore.layers.norm_fusion import connect_norms
from megatron_rl.mcore.layers.spec import build_decoder_spec
from megatron_rl.mcore.model_options import attention_options, expert_options, layout_options, recompute_options
from megatron_rl.mcore.names import ModelChunks, get_model_chunks
from megatron_rl.mcore.optim import quantizing_optimizer
from megatron_rl.mcore.platform import adam, cpu
from megatron_rl.mcore.weights.load_weights import set_formats
from megatron_rl.observability.profiling import runs_under_nsys
from megatron_rl.precision.contract import PrecisionContract
from parallel.formats import BF16, TensorFormat
from parallel.layout import Layout
from parallel.megatron_shards import padded_vocabulary
from parallel.model_geometry import ModelGeometry
from parallel.transport.process_group import register_shared_gloo

_DEFAULT_TRAIN = TrainConfig()
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
"""How long the ranks wait for each other at the start."""


@dataclass
class QuantizedTransformerConfig(TransformerConfig):
    """Megatron's configuration plus the fields of the linear layers: the contract's format of the trainer, its
    backend, and its order of row-parallel sums; whether attention reads keys and values in E4M3, and whether it has scales for them."""

    linear_format: TensorFormat = BF16
    linear_backend: str = "emulated"
    sums_by_tree: bool = True
    at_once: tuple[int, int] = (1, 1)
    """Micro-batches that take turns in passes without and with gradient."""
    quantize_kv: bool = False
    scale_kv_by_layer: bool = False
    post_norms: bool = False
    """Norm what attention and MLP add to the residual stream."""
    attention_length: float = math.inf
    """See `ModelGeometry.attention_length`."""
    trained_mtp_layers: int = 0
    """Layers for multi-token prediction behind the last stage. Megatron's own `mtp_num_layers` stays unset: it would change the model's
    pass and sum the embedding's gradient over two stages."""


@dataclass
class QuantizedMLATransformerConfig(QuantizedTransformerConfig, MLATransformerConfig):
    """The same for multi-latent attention."""


def start_megatron(layout: Layout, seed: int, timeout_minutes: int = 30) -> None:
    """Join the process group (gloo on a CPU, NCCL on a GPU) and create Megatron's groups for `layout`.

    Rank and world size come from torchrun's environment; without it the world is one process. A collective fails after
    `timeout_minutes`, which must cover the time that ranks other than 0 wait while the engine generates.
    """
    configure_nvtx_profiling(runs_under_nsys())  # Megatron marks the parts of each layer
    cpu.install()
    adam.install()
    quantizing_optimizer.install()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else register_shared_gloo()
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_RENDEZVOUS_TIMEOUT)
        else:
            dist.init_process_group(backend, timeout=_RENDEZVOUS_TIMEOUT, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,  # only Megatron's own checkpoints of a distributed optimizer need them
    )
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(datetime.timedelta(minutes=timeout_minutes))
    model_parallel_cuda_manual_seed(seed)
    seed_python_and_numpy(seed)


def stop_megatron() -> None:
    """Leave the process groups."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_model(
    hf_config: Mapping[str, Any], layout: Layout, contract: PrecisionContract, train: TrainConfig = _DEFAULT_TRAIN
) -> ModelChunks:
    """Build this rank's part of the model of a Hugging Face config.json, with uninitialized weights (see `load_weights`): a GPTModel, or
    with vpp the list of its virtual pipeline stages.

    Linear layers compute in `contract.trainer_format`; everything else has the contract's high-precision dtype. `train` sets
    sequence parallelism and recomputation. Raise UserError for a model that the trainer does not support.
    """
    with as_user_error():
        geometry = ModelGeometry.from_hf_config(hf_config)
    config, length = _megatron_config(geometry, layout, contract, train), hf_config["max_position_embeddings"]
    chunks = [_build_chunk(geometry, length, config, contract, stage if layout.vpp > 1 else None) for stage in range(layout.vpp)]
    set_formats(chunks, geometry, layout, contract)
    return chunks if layout.vpp > 1 else chunks[0]


def freeze(model: ModelChunks) -> ModelChunks:
    """Turn off the gradients of all parameters; return the model."""
    for chunk in get_model_chunks(model):
        chunk.requires_grad_(False)
    return model


def _megatron_config(
    geometry: ModelGeometry, layout: Layout, contract: PrecisionContract, train: TrainConfig
) -> QuantizedTransformerConfig:
    dtype, quantized = getattr(torch, contract.high_format.dtype), contract.trainer_format.quantized
    return (QuantizedMLATransformerConfig if geometry.latent else QuantizedTransformerConfig)(
        num_layers=geometry.layers,
        hidden_size=geometry.hidden,
        num_attention_heads=geometry.heads,
        ffn_hidden_size=geometry.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=geometry.norm_eps,
        qk_layernorm=geometry.qk_norm,  # of heads: not of latent queries, whose gradients Megatron would sum over tensor-parallel ranks
        add_bias_linear=False,
        add_qkv_bias=geometry.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,  # both fusions compile with torch.compile and a C++ compiler
        use_te_activation_func=swiglu.is_fused(),  # ours, by the layers' spec
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        calculate_per_token_loss=True,  # gradients are sums over replicas, divided by the tokens of all of them
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,  # apex's kernel; the FP8 layers accumulate in place by themselves
        moe_token_dispatcher_type="alltoall",  # Megatron checks it even for dense models of variable sequence length
        linear_format=contract.trainer_format,
        linear_backend=contract.backend,
        sums_by_tree=contract.sums_by_tree,
        quantize_kv=contract.trainer_quantizes_kv,
        scale_kv_by_layer=contract.scales_kv_by_layer,
        post_norms=geometry.post_norms,
        attention_length=geometry.attention_length,
        trained_mtp_layers=geometry.mtp_layers if geometry.trains_mtp else 0,
        at_once=(train.count_at_once(layout, quantized, False), train.count_at_once(layout, quantized, True)),
        **layout_options(layout, train),
        **recompute_options(train, geometry),
        **attention_options(geometry),
        **expert_options(geometry),
    )


def _build_chunk(
    geometry: ModelGeometry, length: int, config: QuantizedTransformerConfig, contract: PrecisionContract, vp_stage: int | None
) -> GPTModel:
    build = partial(LookaheadModel, contract.trainer_format.quantized) if geometry.trains_mtp else GPTModel
    model = build(
        config=config,
        transformer_layer_spec=build_decoder_spec(config, quantized=contract.trainer_format.quantized, vp_stage=vp_stage),
        vocab_size=padded_vocabulary(geometry.vocab, config.tensor_model_parallel_size),
        max_sequence_length=length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=geometry.tied,
        position_embedding_type="rope",
        rotary_percent=geometry.rope.share,
        rotary_base=geometry.rope.theta,
        rope_scaling=geometry.rope.llama3_factor is not None,
        rope_scaling_factor=geometry.rope.llama3_factor or 1.0,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    install_embedding(model)
    (install_value_head if geometry.value_head else install_output_layer)(model)
    _tag_shards(model)
    connect_norms(model)
    if torch.cuda.is_available():
        return model.cuda(torch.cuda.current_device())  # Megatron moves only its own layers
    ahead = model.mtp.layers if hasattr(model, "mtp") else []
    for module in (model, *model.decoder.layers, *ahead):  # a layer by itself where the backward pass recomputes it
        cpu.run_forward_single_threaded(module)
    return model


def _tag_shards(model: GPTModel) -> None:
    """Tag the weights that tensor-parallel ranks split, as Megatron's own initialization would: the gradient norm counts an untagged one
    on the first rank only. Also make experts' gradients always be summed over the ranks that hold the same expert: Megatron's own tag
    misses replicas of an expert that is cut less than the rest (ep = 1, etp < tp)."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, RowParallelLinear)), 1)
            if getattr(module, "is_expert", False):
                module.weight.allreduce = False
