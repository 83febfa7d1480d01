"""Gated delta nets and gated attention: rows of both sides by hand, what config.json may say, and wrappers with a vision tower."""

import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from support.families import ARCHITECTURES
from support.geometries import HYBRIDS, published_model
from support.golden import slow_cut
from support.golden.slow_cut import as_fp8

from megatron_rl.config import PrecisionConfig
from megatron_rl.cost.weights import count_layer_kinds
from megatron_rl.hf.write import describe_weights
from megatron_rl.precision.contract import PrecisionContract
from parallel.attention import GatedDeltaNet, SoftmaxAttention
from parallel.formats import BF16, INT8
from parallel.layout import Coordinates, Layout
from parallel.layout_hints import find_engine_problem, find_trainer_problem, keep_one_layer_per_kind
from parallel.megatron_shards import build_megatron_shards, build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.sglang_shards import build_sglang_shards
from parallel.shards import GeometryError
from parallel.wrappers import WRAPPER, rewrap, unwrap

SPLIT, NEXT = (ModelGeometry.from_hf_config(ARCHITECTURES[name]) for name in ("qwen3_5_text", "qwen3_next"))
LINEAR, FULL = "model.layers.0.linear_attn.", "model.layers.1.self_attn."
K, V, DIM, RATIO = 4, 8, 64, 2  # heads of the tiny models, their width, and value heads of each key head


def values(shards, name, source):
    shard = next(shard for shard in shards if shard.name == name)
    return slow_cut.lay(shard, source)


def both_sides(model, tp, source):
    """Yield (rank, function of Megatron's name, function of SGLang's name) -> rows of the parameter of layer 0."""
    for rank in range(tp):
        trainer = build_megatron_shards(model, Layout(tp=tp), Coordinates(tp=rank))
        engine = build_sglang_shards(model, tp, rank)
        yield (
            rank,
            lambda name, shards=trainer: values(shards, f"decoder.layers.0.self_attention.{name}", source),
            lambda name, shards=engine: values(shards, LINEAR + name, source),
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_has_the_rows_of_its_heads_with_projections_apart(tp):
    source = slow_cut.checkpoint(SPLIT)
    q, k, v = np.split(source[LINEAR + "in_proj_qkv.weight"], [K * DIM, 2 * K * DIM])
    conv = np.split(source[LINEAR + "conv1d.weight"], [K * DIM, 2 * K * DIM])
    b, a, z = (source[f"{LINEAR}in_proj_{name}.weight"] for name in "baz")
    for rank, trainer, engine in both_sides(SPLIT, tp, source):

        def own(*parts, rank=rank):
            return np.concatenate([np.split(part, tp)[rank] for part in parts])

        expected = {"in_proj_qkvz.weight": own(q, k, v, z), "in_proj_ba.weight": own(b, a), "conv1d.weight": own(*conv)}
        expected |= {name: own(source[LINEAR + name]) for name in ("A_log", "dt_bias")}
        expected["out_proj.weight"] = np.split(source[LINEAR + "out_proj.weight"], tp, 1)[rank]
        for name, rows in expected.items():
            assert np.array_equal(trainer(name), rows) and np.array_equal(engine(name), rows), name
        assert np.array_equal(trainer("norm.weight"), source[LINEAR + "norm.weight"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_megatron_sorts_rows_that_the_checkpoint_groups_by_key_head(tp):
    source = slow_cut.checkpoint(NEXT)
    for rank, trainer, engine in both_sides(NEXT, tp, source):
        for name, sizes in (("qkvz", (DIM, DIM, RATIO * DIM, RATIO * DIM)), ("ba", (RATIO, RATIO))):
            own = np.split(source[f"{LINEAR}in_proj_{name}.weight"], tp)[rank]
            assert np.array_equal(engine(f"in_proj_{name}.weight"), own)
            parts = np.split(own.reshape(K // tp, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
            assert np.array_equal(trainer(f"in_proj_{name}.weight"), np.concatenate([part.reshape(-1, own.shape[1]) for part in parts]))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", [SPLIT, NEXT], ids=["split", "grouped"])
def test_gated_attention_has_a_gate_for_each_query_head(model, tp):
    """Megatron: [queries | gates | key | value] of each group, cut anywhere. SGLang: the checkpoint's [query | gate] of each head, and
    whole key and value heads, in the layer itself."""
    source, heads, groups = slow_cut.checkpoint(model), 4, 2
    q, k, v = (source[f"{FULL}{part}_proj.weight"] for part in "qkv")
    q = q.reshape(groups, heads // groups, 2, 128, -1)
    rows = []
    for group in range(groups):
        own = [q[group, :, 0], q[group, :, 1], *(x.reshape(groups, 128, -1)[group] for x in (k, v))]
        rows += [part.reshape(-1, model.hidden) for part in own]
    for rank in range(tp):
        shards = build_megatron_shards(model, Layout(tp=tp), Coordinates(tp=rank))
        found = values(shards, "decoder.layers.1.self_attention.linear_qkv.weight", source)
        assert np.array_equal(found, np.split(np.concatenate(rows), tp)[rank])
        group = rank * groups // tp
        whole = [np.split(x, min(tp, groups))[group * min(tp, groups) // groups] for x in (k, v)]
        own = np.concatenate([np.split(q.reshape(-1, model.hidden), tp)[rank], *whole])
        assert np.array_equal(values(build_sglang_shards(model, tp, rank), "model.layers.1.qkv_proj.weight", source), own)


def count_parameters(model):
    """Return the elements of all tensors, counting one layer of each kind."""
    ends, *layers, last = (sum(piece.tensor_rect.rows * piece.tensor_rect.cols for weight in part for piece in weight.pieces)
                           for part in keep_one_layer_per_kind(model).list_weights())  # fmt: skip
    return ends + last + sum(size * count for size, count in zip(layers, count_layer_kinds(model, Layout(), 0), strict=True))


def test_published_models_have_the_published_sizes_kinds_and_states():
    parameters = {"Qwen3.5-9B": 8.95e9, "Qwen3.6-27B": 26.9e9, "Qwen3.5-35B-A3B": 34.7e9, "Qwen3.5-122B-A10B": 122.1e9}
    for name, count in (parameters | {"Qwen3-Next-80B-A3B": 79.7e9}).items():
        model = published_model(name)
        assert count_parameters(model) == pytest.approx(count, rel=2e-3)
        assert [isinstance(kind, SoftmaxAttention) for kind in model.attention] == [False, False, False, True] * (model.layers // 4)
        assert model.zero_centered_norms and (model.rope.share, model.rope.theta) == (0.25, 1e7)
        assert len(model.layer_kinds) == 2
    assert all(name.startswith("mtp.") and model.is_mtp_tensor(name) for name in list_mtp_tensors(published_model("Qwen3.5-9B")))
    delta, full = (kind.attention for kind in published_model("Qwen3-Next-80B-A3B").layer_kinds)
    assert delta == GatedDeltaNet(k_heads=16, v_heads=32, k_dim=128, v_dim=128, taps=4, grouped=True)
    assert full.gated and full.qk_norm and (full.heads, full.kv_heads, full.head_dim) == (16, 2, 256)
    assert published_model("Qwen3.5-35B-A3B").experts.shared_gate and not published_model("Qwen3.5-9B").experts
    # by hand: 32 states of 128 x 128 float32, 3 inputs of 2 * 2048 + 4096 channels in BF16; a rank of two has half of both
    assert delta.count_state_bytes(1, 2) == 2 * delta.count_state_bytes(2, 2) == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert delta.count_cache_bytes(1, lambda width: 2 * width) == 0 == full.count_state_bytes(1, 2)
    assert full.count_cache_bytes(8, lambda width: 2 * width) == 2 * 256 * 2


def test_layouts_of_published_models():
    """Ranks share key heads of delta nets, and may share a key-value head of the attention. A shared expert 512 wide has 4 blocks."""
    for name in HYBRIDS:
        model = published_model(name)
        for tp in (1, 2, 4) if model.experts and model.experts.shared_ffn == 512 else (1, 2, 4, 8):
            etp = {"etp": 1, "ep": tp} if model.experts else {}
            assert find_trainer_problem(model, Layout(tp=tp, **etp), as_fp8) is None
            assert find_engine_problem(model, tp, tp if model.experts else 1, as_fp8) is None


UNEQUAL = ModelGeometry.from_hf_config(ARCHITECTURES["qwen3_5_text"] | {"linear_num_key_heads": 2})


@pytest.mark.parametrize("problem, words", [
    (lambda: build_trainer_shards(UNEQUAL, Layout(tp=4)), "train.layout.tp = 4: must divide linear_num_key_heads .2.; use a divisor of 2"),
    (lambda: build_sglang_shards(UNEQUAL, 4, 0), "rollout.tp = 4: must divide linear_num_key_heads .2."),
    (lambda: UNEQUAL.attention[0].check_context_ranks(2, 2), "train.layout.cp = 2: tp . cp = 2 . 2 must divide linear_num_key_heads .2."),
])  # fmt: skip
def test_ranks_must_share_the_heads_of_delta_nets(problem, words):
    with pytest.raises(GeometryError, match=words):
        problem()


@pytest.mark.parametrize("family, changes, words", [
    ("qwen3_5_text", {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_value_head_dim": 128}, "in_proj_qkvz.* = 192 rows"),
    ("qwen3_next", {"linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_value_head_dim": 32}, "in_proj_qkvz.* = 192 rows"),
    ("glm4", {"intermediate_size": 192}, "gate_up_proj.* = 192 rows"),
])  # fmt: skip
def test_layers_that_sglang_merges_must_be_whole_blocks_even_if_the_checkpoint_has_one_tensor(family, changes, words):
    """The trainer quantizes the tensor as a whole, whose rows are a multiple of 128. SGLang would raise while it builds the layer."""
    model = ModelGeometry.from_hf_config(ARCHITECTURES[family] | changes)
    assert find_trainer_problem(model, Layout(), as_fp8) is None
    assert re.search(f"{words}: .* each of 1 engine ranks needs a multiple of 128 rows", str(find_engine_problem(model, 1, 1, as_fp8)))
    assert find_engine_problem(model, 1, 1, lambda _: BF16) is None


def test_gates_stay_in_high_precision_in_int8_and_need_a_format_that_can_say_so():
    assert INT8.quantization_config(SPLIT.unquantized_modules)["ignore"] == ["in_proj_ba", "in_proj_b", "in_proj_a", "conv1d"]
    assert "ignore" not in INT8.quantization_config()
    kind, silent = SPLIT.attention[0], replace(INT8, quantization=(("quant_method", "other"),))
    assert not kind.refuse_engine_format(INT8) and "gated delta nets" in kind.refuse_engine_format(silent)


TINY = {name: value for name, value in ARCHITECTURES["qwen3_next"].items() if name != "full_attention_interval"}


def test_layer_types_and_the_interval_are_two_names_of_the_same():
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    written_by_transformers = ModelGeometry.resolve_config(TINY | {"layer_types": types})
    assert written_by_transformers["full_attention_interval"] == 3  # SGLang has no default
    assert ModelGeometry.resolve_config(TINY)["full_attention_interval"] == 4
    model = ModelGeometry.from_hf_config(TINY | {"num_hidden_layers": 7, "full_attention_interval": 3})
    assert [kind.module for kind in model.attention] == ["linear_attn", "linear_attn", "self_attn"] * 2 + ["linear_attn"]
    assert model.attention_of(7) == model.attention[5]  # of a layer for multi-token prediction


def test_kinds_of_layers_may_have_any_order():
    """An engine gets `layer_types` alone, since no interval means the same."""
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model, resolved = (read(TINY | {"layer_types": types}) for read in (ModelGeometry.from_hf_config, ModelGeometry.resolve_config))
    assert [kind.module for kind in model.attention] == ["self_attn", "linear_attn", "linear_attn", "self_attn"]
    assert resolved["layer_types"] == types and "full_attention_interval" not in resolved
    assert ModelGeometry.from_hf_config(resolved) == model


@pytest.mark.parametrize("changes, words", [
    ({"layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attention_interval": 2},
     "layer_types = .*: differs from full_attention_interval = 2, .*; remove one of them"),
    ({"layer_types": ["full_attention"] * 4, "full_attention_interval": 0}, "full_attention_interval = 0: must be a positive integer"),
    ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types = .*: must name linear_attention or full_attention"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types = .*: must name .* for each of 4 layers"),
    ({"layer_types": "full_attention"}, "layer_types = full_attention: must name"),
    ({"layer_types": []}, "layer_types = .*: must name"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types = .*: leaves no full attention in 4 layers"),
    ({"full_attention_interval": 5}, "full_attention_interval = 5: leaves no full attention in 4 layers"),
    ({"full_attention_interval": 0}, "full_attention_interval = 0: must be a positive integer"),
    ({"linear_num_value_heads": 6}, "linear_num_value_heads = 6: must be a multiple of linear_num_key_heads .4."),
    ({"linear_num_key_heads": None}, "linear_num_key_heads = None: is missing"),
    ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim"),
    ({"attn_output_gate": False}, "attn_output_gate = False: .* supports only True"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = bfloat16: .* supports only float32"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type = sigmoid: .* supports only swish"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ({"attention_bias": True}, "attention_bias"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor = 0.25: .* supports only 0.5"),
    ({"head_dim": 100, "partial_rotary_factor": 0.25}, "head_dim = 25.0: elements of a head rotate in pairs"),
    ({"ple_layer_ids": [2]}, "ple_layer_ids"),
])  # fmt: skip
def test_settings_of_hybrids_are_refused_by_field(changes, words):
    with pytest.raises(GeometryError, match=f"config.json .*{words}"):
        ModelGeometry.from_hf_config(TINY | changes)


def test_a_wrapper_is_read_as_its_decoder_and_wrapped_again():
    wrapper = HYBRIDS["Qwen3.5-35B-A3B"]
    config = unwrap(wrapper)
    assert config["vocab_size"] == 248320 and unwrap(config) == config  # what every part of the program reads
    model = ModelGeometry.from_hf_config(wrapper)
    assert model == ModelGeometry.from_hf_config(config) and model.family == "qwen3_5_moe_text"
    model = keep_one_layer_per_kind(model)
    names = model.tensors()
    assert "lm_head.weight" in names and "model.language_model.layers.1.self_attn.q_proj.weight" in names
    assert not any(name.startswith(("model.layers.", "model.visual.")) for name in names)
    assert model.is_vision_tensor("model.visual.blocks.0.attn.qkv.weight") and not SPLIT.is_vision_tensor("model.visual.x")
    assert {shard.name.split(".")[1] for shard in build_sglang_shards(model, 1, 0)} == {"embed_tokens", "layers", "norm", "weight"}
    resolved = ModelGeometry.resolve_config(wrapper)
    assert (resolved["model_type"], resolved["architectures"]) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert resolved["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    assert resolved["partial_rotary_factor"] == 0.25 and WRAPPER not in resolved  # SGLang reads it outside of rope_parameters
    whole = rewrap(resolved, config)
    assert {name: value for name, value in whole.items() if name != "text_config"} == {
        name: value for name, value in wrapper.items() if name != "text_config"
    } | {"dtype": "bfloat16"}
    for name, value in wrapper["text_config"].items():
        assert name == "dtype" or whole["text_config"][name] == value
    assert ModelGeometry.from_hf_config(whole) == ModelGeometry.from_hf_config(wrapper)


def test_an_engine_in_fp8_is_told_which_layers_stay_in_high_precision():
    fp8 = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified"))
    config = describe_weights(HYBRIDS["Qwen3.5-35B-A3B"], fp8)
    modules = config["quantization_config"]["modules_to_not_convert"]
    assert set(modules) == {"lm_head", "in_proj_ba", "in_proj_b", "in_proj_a", "conv1d", "shared_expert_gate", "visual"}
    assert describe_weights(ARCHITECTURES["qwen3"], fp8)["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    model = keep_one_layer_per_kind(published_model("Qwen3.5-35B-A3B"))
    roles = {tensor.role: fp8.format_of(tensor.role).name for tensor in model.tensors().values()}
    high = {"delta_gates", "delta_conv", "shared_gate", "router", "norm", "embedding", "lm_head"}
    assert {role for role, format in roles.items() if format == "bf16"} == high and roles["delta_decay"] == "fp32"


@pytest.mark.parametrize("changes, words", [
    ({"language_model_only": True}, "language_model_only = True"),
    ({"audio_config": {"depth": 1}}, "audio_config"),
    ({"tie_word_embeddings": True}, "text_config.tie_word_embeddings = False: .* only True"),
    ({"model_type": "qwen3_5"}, "model_type = qwen3_5: has a text_config of qwen3_5_moe_text"),
])  # fmt: skip
def test_settings_of_wrappers_are_refused_by_field(changes, words):
    config = deepcopy(HYBRIDS["Qwen3.5-35B-A3B"])
    if "tie_word_embeddings" in changes:
        config[WRAPPER] = {name: value for name, value in config.items() if name != "text_config"} | changes
        config = config.pop("text_config") | {WRAPPER: config[WRAPPER]}
        changes = {}
    with pytest.raises(GeometryError, match=f"config.json .*{words}"):
        ModelGeometry.from_hf_config(config | changes)
