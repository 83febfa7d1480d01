"""Widening a model so that shards consist of whole blocks: random widths and heads, published models, and refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import ARCHITECTURES
from support.geometries import HYBRIDS, PUBLISHED
from support.golden.slow_cut import as_fp8
from support.models import make_checkpoint, make_model
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.hf.align import Alignment, align_config, widen
from megatron_rl.hf.files import INDEX, read_config
from megatron_rl.hf.read import HFCheckpoint
from parallel.layout import Layout
from parallel.layout_hints import find_engine_problem, find_trainer_problem
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError, Region, take_all


def is_whole(config: dict, tp: int, etp: int) -> bool:
    """Return whether neither trainer nor engine cuts a block."""
    model = ModelGeometry.from_hf_config(config)
    layout = Layout(tp=tp, etp=etp, ep=tp // etp if model.experts else 1)
    if find_trainer_problem(model, layout, as_fp8):
        return False
    if model.experts and not model.experts.dense_in_engine:  # SGLang builds no dense layers here
        config = {**config, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return find_engine_problem(ModelGeometry.from_hf_config(config), tp, layout.ep, as_fp8) is None


WIDENED = [name for name, config in ARCHITECTURES.items() if all(kind.can_widen for kind in ModelGeometry.from_hf_config(config).attention)]


@given(
    name=st.sampled_from(sorted(WIDENED)),
    groups=st.integers(1, 9),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([32, 64, 80, 128]),
    hidden=st.integers(1, 40),
    widths=st.tuples(st.integers(1, 700), st.integers(1, 300)),
    tp=st.sampled_from([1, 2, 4]),
    whole_experts=st.booleans(),
)
def test_random_widths_are_aligned_and_heads_stay_in_their_groups(name, groups, per_group, head_dim, hidden, widths, tp, whole_experts):
    heads, latent = groups * per_group, "kv_lora_rank" in ARCHITECTURES[name]
    config = ARCHITECTURES[name] | {"num_attention_heads": heads, "hidden_size": 32 * hidden}
    config |= {"num_key_value_heads": heads if latent else groups}
    config |= {"intermediate_size": widths[0]} | ({} if latent else {"head_dim": head_dim})
    config |= {"moe_intermediate_size": widths[1]} if "moe_intermediate_size" in config else {}
    model = ModelGeometry.from_hf_config(config)
    etp = 1 if whole_experts and model.experts else tp
    wide_config = align_config(config, Alignment(128, tp, etp))
    wide = ModelGeometry.from_hf_config(wide_config)
    assert is_whole(wide_config, tp, etp)
    now, before = wide.attention[0], model.attention[0]
    assert (
        latent or now.heads * before.kv_heads == now.kv_heads * before.heads
    )  # head i uses key-value head i // (heads / kv_heads), as before
    assert now.head_dim == before.head_dim and wide.hidden % 128 == 0
    assert now.heads >= before.heads and wide.hidden - model.hidden >= 0 and 0 <= wide.ffn - model.ffn < 128 * tp
    assert wide.norm_eps * wide.hidden == pytest.approx(model.norm_eps * model.hidden)
    assert align_config(wide_config, Alignment(128, tp, etp)) == wide_config


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in HYBRIDS])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_published_models_are_aligned_and_unchanged_if_aligned_already(name, tp):
    model = ModelGeometry.from_hf_config(PUBLISHED[name])
    etp = 1 if model.experts else tp
    wide_config = align_config(PUBLISHED[name], Alignment(128, tp, etp))
    assert is_whole(wide_config, tp, etp)
    assert (ModelGeometry.from_hf_config(wide_config) == model) == is_whole(PUBLISHED[name], tp, etp)


@pytest.mark.parametrize("family, module", [
    ("qwen3_next", "linear_attn"), ("deepseek_v32", "self_attn"), ("glm_moe_dsa", "self_attn"), ("gpt_oss", "self_attn"),
])  # fmt: skip
def test_delta_nets_indexers_and_sinks_are_not_widened(family, module):
    with pytest.raises(GeometryError, match=f"--align = 128: cannot widen {module}, which {family} has"):
        align_config(ARCHITECTURES[family], Alignment(128))


def test_widened_tensors_hold_the_original_values_and_zeros():
    """GLM-4 stores gate and up as one tensor, and each half gets additional rows. Norm weights are scaled in float32."""
    config = ARCHITECTURES["glm4"] | {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 5}
    wide_config = align_config(config, Alignment(128))
    model, wide = ModelGeometry.from_hf_config(config), ModelGeometry.from_hf_config(wide_config)
    heads = wide.attention[0]
    assert (wide.hidden, heads.heads, heads.kv_heads, wide.ffn) == (384, 3, 1, 128)  # 384, because 256 is not a multiple of 3 heads
    shapes = {name: tensor.shape for name, tensor in model.tensors().items()}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}

    def read(region: Region) -> torch.Tensor:
        return tensors[region.tensor.name][region.tensor_rect.row :][: region.tensor_rect.rows]

    result = {tensor.name: value for tensor, value in widen(read, model, wide)}
    name = "model.layers.1.mlp.gate_up_proj.weight"
    expected = torch.zeros(256, 384).bfloat16()
    expected[:5, :192], expected[128:133, :192] = tensors[name].chunk(2)
    assert torch.equal(result[name], expected)
    name = "model.layers.1.post_mlp_layernorm.weight"
    expected = torch.zeros(384)
    expected[:192] = tensors[name].float() * 0.5**0.5
    torch.testing.assert_close(result[name], expected, rtol=2e-7, atol=0)
    bias = "model.layers.1.self_attn.q_proj.bias"
    assert torch.equal(result[bias], tensors[bias]) and result.keys() == wide.tensors().keys()


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, (result.stdout if result.exit_code == 0 else result.stderr).rstrip()


def test_the_command_widens_once(tmp_path):
    config = ARCHITECTURES["qwen2"] | {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
    narrow, wide, again, fp8 = make_model(tmp_path / "narrow", config), *(tmp_path / name for name in ("wide", "again", "fp8"))
    for source, output in ((narrow, wide), (wide, again)):
        assert export("--checkpoint", source, "--output", output, "--align", 128)[0] == 0
    assert (wide / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert read_config(wide) == read_config(again)
    checkpoint, model = HFCheckpoint(wide, read_config(wide)), ModelGeometry.from_hf_config(read_config(wide))
    checkpoint.check(model)
    values = {name: checkpoint.read_values(take_all(tensor)).dtype for name, tensor in model.tensors().items()}
    assert {dtype for name, dtype in values.items() if name.endswith("norm.weight")} == {torch.float32}
    assert {dtype for name, dtype in values.items() if not name.endswith("norm.weight")} == {torch.bfloat16}
    assert export("--checkpoint", narrow, "--output", fp8, "--align", 128, "--precision", "fp8")[0] == 0
    HFCheckpoint(fp8, read_config(fp8)).check(model)
    assert not (wide / INDEX).exists()


@pytest.mark.parametrize("options, words", [
    (["--tensor-parallel", 2], "--tensor-parallel = 2: only applies with --align; add --align 128"),
    (["--align", 128, "--tensor-parallel", 5], "--tensor-parallel = 5: must divide vocab_size (384), which cannot be padded: "),
    (["--align", 128, "--expert-tensor-parallel", 2], "--expert-tensor-parallel = 2: needs a model with experts, qwen3 has none; "),
])  # fmt: skip
def test_impossible_alignment_is_refused(tmp_path, options, words):
    code, line = export("--checkpoint", make_checkpoint(tmp_path / "model"), "--output", tmp_path / "out", *options)
    assert code == 2 and line.startswith(f"megatron-rl: {words}") and "\n" not in line
    assert not (tmp_path / "out").exists()
