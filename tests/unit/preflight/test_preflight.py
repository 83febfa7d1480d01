"""Before anything heavy starts, `train` refuses what cannot work: one line that names field, value, rule and fix, exit code 2."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.fp8_checkpoints import list_tensors, make_fp8_checkpoint, write_sparse_safetensors
from support.models import make_slow_tokenizer
from support.processes import ROOT
from typer.testing import CliRunner

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from megatron_rl.data.files import SOURCE_FIX
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.files import list_model_files, read_config
from megatron_rl.hf.tokenizer import check_copy, load_tokenizer
from megatron_rl.hf.vocabulary import check_vocabulary, make_vocabulary
from megatron_rl.hf.write import write_all_but_weights
from megatron_rl.preflight import check_run
from megatron_rl.training.policies import describe_unread
from parallel.families import FAMILIES
from parallel.layout import Layout
from parallel.shards import GeometryError


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a good checkpoint config and a good run.toml, and no launcher's environment."""
    monkeypatch.chdir(tmp_path)
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    model = tmp_path / "model"
    model.mkdir()
    make_byte_tokenizer(model)
    write_config(tmp_path)
    data = '[data]\ntrain = "examples.arithmetic.task:Arithmetic"\nmax_prompt_tokens = 512\n'
    (tmp_path / "run.toml").write_text(f'[model]\npath = "model"\n{data}[rollout]\nmax_new_tokens = 512\n')
    return tmp_path


def write_config(workplace, **changes: object) -> None:
    config = {**make_hf_config(ArchitectureConfig(), 0, "fp32"), **changes}
    config = {key: value for key, value in config.items() if value != "absent"}
    (workplace / "model" / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(GeometryError):  # it is no model: config.json alone must be refused
        write_sparse_safetensors(workplace / "model" / "model.safetensors", list_tensors(config))


def refused(*overrides: str) -> str:
    """Return the line that `train` prints, after asserting that it is a single line and that the exit code is 2."""
    result = CliRunner().invoke(app, ["train", "run.toml", *overrides])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("megatron-rl: ") and result.stderr.count("\n") == 1 and result.stdout == ""
    return result.stderr.removeprefix("megatron-rl: ").rstrip()


def test_good_configurations_pass(workplace):
    assert check_run(load_config(workplace / "run.toml", ["--log.stuck_after=0"])) == Layout()
    check_run(load_config(ROOT / "configs" / "calculator.toml", ["--model.path=model"]))


@pytest.mark.parametrize("override, line", [
    ("model.path=nowhere", "does not exist; give a Hugging Face checkpoint folder, or hf:OWNER/NAME for a model on the hub"),
    ("model.path=model/config.json", "is no folder; give a Hugging Face checkpoint folder, or hf:OWNER/NAME for a model on the hub"),
    ("data.train=", f"is required for training; {SOURCE_FIX}"),
    ("data.train=no.jsonl", f"does not exist; {SOURCE_FIX}"),
    ("data.eval=no.jsonl", f"does not exist; {SOURCE_FIX}"),
    ("data.train=model", "is a folder with files of 3 sets (config.json, tokenizer.json, tokenizer_config.json); "
     "name one file, or a pattern such as model/train-*.parquet"),
    ("train.router_aux_loss=0.1", "needs a model with experts, but qwen3 has none; leave it out"),
    ("train.router_bias_rate=0.1", "needs a model with experts, but qwen3 has none; leave it out"),
    ("algorithm.routing_replay=engine", "needs a model with experts, but qwen3 has none; leave it out"),
])  # fmt: skip
def test_each_mistake_is_one_line_with_its_fix(workplace, override, line):
    """Further mistakes: tests/unit/preflight/test_rules.py."""
    field, value = override.split("=")
    shown = f" = {value}" if field.startswith("train.") else f" = {value!r}" if value else ""
    assert refused(f"--{override}") == f"{field}{shown}: {line}"


def test_experts(workplace, monkeypatch):
    write_config(workplace, **make_hf_config(ArchitectureConfig(num_experts=4), 0, "fp32"))
    check_run(load_config(workplace / "run.toml", ["--algorithm.routing_replay=engine", "--train.router_aux_loss=0.1"]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    layout = ["--train.layout.dp=2", "--train.layout.ep=2"]
    assert check_run(load_config(workplace / "run.toml", layout)) == Layout(dp=2, ep=2)


def test_layouts_that_pass(workplace, monkeypatch):
    sharded = {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": "false"}
    for sizes, layout in (*(({size: 2}, Layout(**{size: 2})) for size in ("tp", "pp", "dp", "cp")), (sharded, Layout(tp=2, pp=2, dp=2))):
        monkeypatch.setenv("WORLD_SIZE", str(layout.world_size))
        options = [f"--train.layout.{name}={size}" for name, size in sizes.items()]
        assert check_run(load_config(workplace / "run.toml", options)) == layout


@pytest.mark.parametrize("ranks, sizes, line", [
    ("3", ["pp=3"], "train.layout.pp = 3: must divide num_hidden_layers (2); use a divisor of 2"),
    ("1", ["vpp=2"], "train.layout.vpp = 2: needs more than one pipeline stage; set train.layout.pp above 1, or train.layout.vpp = 1"),
    ("4", ["cp=2"], "train.layout: needs 2 ranks (tp * cp * pp * dp), but this launch has 4; "),
])  # fmt: skip
def test_layouts_that_do_not_fit_the_model_or_the_launch(workplace, monkeypatch, ranks, sizes, line):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert refused(*(f"--train.layout.{size}" for size in sizes)).startswith(line)


@pytest.mark.parametrize("ranks, overrides", [("2", ["--train.layout.tp=2"]), ("1", ["--rollout.tp=2"])])
def test_a_layout_that_cuts_fp8_blocks(workplace, monkeypatch, ranks, overrides):
    write_config(workplace, intermediate_size=384)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    line = refused(*overrides)
    assert line.startswith("model.layers.0.mlp.gate_proj.weight = 'rows 0..192, columns 0..256': a shard boundary cuts a 128x128 FP8 block")
    assert "; use a smaller tensor-parallel size, or precision.mode = bf16, or wider matrices: megatron-rl export " in line
    assert CliRunner().invoke(app, line.partition("megatron-rl ")[2].replace("DIR", "wide").split()).exit_code == 0
    check_run(load_config(workplace / "run.toml", [*overrides, "--model.path=wide"]))
    for settings in (["--precision.mode=bf16", "--precision.reduction=fast"], ["--precision.mode=int8_rollout"]):
        check_run(load_config(workplace / "run.toml", [*overrides, *settings]))


def test_weights_that_are_not_those_of_the_config_and_a_model_of_another_kind(workplace):
    file = workplace / "model" / "model.safetensors"
    tensors = list_tensors(make_hf_config(ArchitectureConfig(), 0, "fp32"))
    write_sparse_safetensors(file, {**tensors, "model.layers.2.mlp.gate_proj.weight": ("F32", [512, 256])})
    assert "tensor model.layers.2.mlp.gate_proj.weight does not belong to the qwen3 model that config.json describes" in refused()
    write_sparse_safetensors(file, {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    assert "tensor model.norm.weight is missing" in refused()
    file.unlink()
    assert refused() == "model.path = 'model': holds neither model.safetensors nor its index; name a folder with safetensors weights"
    write_config(workplace, model_type="mamba")
    assert refused() == f"config.json model_type = 'mamba': is not a supported model family; use one of {', '.join(FAMILIES)}"
    write_config(workplace, head_dim="absent")
    assert refused().startswith("config.json head_dim: is missing")


@pytest.mark.parametrize("changes, line", [
    ({"initializer_range": "x"}, "model.path = 'model': transformers cannot read its config.json (Validation error for field"),
    ({"id2label": 5}, "model.path = 'model': transformers cannot read its config.json ('int' object has no attribute 'items'); correct"),
    ({"model_max_length": 600}, "rollout.max_new_tokens = 512: plus data.max_prompt_tokens (512) exceeds the model's 600 positions"),
])  # fmt: skip
def test_a_config_that_an_engine_could_not_start_with(workplace, changes, line):
    write_config(workplace, **changes)
    assert refused().startswith(line)
    write_config(workplace)
    (workplace / "model" / "generation_config.json").write_text('{"early_stopping": "x"}')
    assert "transformers cannot read its generation_config.json (`early_stopping` must be a boolean" in refused()


CONTENTS = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "unreadable": lambda path: (path.write_text("{}"), path.chmod(0)),
    **{
        text[:20]: lambda path, text=text: path.write_text(text)
        for text in ("", "{", "{}", "[]", "null", "3", '"text"', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ufeff{}")
    },
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "odd values": lambda path: path.write_text(
        '{"eos_token_id": {"a": 1}, "weight_map": [], "eos_token": 5, "model": 3, "tokenizer_class": 7, "chat_template": 3, "auto_map": 3}'
    ),
    "odd files": lambda path: path.write_text('{"weight_map": {"a": "a\\n", "b": "%s", "c": "\\u0000"}}' % ("x" * 5000)),
    "files elsewhere": lambda path: path.write_text('{"weight_map": {"a": "/etc/passwd", "b": "../x"}}'),
}


@pytest.mark.parametrize("name", [
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "notes.txt"),
])  # fmt: skip
def test_no_file_of_a_models_folder_is_a_bug(workplace, name):
    """Whatever stands where a file of a checkpoint should be, the run starts or is refused in one line. Nothing hangs."""
    shutil.copytree("model", "good")
    for content, write in CONTENTS.items():
        shutil.rmtree("model")
        shutil.copytree("good", "model")
        (workplace / "model" / name).unlink(missing_ok=True)
        write(workplace / "model" / name)
        try:
            config = load_config(workplace / "run.toml", ["--log.stuck_after=0"])
            check_run(config)
        except UserError as error:
            line = str(error)
        else:
            line = ""
            assert list_model_files(workplace / "model") and describe_unread(config, read_config(workplace / "model")) == []
        needed = name in ("config.json", "model.safetensors", "tokenizer.json")
        assert "\n" not in line and (line or not needed), content


def test_subfolders_and_files_of_other_tokenizers_are_kept_and_compared(workplace):
    """A tokenizer of four files, with an end token that only one of them has; folders beside it; and a tokenizer that a copy would lose."""
    (model := workplace / "model").joinpath("tokenizer").mkdir()
    make_slow_tokenizer(model)
    (model / "tokenizer" / "vocab.json").write_text("{}")
    check_run(load_config(workplace / "run.toml", ["--log.stuck_after=0"]))
    (copy := workplace / "copy").mkdir()
    write_all_but_weights(copy, read_config(model), model)
    found = load_tokenizer(copy)
    assert (len(found), found.eos_token_id) == (260, 258)
    check_vocabulary([make_vocabulary(found, {259}, 384)], load_tokenizer(model), model, read_config(model) | {"eos_token_id": [259]})
    for wrong in (make_vocabulary(found, {1}, 384), make_vocabulary(found, {259}, 512)):
        ranks, config = [make_vocabulary(found, {259}, 384), wrong], read_config(model) | {"eos_token_id": 259}
        with pytest.raises(RunError, match="engine rank 1 reads another tokenizer or config than the trainer: it has (end tokens|rows)"):
            check_vocabulary(ranks, load_tokenizer(model), model, config)
    (copy / "added_tokens.json").unlink()
    with pytest.raises(UserError, match="copy has another tokenizer: the vocabulary differs"):
        check_copy(model, copy)


def test_an_fp8_checkpoint_of_another_scale_format_or_with_a_broken_scale(workplace):
    make_fp8_checkpoint(workplace / "fp8", "fp32")
    line = refused("--model.path=fp8")
    assert 'holds scales that are not powers of two, precision.scale_format is "pow2"; set precision.scale_format = "fp32", or' in line
    for working in (["--precision.scale_format=fp32"], ["--precision.mode=bf16"], ["--precision.mode=fp8_rollout"]):
        check_run(load_config(workplace / "run.toml", ["--model.path=fp8", *working]))
    weights = load_file(workplace / "fp8" / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight_scale_inv"][1, 0] = float("nan")
    save_file(weights, workplace / "fp8" / "model.safetensors")
    line = refused("--model.path=fp8", "--precision.scale_format=fp32")
    assert "tensor model.layers.0.self_attn.o_proj.weight_scale_inv holds a scale that is inf, NaN" in line


def test_calibrated_clipping_where_nothing_is_quantized(workplace):
    calibrate = ("--algorithm.calibrate_every=20", "--algorithm.updates_per_step=2")
    check_run(load_config(workplace / "run.toml", calibrate))
    assert "needs loss ppo and updates_per_step >= 2" in refused(calibrate[0])


def test_a_malformed_line_of_data_is_named(workplace):
    (workplace / "bad.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"}\n')
    line = refused("--data.train=bad.jsonl", "--data.format=gsm8k", "--data.eval=")
    assert line == "data.train = 'bad.jsonl:2': format gsm8k needs the field answer, found question; correct or remove this row"


PLUGS = """
import time
from megatron_rl.rollout.environments.base import Message

loaded = False

def text(text, problem): return "right"
def none(text, problem): return None
def raises(text, problem): return text[problem.answer]
def number(text, problem): return 1.0 if problem.answer in text else 0
def loads(text, problem):
    global loaded
    loaded or time.sleep(1)
    loaded = True
    return 0.5
def strict(text, problem): return text.split("<answer>")[1] == problem.answer
def by_column(completions, solution, **kwargs): return [1.0] * len(completions)

class Environment:
    stop = ("</call>",)
    def __init__(self, problem): self.open = (each for each in "ab")
    def step(self, text): return None

class Answering(Environment):
    def __init__(self, problem): self.answer = problem.answer
    def step(self, text): return Message(self.answer) if text.endswith("</call>") else text.missing
"""


def test_plugs_are_called_once_on_a_row_before_anything_starts(workplace):
    """Each of these would fail on every completion, which would be charged to the policy."""
    (workplace / "own.py").write_text(PLUGS)
    rule = "fails on the first problems of a set, such as arithmetic:"
    for name, error in (
        ("text", "TypeError: the reward function must return a Reward or a number, not str"),
        ("none", "TypeError: the reward function must return a Reward or a number, not NoneType"),
        ("raises", "TypeError: string indices must be integers, not 'str'"),
        ("by_column", "LookupError: the reward function needs the column solution; the row has answer"),
    ):
        for option in (f"--reward.function=own:{name}", f'--reward.functions=[{{name = "math"}}, {{name = "own:{name}"}}]'):
            line = refused(option)
            assert line.startswith(f"reward.function{'s' * ('functions' in option)} = 'own:{name}': {rule}") and error in line, line
    line = refused("--environment.name=own:Environment", "--environment.max_tokens=8", "--rollout.max_new_tokens=64")
    assert line.startswith(f"environment.name = 'own:Environment': {rule}") and "cannot pickle" in line
    for options in (
        ["--reward.function=own:number"],
        ["--reward.function=own:strict"],  # some completions have no verdict, not all
        ["--reward.function=own:loads", "--reward.timeout=0.4"],
        ["--environment.name=own:Answering", "--environment.max_tokens=8"],
    ):
        check_run(load_config(workplace / "run.toml", ["--log.stuck_after=0", "--rollout.max_new_tokens=64", *options]))
