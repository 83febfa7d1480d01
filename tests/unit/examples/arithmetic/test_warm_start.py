"""The demo's model: its tokenizer, its configuration and weights, and the command that makes it."""

import json
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from support.processes import ROOT
from typer.testing import CliRunner

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS, make_byte_tokenizer
from examples.arithmetic.config import ArchitectureConfig, DemoConfig
from examples.arithmetic.new_model import make_hf_config, make_random_checkpoint, make_random_tensors
from examples.arithmetic.warm_start import find_levels, main
from megatron_rl.config import load_config
from megatron_rl.hf.tokenizer import load_tokenizer

app = typer.Typer()
app.command(context_settings={"ignore_unknown_options": True})(main)
QUICKSTART = ROOT / "configs" / "quickstart.toml"
NAMES = ("quickstart", "quickstart_moe", "quickstart_hybrid", "quickstart_mtp", "calculator", "gsm8k", "tool_agent")


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*overrides: object) -> str:
    done = CliRunner().invoke(app, [str(QUICKSTART), *map(str, overrides)])
    assert done.exit_code == 2 and done.stderr.startswith("megatron-rl: ") and done.stderr.count("\n") == 1, done.output
    return done.stderr.removeprefix("megatron-rl: ").rstrip()


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_every_demo_are_read_beside_the_runs(name):
    config = load_config(ROOT / "configs" / f"{name}.toml", root=DemoConfig, more=ROOT / "examples" / "arithmetic" / f"{name}.toml")
    assert find_levels(config) == (tuple(config.data.settings["levels"]) if config.warm_start.steps else ())
    assert config.longest_sequence <= config.architecture.max_position_embeddings


def test_a_model_that_is_there_is_kept_if_it_is_the_same(tmp_path):
    make_random_checkpoint(tmp_path / "model", ArchitectureConfig(num_hidden_layers=1), 0)
    settings = tmp_path / "small.toml"
    settings.write_text("[architecture]\nnum_hidden_layers = 1\n")
    model = f"--model.path={tmp_path / 'model'}"
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert run(QUICKSTART, "--model", settings, model) == f"warm start: {tmp_path / 'model'} exists already\n"
    assert run(ROOT / "configs" / "qwen3_8b.toml", model), "a run that has no such settings takes any model"
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    line = refused("--model", settings, model, "--architecture.hidden_size=384")
    assert line.startswith(f"architecture.hidden_size = 384: the checkpoint already at {tmp_path / 'model'} has 256; remove that folder")
    assert "rope_theta" in refused("--model", settings, model, "--architecture.rope_theta=5.0")


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["--architecture.hiden_size=256"], "architecture.hiden_size = 256: unknown key; did you mean architecture.hidden_size?"),
        (["--architecture.hidden_size=100"], "architecture.hidden_size = 100: must be a multiple of 128; the default is 256"),
        (
            ["--architecture.num_experts=2", "--architecture.num_experts_per_tok=4"],
            "architecture: num_experts (2) must be at least num_experts_per_tok (4)",
        ),
        (
            ["--architecture.num_experts=4", "--architecture.full_attention_interval=2"],
            "architecture: full_attention_interval is for a model without experts: set num_experts = 0",
        ),
        (["--architecture.num_attention_heads=3"], "architecture: num_attention_heads (3) must be a multiple of num_key_value_heads (2)"),
        (["--model=none.toml"], "CONFIG = 'none.toml': does not exist; give a TOML file such as configs/quickstart.toml"),
        (["--model.path=."], "model.path = '.': exists but contains no config.json; remove it, or name another folder"),
        (["--data.settings.levels=[0]"], "data.settings.levels = [0]: must name at least one level, each 1 or more; use e.g. [1, 2, 3, 4]"),
        (
            ["--data.train=examples.plugs.csv_rows:read_csv", "--data.format=gsm8k", "--data.eval=", '--data.settings={path = "q.csv"}'],
            "warm_start.steps = 600: needs worked examples, which only examples.arithmetic.task:Arithmetic in data.train has",
        ),
        (["--warm_start.tool_share=0.5"], "warm_start.tool_share = 0.5: needs a tool, but the run has none; add [environment] with name ="),
        (["--train.layout.tp=2"], "train.layout: needs 2 ranks (tp * cp * pp * dp), but this launch has 1; start with torchrun"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, overrides, line):
    (tmp_path / "q.csv").write_text("question,answer\n1?,#### 1\n")
    monkeypatch.chdir(tmp_path)
    assert refused(*overrides).startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["q.csv"]


def test_the_demos_are_those_of_the_launcher():
    configs = {path.stem for path in Path(ROOT / "examples" / "arithmetic").glob("*.toml")}
    assert configs == set(NAMES) and all(name in (ROOT / "launch" / "quickstart.sh").read_text() for name in NAMES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model") / "new"
    make_byte_tokenizer(folder)
    return load_tokenizer(folder)


def test_it_has_a_token_per_byte_and_three_special_ones(tokenizer):
    assert len(tokenizer) == 259
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258]
    assert tokenizer.encode("#62<|endoftext|>")[-1] == 256


@given(st.text().filter(lambda text: "<|" not in text))
def test_any_text_survives_and_costs_one_token_per_byte(tokenizer, text):
    ids_T = tokenizer.encode(text)
    assert len(ids_T) == len(text.encode())
    assert tokenizer.decode(ids_T) == text


def test_transformers_reads_a_new_config(tmp_path):
    from transformers import AutoConfig

    def read(architecture: ArchitectureConfig, dtype: str):
        (tmp_path / "config.json").write_text(json.dumps(make_hf_config(architecture, 7, dtype)))
        return AutoConfig.from_pretrained(tmp_path)

    dense = read(ArchitectureConfig(hidden_size=384, tie_word_embeddings=True, rope_theta=5000.0), "bf16")
    assert (type(dense).__name__, dense.hidden_size, dense.tie_word_embeddings, dense.eos_token_id) == ("Qwen3Config", 384, True, 7)
    assert dense.dtype == torch.bfloat16
    widths = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    moe = read(ArchitectureConfig(**widths), "fp32")
    assert (type(moe).__name__, moe.norm_topk_prob, moe.decoder_sparse_step, moe.mlp_only_layers) == ("Qwen3MoeConfig", True, 1, [])
    assert {name: getattr(moe, name) for name in widths} == widths
    hybrid = read(ArchitectureConfig(full_attention_interval=2, num_hidden_layers=4), "fp32")
    assert type(hybrid).__name__ == "Qwen3_5TextConfig" and hybrid.layer_types == ["linear_attention", "full_attention"] * 2


def test_random_weights_repeat_with_the_seed_and_norms_are_one():
    config = make_hf_config(ArchitectureConfig(num_hidden_layers=1), 0, "fp32")
    first, again, other = (make_random_tensors(config, seed) for seed in (1, 1, 2))
    weight, norm = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
    assert torch.equal(first[weight], again[weight]) and not torch.equal(first[weight], other[weight])
    assert (first[norm] == 1).all() and all(tensor.dtype == torch.float32 for tensor in first.values())
    hybrid = make_random_tensors(make_hf_config(ArchitectureConfig(full_attention_interval=2), 0, "fp32"), 1)
    assert (hybrid[norm] == 0).all() and (hybrid["model.layers.0.linear_attn.norm.weight"] == 1).all(), "the others are zero-centered"
    assert first[weight].std().item() == pytest.approx(0.02, rel=0.02) and abs(first[weight].mean().item()) < 1e-3
