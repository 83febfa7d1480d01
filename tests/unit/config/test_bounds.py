"""Every number of a configuration, a config.json and an option has a bound, so that no command works on one for ever."""

import json
import os
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from support.families import ARCHITECTURES
from support.models import edit_config, make_checkpoint
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.config import Config, load_config
from megatron_rl.config.base import MAX_SECONDS
from megatron_rl.config.errors import find_section
from megatron_rl.errors import UserError, shorten
from megatron_rl.hf.files import INDEX, SINGLE, read_config, read_index
from megatron_rl.mcore.checkpoint.folder import write_state
from megatron_rl.preflight import PLAN, Facts, check

SEEDS = {"train.seed", "data.seed"}
"""Any integer of 64 bits."""
OWN_CHECKS = {"rollout.top_k", "eval.top_k"}
"""Bounded by a validator."""
LISTS = {"data.train", "data.eval", "reward.functions"}
"""Lists of tables, whose fields the command line cannot set one by one."""
REQUIRED = {"environment": ["--environment.name=a:b"], "replay": ["--replay.prompts_per_step=1"]}
"""What a section needs."""
EXPORT = ["export", "--checkpoint", "model", "--output", "out"]
pytestmark = pytest.mark.timeout(300)  # no test takes longer than a few seconds on a quiet machine


def list_fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = find_section(prefix + name, Config)
        if inner is not None:
            yield from list_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def find_bound(field: FieldInfo) -> float | None:
    return next((most.le for most in field.metadata if isinstance(most, annotated_types.Le)), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("bounds") / "model")


@pytest.fixture
def workplace(tmp_path, model, monkeypatch):
    """A folder with a model and run.toml."""
    shutil.copytree(model, tmp_path / "model")
    task = "examples.arithmetic.task:Arithmetic"
    (tmp_path / "run.toml").write_text(f'[model]\npath = "model"\n[data]\ntrain = "{task}"\neval = "{task}"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: object) -> tuple[int, str]:
    """Run a command in this process. Return its exit code and its last line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stderr.strip()


def assert_refused(arguments: list[object], line: str, contains: bool = False) -> None:
    """Run a command in this process, and compare its only line."""
    code, found = call(*arguments)
    assert code == 2 and "\n" not in found and (line in found if contains else found.startswith(f"megatron-rl: {line}")), found


INTEGERS = {name: field for name, field in list_fields() if int in {field.annotation, *typing.get_args(field.annotation)}}
LIMITS = {name: field for name, field in list_fields() if name.endswith(("timeout", "stuck_after"))}


@pytest.mark.parametrize("name", sorted(INTEGERS.keys() - SEEDS - OWN_CHECKS))
def test_every_integer_has_a_bound_and_a_larger_one_is_refused(name, workplace):
    most = find_bound(INTEGERS[name])
    assert most is not None and most <= 1 << 32, f"{name} has no bound"
    if name.rpartition(".")[0] in LISTS:
        return
    for value in (int(most) + 1, 10**18, 10**30):
        refused = call("plan", "run.toml", *REQUIRED.get(name.partition(".")[0], ()), f"--{name}={value}")
        assert refused[0] == 2 and refused[1].startswith(f"megatron-rl: {name} = {value}: must be "), refused


@pytest.mark.parametrize("name", LIMITS)
def test_every_time_limit_is_one_that_the_system_takes(name):
    assert find_bound(LIMITS[name]) == MAX_SECONDS < 2**31 / 1000, "poll takes milliseconds as 32-bit integers"


@pytest.mark.parametrize("name", sorted(INTEGERS.keys() - SEEDS - OWN_CHECKS))
def test_checks_end_for_the_largest_value(name, workplace):
    if name.rpartition(".")[0] in LISTS or name == "lora.rank":  # a multiple of 8
        return
    try:
        config = load_config(Path("run.toml"), [f"--{name}={int(find_bound(INTEGERS[name]) or 0)}"])
        check(Facts(config, read_config(Path("model"))), PLAN)
    except UserError:
        return


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400])
@pytest.mark.parametrize("name", sorted(SEEDS | OWN_CHECKS))
def test_other_integers_have_64_bits(name, value, workplace):
    code, line = call("plan", "run.toml", f"--{name}={value}")
    assert code == 2 and line.startswith(f"megatron-rl: {name} = "), line


COMMANDS = {
    "plan --nodes": (["plan", "run.toml", "--nodes", 10**8], "--nodes = 100000000: with 8 GPUs each are more than the 16,384 GPUs"),
    "plan --gpus-per-node": (["plan", "run.toml", "--gpus-per-node", 10**12], "--nodes = 1: with 1000000000000 GPUs each are more"),
    "plan of large layouts": (["plan", "run.toml", "--train.layout.dp=65536"], "--nodes = 8192: with 8 GPUs each are more than"),
    "rehearse --nodes": (["rehearse", "run.toml", "--nodes", 10**12], "--nodes = 1000000000000: with 8 GPUs each are more than"),
    "export --align": ([*EXPORT, "--align", 10**11], "--align = 100000000000: times the number of ranks (1) must be at most 65,536"),
    "export --tensor-parallel": ([*EXPORT, "--align", 128, "--tensor-parallel", 10**12], "--align = 128: times the number of ranks"),
    "export --expert-tensor-parallel": ([*EXPORT, "--align", 1, "--expert-tensor-parallel", 10**12], "--align = 1: times the number"),
    "eval --samples": (["eval", "run.toml", "--checkpoint", "model", "--samples", 10**12], "eval.samples = 1000000000000: must be less"),
}


@pytest.mark.parametrize("arguments, line", COMMANDS.values(), ids=COMMANDS)
def test_options_of_commands_have_bounds(arguments, line, workplace):
    assert_refused(arguments, line)


LARGE = [
    ("qwen3", "num_hidden_layers", 10**9, "must be at most 1000"),
    ("qwen3", "vocab_size", 10**15, "must be at most 2097152"),
    ("qwen3", "hidden_size", 10**12, "must be at most"),
    ("qwen3", "num_attention_heads", 10**12, "must be at most"),
    ("qwen3", "intermediate_size", 10**12, "must be at most"),
    ("qwen3", "head_dim", 10**12, "must be at most"),
    ("qwen3", "rope_theta", 10**400, "must be a positive number up to 1e+15"),
    ("qwen3", "rms_norm_eps", 10**400, "must be a positive number up to 1e+15"),
    ("qwen3", "max_position_embeddings", 10**15, "must be at most 2147483648"),
    ("qwen3_moe", "num_experts", 10**9, "must be at most 10000"),
    ("qwen3_moe", "moe_intermediate_size", 10**12, "must be at most"),
    ("qwen3_moe", "mlp_only_layers", [10**15], "must be a list of integers from 0 to 2097152"),
    ("deepseek_v3", "n_routed_experts", 10**9, "must be at most 10000"),
    ("deepseek_v3", "n_shared_experts", 10**12, "must be at most"),
    ("deepseek_v3", "num_nextn_predict_layers", 10**9, "must be at most 1000"),
    ("deepseek_v3", "first_k_dense_replace", 10**12, "must be at most"),
    ("deepseek_v3", "kv_lora_rank", 10**12, "must be at most"),
    ("deepseek_v3", "routed_scaling_factor", 10**400, "must be a positive number"),
    ("qwen3", "rope_scaling", {"rope_type": "yarn"}, "config.json rope factor: is missing; add it"),
]
"""A field of a family's config.json, a value, and what is wrong with it; "" means that the field has no effect."""


@pytest.mark.parametrize("kind, field, value, rule", LARGE)
def test_every_size_of_a_model_has_a_bound(kind, field, value, rule, workplace):
    config = ARCHITECTURES[kind] | {field: value}
    (workplace / "model" / "config.json").write_text(json.dumps(config))
    code, line = call("plan", "run.toml")
    if rule:
        assert code == 2 and (rule if "config.json" in rule else f"config.json {field} = {shorten(str(value))}: {rule}") in line, line
    else:
        assert code == 0, line


def test_experts_of_all_layers_together_have_a_bound(workplace):
    config = ARCHITECTURES["qwen3_moe"] | {"num_hidden_layers": 1000, "num_experts": 10_000}
    (workplace / "model" / "config.json").write_text(json.dumps(config))
    assert_refused(["plan", "run.toml"], "config.json num_hidden_layers = 1000: gives all layers together 10,000,000 experts")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**15}])
@pytest.mark.parametrize("command", [
    ["train", "run.toml"], ["plan", "run.toml"], ["rehearse", "run.toml"], ["graph", "run.toml"],
    ["eval", "run.toml", "--checkpoint", "model"], EXPORT,
], ids=lambda words: words[0])  # fmt: skip
def test_no_command_hangs_on_a_huge_model(command, change, workplace):
    edit_config(workplace / "model", change)
    assert_refused(command, "must be at most", contains=True)


OUTSIDE = {
    "../model.safetensors": "'../model.safetensors', which is not a file of this folder",
    "a/../../model.safetensors": "'a/../../model.safetensors', which is not a file",
    "/etc/passwd": "'/etc/passwd', which is not a file of this folder",
    "": "'', which is not a file of this folder",
    "a\0b": "'a\\x00b', which is not a file of this folder",
    "link.safetensors": "'link.safetensors', which is a link out of this folder",
    "folder/model.safetensors": "'folder/model.safetensors', which is a link out of this folder",
    "loop.safetensors": "",
}


@pytest.mark.parametrize("file, rule", OUTSIDE.items())
def test_an_index_names_only_files_of_its_folder(file, rule, workplace):
    folder, other = workplace / "model", workplace / "other"
    other.mkdir()
    (folder / SINGLE).rename(other / SINGLE)
    (folder / "link.safetensors").symlink_to(other / SINGLE)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "folder").symlink_to(other)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    assert_refused(["train", "run.toml"], f"names {rule}" if rule else "names loop.safetensors, which is missing", contains=True)


def test_an_index_may_name_links_within_its_folder_and_into_the_cache_of_the_hub(tmp_path):
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "0", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_bytes(b"")
    (snapshot / "a.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "b.safetensors").symlink_to("a.safetensors")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert read_index(snapshot, "model.path") == {"a": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / "to snapshot").symlink_to(snapshot)
    assert len(read_index(tmp_path / "to snapshot", "model.path")) == 2


def test_a_huge_index_is_not_read(workplace):
    with (workplace / "model" / INDEX).open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # without blocks on the disk
    assert_refused(["train", "run.toml"], "has 1,099,511,627,776 bytes, more than 134,217,728", contains=True)


@pytest.mark.parametrize("command", [
    ["eval", "run.toml", "--checkpoint", "step_00001"], ["export", "--checkpoint", "step_00001", "--output", "out"],
], ids=lambda words: words[0])  # fmt: skip
def test_a_checkpoint_that_lists_no_files_is_refused(command, workplace):
    folder = workplace / "step_00001"
    (folder / "mcore").mkdir(parents=True)
    (workplace / "model").rename(folder / "hf")
    write_state(folder, {"step": 1, "precision": {}, "files": {}})
    assert_refused(command, "lists no files", contains=True)
