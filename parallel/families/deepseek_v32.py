"""DeepSeek-V3.2 and V3.2-Exp (arXiv 2512.02556): DeepSeek-V3 with sparse attention, of sequences so short that it is dense
(`attention.latent.Indexer`). SGLang serves it as a DeepSeek-V3, without indexers: they exist on GPUs alone, and the cache of their keys and
kernels for lists of tokens would be wasted."""

from typing import Any

from parallel import mtp_layers
from parallel.attention import Indexer
from parallel.families import deepseek_v3
from parallel.hf_config import MOST_POSITIONS, HFConfig
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry

list_layer, list_mtp_layer, list_mtp_copies = pre_norm_layer, mtp_layers.list_mtp_layer, mtp_layers.list_copies
ARCHITECTURE = "DeepseekV32ForCausalLM"
_OF_INDEXER = ("indexer_rope_interleave", "index_skip_topk_offset", "index_share_for_mtp_iteration")
"""Fields that change nothing but what an indexer selects."""


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(index_n_heads=64).require(index_topk_freq=1, indexer_types=["full"] * config.layers())
    return read_sparse(config)


def read_sparse(config: HFConfig, sharing: frozenset[int] = frozenset()) -> ModelGeometry:
    """Read a DeepSeek-V3 with sparse attention. `sharing`: see `Indexer`."""
    config.with_defaults(index_head_dim=128, index_topk=2048, first_k_dense_replace=3)  # as in transformers
    layers, dense = config.layers(), config.size("first_k_dense_replace", least=0)
    config.require(mlp_layer_types=["dense" if layer < dense else "sparse" for layer in range(layers)])
    config.size("q_lora_rank")  # the indexer needs it
    config.read.update(_OF_INDEXER)
    heads, dim = config.size("index_n_heads"), config.size("index_head_dim")
    indexer = Indexer(heads, dim, config.size("index_topk", most=MOST_POSITIONS), sharing)
    return deepseek_v3.read(config, indexer)


def describe_to_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config.json as that of a DeepSeek-V3, which ends sequences at index_topk tokens."""
    longest, names = config["index_topk"], ("max_position_embeddings", "model_max_length")
    limits = {name: min(config[name], longest) for name in names if config.get(name) is not None}
    kept = {name: value for name, value in config.items() if not name.startswith("index") and not name.endswith("layer_types")}
    return kept | {"max_position_embeddings": longest} | limits | {"model_type": "deepseek_v3", "architectures": [deepseek_v3.ARCHITECTURE]}
