"""GLM-5, 5.1, and 5.2: DeepSeek-V3.2 with wider heads, without groups of experts, and with other defaults. Its indexer rotates neighbors.
In GLM-5.2, most layers have no indexer and share the one of an earlier layer."""

from parallel.families import deepseek_v32
from parallel.hf_config import CORRECT, HFConfig, refuse
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

list_layer, list_mtp_layer, list_mtp_copies = deepseek_v32.list_layer, deepseek_v32.list_mtp_layer, deepseek_v32.list_mtp_copies
describe_to_engine = deepseek_v32.describe_to_engine
ARCHITECTURE = "GlmMoeDsaForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(index_n_heads=32, n_group=1, topk_group=1, rms_norm_eps=1e-5)  # as in transformers
    config.require(moe_router_dtype="float32")
    return deepseek_v32.read_sparse(config, _read_sharing(config))


def _read_sharing(config: HFConfig) -> frozenset[int]:
    """Return the layers without an indexer: by `indexer_types`, or by a frequency and an offset, as in transformers."""
    layers = config.layers()
    every = config.size("index_topk_freq") if config.get("index_topk_freq") is not None else 1
    first = config.size("index_skip_topk_offset") if config.get("index_skip_topk_offset") is not None else 2
    by_rule = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)]
    types = config.get("indexer_types") or by_rule
    if not isinstance(types, list) or len(types) != layers or not all(each in ("full", "shared") for each in types) or types[0] != "full":
        rule = 'must be a list of "full" or "shared" for each layer, the first one "full"'
        raise GeometryError("config.json indexer_types", types, rule, CORRECT)
    if every > 1 and types != by_rule:
        raise refuse("indexer_types", types, f"what index_topk_freq = {every} and index_skip_topk_offset = {first} say")
    return frozenset(layer for layer, each in enumerate(types) if each == "shared")
