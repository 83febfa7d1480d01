"""Models with sparse attention: what their families read and refuse, what an engine gets, and which tensors nobody trains."""

import json
from types import SimpleNamespace

import published_models
import pytest
from support.families import ARCHITECTURES

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import RunError
from megatron_rl.hf.write import describe_weights
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.checks import check_rank_tensors
from parallel.attention import Indexer
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import can_train_mtp, list_mtp_tensors
from parallel.reshard import list_stored_tensors
from parallel.sglang_shards import build_sglang_shards
from parallel.shards import GeometryError

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
CONTRACT = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified"))
PARTS = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}


def test_published_models_have_these_indexers_and_otherwise_latent_attention():
    configs = {line["model"]: line["config"] for line in map(json.loads, published_models.MODELS.read_text().splitlines())}
    for name, indexer, layers, heads, dims, groups in (
        ("deepseek-ai/DeepSeek-V3.2", Indexer(64, 128, 2048), 61, 128, (128, 64, 128), (8, 4)),
        ("zai-org/GLM-5", Indexer(32, 128, 2048), 78, 64, (192, 64, 256), (1, 1)),
        ("zai-org/GLM-5.1", Indexer(32, 128, 2048), 78, 64, (192, 64, 256), (1, 1)),
        ("zai-org/GLM-5.2", Indexer(32, 128, 2048, frozenset(range(78)) - {0, 1, 2, *range(6, 78, 4)}), 78, 64, (192, 64, 256), (1, 1)),
    ):
        model = ModelGeometry.from_hf_config(configs[name])
        (kind,) = set(model.attention)
        assert (kind.indexer, model.layers, kind.heads, model.most_tokens, model.mtp_layers) == (indexer, layers, heads, 2048, 1)
        assert (kind.nope_dim, kind.rope_dim, kind.v_dim) == dims and (model.experts.groups, model.experts.groups_used) == groups
        kept = model.list_kept()
        assert len(kept) == (layers - len(indexer.sharing)) * len(PARTS)
        assert all(model.is_kept_tensor(name) and not model.is_mtp_tensor(name) for name in kept)
        ahead = {name.rpartition(".indexer.")[2] for name in list_mtp_tensors(model) if ".indexer." in name}
        assert ahead == PARTS and not can_train_mtp(model)
        assert kept["model.layers.0.self_attn.indexer.wq_b.weight"].shape == (indexer.heads * 128, kind.q_rank)
        assert not kept.keys() & model.tensors().keys()


def test_other_families_keep_nothing_and_have_no_limit():
    model = ModelGeometry.from_hf_config(ARCHITECTURES["deepseek_v3"])
    assert model.list_kept() == {} and model.most_tokens is None and not model.is_kept_tensor("model.layers.0.self_attn.indexer.wk.weight")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"index_topk": 0}, "index_topk = 0: must be a positive integer"),
        ({"index_topk": "2048"}, "index_topk = 2048: must be a positive integer"),
        ({"index_n_heads": None}, "index_n_heads = None: is missing"),
        ({"indexer_types": ["full", "some", "full", "full"]}, "indexer_types = .*(is not supported|must be a list)"),
        ({"index_topk_pattern": "FSFS"}, "index_topk_pattern = FSFS: is not known"),
        ({"index_kpool": 4}, "index_kpool = 4: is not known"),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types = .* is not supported"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types = .* indexed_attention in every layer"),
        ({"q_lora_rank": None}, "q_lora_rank = None: is missing"),
        ({"rope_interleave": False}, "rope_interleave = False"),
    ],
)
def test_what_is_not_dense_up_to_topk_tokens_is_refused_by_field(family, changes, words):
    with pytest.raises(GeometryError, match=f"config.json {words}"):
        ModelGeometry.from_hf_config(ARCHITECTURES[family] | changes)


def test_an_indexer_that_several_layers_share_is_refused_for_deepseek():
    for changes in ({"index_topk_freq": 4}, {"indexer_types": ["full", "shared", "full", "full"]}):
        with pytest.raises(GeometryError, match="is not supported by the trainer"):
            ModelGeometry.from_hf_config(ARCHITECTURES["deepseek_v32"] | changes)


@pytest.mark.parametrize(
    "changes, sharing",
    [
        ({}, []),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, [1, 3]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 3]),
        ({"index_topk_freq": 2}, [2]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1, "indexer_types": ["full", "shared", "shared", "shared"]}, [1, 2, 3]),
    ],
)
def test_layers_that_share_an_indexer_are_those_of_transformers(changes, sharing):
    import transformers

    config = ARCHITECTURES["glm_moe_dsa"] | changes
    types = transformers.AutoConfig.for_model(**config).indexer_types
    kind = ModelGeometry.from_hf_config(config).attention[0]
    assert sorted(kind.indexer.sharing) == sharing == [layer for layer, each in enumerate(types) if each == "shared"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "must be a list .* the first one"),
        ({"indexer_types": ["full"]}, "must be a list"),
        ({"index_topk_freq": 0}, "index_topk_freq = 0: must be a positive integer"),
        ({"index_topk_freq": 2, "indexer_types": ["full"] * 4}, "which supports only what index_topk_freq = 2"),
    ],
)
def test_a_wrong_rule_of_sharing_is_refused_by_field(changes, words):
    with pytest.raises(GeometryError, match=words):
        ModelGeometry.from_hf_config(ARCHITECTURES["glm_moe_dsa"] | changes)


def test_a_router_in_low_precision_is_refused():
    ModelGeometry.from_hf_config(ARCHITECTURES["glm_moe_dsa"] | {"moe_router_dtype": "float32"})
    with pytest.raises(GeometryError, match="moe_router_dtype = bfloat16"):
        ModelGeometry.from_hf_config(ARCHITECTURES["glm_moe_dsa"] | {"moe_router_dtype": "bfloat16"})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_transformers_writes_is_the_same_model(family):
    import transformers

    config = ARCHITECTURES[family]
    written = transformers.AutoConfig.for_model(**config).to_dict()
    assert {"layer_types", "mlp_layer_types"} < written.keys()
    model, again = (ModelGeometry.from_hf_config(each) for each in (config, written | {"num_nextn_predict_layers": 0}))
    assert model == again


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gets_a_deepseek_v3_that_ends_at_topk_tokens(family):
    config = ARCHITECTURES[family] | {"layer_types": ["indexed_attention"] * 4, "indexer_types": ["full"] * 4, "model_max_length": 4096}
    served = describe_weights(config, CONTRACT)
    assert served["architectures"] == ["DeepseekV3ForCausalLM"] and served["max_position_embeddings"] == 256  # less than index_topk
    assert served["model_max_length"] == 384 and not any(name.startswith("index") or name.endswith("layer_types") for name in served)
    model, engine = ModelGeometry.from_hf_config(config), ModelGeometry.from_hf_config(served)
    assert engine.family == "deepseek_v3" and engine.most_tokens is None
    assert engine.tensors() == model.tensors() and engine.experts == model.experts and engine.norm_eps == model.norm_eps
    long = describe_weights({name: value for name, value in config.items() if name != "max_position_embeddings"}, CONTRACT)
    assert long["max_position_embeddings"] == 384
    exported = describe_weights(config, CONTRACT, to_engine=False)
    assert ModelGeometry.from_hf_config(exported) == model and exported["max_position_embeddings"] == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_with_an_indexer_is_refused_by_the_name_of_its_tensor(family):
    shards = build_sglang_shards(ModelGeometry.from_hf_config(ARCHITECTURES[family]), 1, 0)
    assert not any(".indexer." in shard.name for shard in shards)
    stored = list_stored_tensors(shards, CONTRACT.format_of)
    live = {name: SimpleNamespace(dtype=format.dtype, shape=shape) for name, (format, shape) in stored.items()}
    check_rank_tensors(0, shards, CONTRACT, live)
    name = "model.layers.0.self_attn.indexer.wk_weights_proj.weight"
    with pytest.raises(RunError, match=f"engine rank 0: {name} is .*, the precision contract says absent"):
        check_rank_tensors(0, shards, CONTRACT, live | {name: SimpleNamespace(dtype="bfloat16", shape=(132, 256))})


def test_indexers_take_no_cache_and_no_flops():
    dense, sparse = (ModelGeometry.from_hf_config(ARCHITECTURES[name]).attention[0] for name in ("deepseek_v3", "deepseek_v32"))
    assert dense.count_cache_bytes(1, lambda width: 2 * width) == sparse.count_cache_bytes(1, lambda width: 2 * width)
    assert (dense.flops_per_position, dense.head_counts) == (sparse.flops_per_position, sparse.head_counts)
