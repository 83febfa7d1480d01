"""Starts Megatron's process groups and builds the policy as a Megatron-Core GPTModel."""

import datetime
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.utils import configure_nvtx_profiling

from megatron_rl.config import TrainConfig
from megatron_rl.config.launch import read_launch
from megatron_rl.distributed.launch_store import join_ranks
from megatron_rl.errors import as_user_error
from megatron_rl.mcore.base.names import ModelChunks
from megatron_rl.mcore.layers.attention.yarn import extend_frequencies
from megatron_rl.mcore.layers.linear.high_precision import Embedding
from megatron_rl.mcore.layers.linear.norms import connect_norms
from megatron_rl.mcore.layers.linear.output_layer import OutputLayer, ValueHead
from megatron_rl.mcore.layers.mtp import LookaheadModel
from megatron_rl.mcore.layers.spec import build_decoder_spec
from megatron_rl.mcore.optim import quantizing_optimizer
from megatron_rl.mcore.platform import adam, cpu, products
from megatron_rl.mcore.transformer_config import QuantizedTransformerConfig, build_transformer_config
from megatron_rl.mcore.weights.load_weights import set_formats
from megatron_rl.observability.profiling import runs_under_nsys
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout
from parallel.megatron_shards import padded_vocabulary
from parallel.model_geometry import ModelGeometry
from parallel.transport.process_group import register_shared_gloo

_DEFAULT_TRAIN = TrainConfig()
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)  # how long ranks wait for each other at startup


def start_megatron(layout: Layout, seed: int, timeout_minutes: int = 30) -> None:
    """Join the process group (gloo on a CPU, NCCL on a GPU) and create Megatron's groups for `layout`. Rank and world size come from
    torchrun's environment; without it, the world is this process. Collectives time out after `timeout_minutes`, which must cover the time
    that ranks wait for rank 0 while the engine generates."""
    launch = read_launch(joins=True)
    configure_nvtx_profiling(runs_under_nsys())  # enables Megatron's NVTX ranges
    cpu.install()
    adam.install()
    products.add_gradients_in_place()
    quantizing_optimizer.install()
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else register_shared_gloo()
        join_ranks(backend, _RENDEZVOUS_TIMEOUT)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,  # only Megatron's own distributed-optimizer checkpoints need them
    )
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(datetime.timedelta(minutes=timeout_minutes))
    torch.manual_seed(seed)  # Megatron seeds generators of GPUs only; torch's own of the CPU starts from entropy
    model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def stop_megatron() -> None:
    """Destroy the process groups."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_model(
    hf_config: Mapping[str, Any], layout: Layout, contract: PrecisionContract, train: TrainConfig = _DEFAULT_TRAIN
) -> ModelChunks:
    """Build this rank's part of a model from a Hugging Face config, with uninitialized weights (see `weights.load_weights`). Return a
    GPTModel, or the list of virtual pipeline stages if vpp > 1. Linear layers compute in `contract.trainer_format`; everything else uses
    the contract's high-precision dtype. Raise UserError if the trainer does not support the model."""
    with as_user_error():
        geometry = ModelGeometry.from_hf_config(hf_config)
    if contract.sums_by_ranks and torch.cuda.is_available():
        products.share_products()
    config, length = build_transformer_config(geometry, layout, contract, train), hf_config["max_position_embeddings"]
    chunks = [_build_chunk(geometry, length, config, stage if layout.vpp > 1 else None) for stage in range(layout.vpp)]
    set_formats(chunks, geometry, layout, contract)
    return chunks if layout.vpp > 1 else chunks[0]


def _build_chunk(geometry: ModelGeometry, length: int, config: QuantizedTransformerConfig, vp_stage: int | None) -> GPTModel:
    rope = geometry.rope
    model = (LookaheadModel if geometry.trains_mtp else GPTModel)(
        config=config,
        transformer_layer_spec=build_decoder_spec(config, vp_stage=vp_stage),
        vocab_size=padded_vocabulary(geometry.vocab, config.tensor_model_parallel_size),
        max_sequence_length=length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=geometry.tied,
        position_embedding_type="rope",
        rotary_percent=rope.share,
        rotary_base=rope.theta,
        rope_scaling=rope.llama3_factor is not None,
        rope_scaling_factor=rope.llama3_factor or 1.0,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if rope.yarn and not config.multi_latent_attention:
        plain = model.rotary_pos_emb
        plain.inv_freq = extend_frequencies(plain.inv_freq, rope.theta, rope.yarn)
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = Embedding  # Megatron hard-codes the classes of embedding and output layer
    if model.post_process and geometry.value_head:
        model.output_layer = ValueHead(config, model.output_layer.tp_group)
    elif model.post_process:
        model.output_layer.__class__ = OutputLayer
    _tag_experts(model)
    connect_norms(model)
    if torch.cuda.is_available():
        return model.cuda(torch.cuda.current_device())  # Megatron moves only its own layers
    ahead = model.mtp.layers if hasattr(model, "mtp") else []
    for module in (model, *model.decoder.layers, *ahead):  # layers too: recomputation calls them without the model
        cpu.run_forward_single_threaded(module)
    return model


def _tag_experts(model: GPTModel) -> None:
    """Tag the weights of all experts as such, so that they have buffers and an optimizer of their own. Megatron leaves out experts that
    are sharded as the rest (ep = 1, etp = tp)."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.is_expert:
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = False
