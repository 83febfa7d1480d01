"""Qwen3.5 and 3.6, dense: the layers of Qwen3-Next with projections apart. Published checkpoints have a vision tower beside the decoder
(`parallel.wrappers`)."""

from parallel.families import qwen3_next
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer = qwen3_next.list_layer, qwen3_next.list_mtp_layer
ARCHITECTURE = "Qwen3_5ForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.require(mlp_only_layers=[])
    return qwen3_next.read_hybrid(config, grouped=False)
