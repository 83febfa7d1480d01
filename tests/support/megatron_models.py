"""Real Megatron models in any layout: their named tensors, their memory, and single FP8 layers."""

import torch
import torch.distributed as dist

from megatron_rl.hf.files import read_config
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedColumnParallelLinear, QuantizedRowParallelLinear
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.mcore.transformer_config import QuantizedTransformerConfig
from megatron_rl.mcore.weights.load_weights import build_rank_shards, load_checkpoint
from parallel.formats import FP8
from support.trainer import start


def load_model_chunks(folder, contract, layout):
    """Return this rank's virtual pipeline stages, built, loaded and quantized."""
    start(layout)
    hf_config = read_config(folder)
    chunks = get_model_chunks(build_model(hf_config, layout, contract))
    load_checkpoint(chunks, folder, build_rank_shards(hf_config, layout, dist.get_rank()))
    return chunks


def build(kind, scale_format, sequence_parallel, weight, **changes):
    """Return this rank's quantized layer of a "column" (N split over ranks) or "row" (K split) kind, with its slice of `weight` `[N,
    K]`."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    config = QuantizedTransformerConfig(
        num_layers=1,
        hidden_size=weight.shape[1],
        num_attention_heads=max(tp, 2),
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        linear_format=FP8.with_scales(scale_format),
    )
    options = dict(config=config, init_method=torch.nn.init.zeros_, bias=False) | {"skip_bias_add": False} | changes
    column = kind == "column"
    make = QuantizedColumnParallelLinear if column else QuantizedRowParallelLinear
    layer = make(weight.shape[1], weight.shape[0], **options, **({"gather_output": False} if column else {"input_is_parallel": True}))
    with torch.no_grad():
        layer.quantize(weight.chunk(tp, dim=0 if column else 1)[rank])
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    return layer
