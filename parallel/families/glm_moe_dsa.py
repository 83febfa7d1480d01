"""GLM-5 and 5.1: DeepSeek-V3.2 with wider heads, without groups of experts, and with other defaults. Its indexer rotates neighbors."""

from parallel.families import deepseek_v32
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer, list_mtp_copies = deepseek_v32.list_layer, deepseek_v32.list_mtp_layer, deepseek_v32.list_mtp_copies
describe_to_engine = deepseek_v32.describe_to_engine
ARCHITECTURE = "GlmMoeDsaForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(index_n_heads=32, n_group=1, topk_group=1, rms_norm_eps=1e-5)  # as in transformers
    config.require(moe_router_dtype="float32")
    return deepseek_v32.read_sparse(config)
