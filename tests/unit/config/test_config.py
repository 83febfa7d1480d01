"""Configurations are read from a file and overrides, each mistake is one line, and the documentation covers all options and plugs."""

import json
import re
import socket
from pathlib import Path
from typing import get_args

import pytest

from megatron_rl import plugs
from megatron_rl.config import Config, ModelConfig, load_config
from megatron_rl.config.hosts import check_listening, join_port
from megatron_rl.config.loading import apply_overrides
from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.errors import UserError
from parallel.formats import MODES
from parallel.transport import TRANSPORTS

ROOT = Path(__file__).resolve().parents[3]

NAMES = list(MODES)
MODEL = '[model]\npath = "models/tiny"\n'


@pytest.fixture
def load(tmp_path):
    def _load(text: str, *overrides: str):
        file = tmp_path / "run.toml"
        file.write_text(text)
        return load_config(file, overrides)

    return _load


@pytest.fixture
def mistake(load):
    def _mistake(text: str, *overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return _mistake


def test_values_come_from_the_file_or_defaults_and_survive_a_round_trip_through_json(load):
    cfg = load(MODEL + "[train]\nsteps = 7\nlearning_rate = 1\n[data]\nsettings = {levels = [2, 3]}\n")
    assert cfg.model.path == Path("models/tiny")  # relative to the working directory
    assert (cfg.train.steps, cfg.train.learning_rate, cfg.rollout.group_size) == (7, 1.0, 8)
    assert cfg.data.settings == {"levels": [2, 3]} and cfg.environment is None
    reward = RewardConfig(functions=(RewardFunctionConfig(name="math"), RewardFunctionConfig(name="exact")))
    configs = [load_config(path, overrides) for path in (ROOT / "configs").glob("*.toml") for overrides in ([], ["--data.eval="])]
    for config in [*configs, Config(model=ModelConfig(path=Path("m")), reward=reward)]:
        assert Config.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config


@pytest.mark.parametrize(("overrides", "section", "key", "expected"), [
    (["--train.steps=3"], "train", "steps", 3),
    (["--train.steps", "3"], "train", "steps", 3),
    (["--train.steps=3", "--train.steps=4"], "train", "steps", 4),
    (["--train.learning_rate=1e-4"], "train", "learning_rate", 1e-4),
    (["--data.settings.levels=[1, 2]"], "data", "settings", {"levels": [1, 2]}),
    (['--data.settings={path = "a.csv"}'], "data", "settings", {"path": "a.csv"}),
    (["--data.format=my.rows:read"], "data", "format", "my.rows:read"),
    (["--data.format=math"], "data", "format", "math"),
    (["--log.dir=2026"], "log", "dir", Path("2026")),  # a string field stays a string
    (["--data.eval="], "data", "eval", ()),
])  # fmt: skip
def test_overrides(load, overrides, section, key, expected):
    assert getattr(getattr(load(MODEL + "[train]\nsteps = 7\n", *overrides), section), key) == expected


def test_sets_of_problems_are_a_string_or_a_list_of_tables(load):
    assert load(MODEL).data.train == load(MODEL).data.eval == ()
    for path in ("a/b.jsonl", "hf:openai/gsm8k:main:train"):
        (only,) = load(MODEL, f"--data.train={path}").data.train
        assert (only.source, only.format, only.weight) == (path, None, 1.0)
    (only,) = load(MODEL, "--data.train='a b=c.jsonl'").data.train
    assert only.source == "a b=c.jsonl"
    tables = '[[data.train]]\nsource = "a"\nweight = 3\n[[data.train]]\nsource = "b"\nformat = "math"\nname = "maths"\n'
    first, second = load(MODEL + tables).data.train
    assert (first.weight, first.format, second.weight, second.format, second.label) == (3.0, None, 1.0, "math", "maths")
    (only,) = load(MODEL + tables, '--data.train=[{source = "c", weight = 2}]').data.train
    assert (only.source, only.weight) == ("c", 2.0)


def test_sets_have_names_and_overrides_do_not_modify_the_given_table(load):
    labels = {"data/gsm8k/test.jsonl": "gsm8k/test", "my.task:Sums": "sums", "hf:openai/gsm8k:main:test": "gsm8k/main/test"}
    for source, label in (labels | {"hf:/clones/MATH-500:test": "MATH-500/test"}).items():
        assert load(MODEL, f"--data.eval={source}").data.eval[0].label == label
    table = {"train": {"steps": 7}}
    assert apply_overrides(table, ["--train.seed=1"]) == {"train": {"steps": 7, "seed": 1}}
    assert table == {"train": {"steps": 7}}


@pytest.mark.parametrize(("text", "line"), [
    ("[train]\nleraning_rate = 1", "train.leraning_rate = 1: unknown key; did you mean train.learning_rate?"),
    ("[trian]\nsteps = 1", "trian: unknown key; did you mean train?"),
    ("[train]\ngroup_size = 4", "train.group_size = 4: unknown key; did you mean rollout.group_size?"),
    ("create = 256", "model.create = 256: unknown key; known keys of model: path"),
    ("[sync]\nzzz = 0", "sync.zzz = 0: unknown key; known keys of sync: transport, bucket_mb, staged, running, proof, delta, canar..."),
    ("[train]\nsteps = '3'", "train.steps = '3': must be a valid integer; write it without quotes"),
    ("[train]\nsteps = 1.5", "train.steps = 1.5: must be a valid integer; the default is 30"),
    ("[train]\nsteps = 0", "train.steps = 0: must be greater than or equal to 1; the default is 30"),
    ("[rollout]\ntop_p = 0.0", "rollout.top_p = 0.0: must be greater than 0; the default is 1.0"),
    ("[rollout]\ntop_k = 0", "rollout.top_k = 0: must be 1 or more, or -1 for all tokens; the default is -1"),
    ("[rollout]\nmin_p = 1.0", "rollout.min_p = 1.0: must be less than 1; the default is 0.0"),
    ('[rollout]\nstop = ["x", ""]', "rollout.stop.1 = '': String should have at least 1 character"),
    ("[eval]\ntop_p = 1.5", "eval.top_p = 1.5: must be less than or equal to 1"),
    ("[eval]\ntemperature = 0\nsamples = 2", "eval: the 2 samples of a problem would be identical at temperature 0; set samples = 1"),
    ("[train]\nlearning_rate = inf", "train.learning_rate = inf: must be a finite number; the default is 1e-06"),
    ("[log]\ndir = 3", "log.dir = 3: must be a valid string; put it in quotes"),
    ("[log]\ndir = ''", "log.dir = '': is empty; name a file or folder, or `.` for the working folder"),
    ("[sync]\ndir = ''", "sync.dir = '': is empty..."),
    ("[data]\nsettings = 3", "data.settings = 3: must be a table"),
    ("[[data.eval]]\nsource = 'a'\nsettings = {x = 1}", "data.eval.0: settings only apply to a custom source (module:attribute), a..."),
    ("[[data.train]]\nsource = 'a'\nweigth = 2", "data.train.0.weigth = 2: unknown key; did you mean data.train.weight?"),
    ("[[data.eval]]\nsource = 'a'\nweight = 2", "data.eval.0.weight = 2: unknown key; did you mean data.train.weight?"),
    ("[[data.eval]]\nsource = 'a'\nzzz = 2", "data.eval.0.zzz = 2: unknown key; known keys of data.eval.0: source, format, columns..."),
    ("[[data.train]]\nname = 'a'", "data.train.0.source: is required; add `source = ...` under [data.train.0]"),
    ("[data]\ntrain = 3", 'data.train = 3: must be one source in quotes, or a list of tables such as [{source = "PATH", format = "...'),
    ("[data]\ntrain = [{source = 'x/a.jsonl'}, {source = 'y/x/a.json'}]", "data: 2 sets of train have the name 'x/a'; set a unique..."),
    ("[data]\nformat = 'maths'", "data.format = 'maths': must be one of gsm8k, math, deepmath, aime, verl, or your own as module:attr..."),
    ("[data]\nprompt_template = 'q'", "data: prompt_template 'q' must contain {question}"),
    ("[data]\nprompt_template = 'Q: {question}'\nprompt_template_file = 'f'", "data: prompt_template and prompt_template_file exclude..."),
    ("[data]\nsystem_prompt = 'x'", "data: system_prompt needs chat = true, because only a chat template uses a system message"),
    ("[precision]\nbackend = 'emulate'", "precision.backend = 'emulate': must be 'emulated', 'transformer_engine' or 'deep_gemm'; ..."),
    (
        "[precision]\nmode = 'fp8_unifed'",
        f"precision.mode = 'fp8_unifed': must be {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}; did you mean 'fp8_unified'?",
    ),
    ("[environment]\nname = 'a:b'\nmax_token = 1", "environment.max_token = 1: unknown key; did you mean environment.max_tokens?"),
])  # fmt: skip
def test_a_mistake_in_the_file_is_one_line(mistake, text, line):
    """`line` may end in an ellipsis."""
    start = line.removesuffix("...")
    assert mistake(MODEL + text)[: len(start) if start != line else None] == start


@pytest.mark.parametrize(("overrides", "line"), [
    (["--train.stepz=1"], "train.stepz = 1: unknown key; did you mean train.steps?"),
    (["--steps=1"], "steps = 1: unknown key; did you mean train.steps?"),
    (["--train.steps"], "--train.steps: has no value; write --train.steps=VALUE"),
    (["--train.steps", "--train.seed=1"], "--train.steps: has no value; write --train.steps=VALUE"),
    (["train.steps=1"], "override = 'train.steps=1': is not of the form --section.key=value"),
    (["--train..steps=1"], "override = '--train..steps=1': is not of the form --section.key=value"),
    (["--train.steps=many"], "train.steps = 'many': must be a valid integer; the default is 30"),
    (["--train=1"], "train = 1: must be a table"),
    (["--train.seed=1", "--train.seed.x=1"], "--train.seed.x = '1': train.seed is a value, not a section"),
])  # fmt: skip
def test_a_mistake_in_an_override_is_one_line(mistake, overrides, line):
    assert mistake(MODEL, *overrides) == line


def test_missing_required_keys_toml_syntax_errors_and_unreadable_files(mistake, tmp_path):
    assert mistake("") == "model: is required; add a table [model] with path"
    assert mistake("[model]\npath = ''") == "model.path = '': is empty; name a file or folder, or `.` for the working folder"
    assert mistake("[model]\n") == "model.path: is required; add `path = ...` under [model]"
    for text, line in (("[model]\npath = \n", 2), ("[model]\npath = 'a'\npath = 'b'\n", 3), ("[model]\nx = [1,", 2)):
        assert mistake(text).startswith(f"{tmp_path}/run.toml, line {line}: not valid TOML: ")
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "absent.toml", [])
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path, [])
    (tmp_path / "marked.toml").write_text("[model]\npath = 'x'", encoding="utf-8-sig")
    assert load_config(tmp_path / "marked.toml", []).model.path == Path("x")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a UTF-8 text file"):
        load_config(tmp_path / "binary.toml", [])


def test_an_ipv6_address_stands_in_brackets_before_its_port_and_is_listened_on():
    assert [join_port(host, 80) for host in ("10.0.3.7", "node1", "fd00::2")] == ["10.0.3.7:80", "node1:80", "[fd00::2]:80"]
    for host in ("127.0.0.1", "::1"):
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            port = server.getsockname()[1]
            with pytest.raises(OSError, match="in use"):
                check_listening(host, port)
        check_listening(host, port)


def test_hosts_are_addresses_of_single_interfaces(load, mistake):
    line = "listens on every network interface; use the address of one interface, loopback or in a private network"
    for host in ("0.0.0.0", "::", "0", "0x0", "", "::ffff:0.0.0.0"):
        assert mistake(MODEL, f"--sync.host={host}") == f'sync.host = {host!r}: {line}; the default is "127.0.0.1"'
        assert mistake(MODEL, f'--rollout.hosts=["10.0.3.7", "{host}"]') == f"rollout.hosts.1 = {host!r}: {line}"
    for host in ("127.0.0.1", "10.0.3.7", "node17", "::1", "localhost"):
        assert load(MODEL, f'--rollout.hosts=["{host}"]').rollout.hosts == (host,)
    no_list = "rollout.hosts = '10.0.3.7': must be a valid array; the default is [\"127.0.0.1\"]"
    assert mistake(MODEL, "--rollout.hosts=10.0.3.7") == no_list
    assert mistake(MODEL, "--rollout.host=10.0.3.7") == "rollout.host = '10.0.3.7': unknown key; did you mean rollout.hosts?"


PAGES = [
    (plugs.LOSSES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.ADVANTAGES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.REWARDS, "config/reward.py", "guides/rewards.md"),
    (plugs.DATA_FORMATS, "config/data.py", "guides/data.md"),
    (TRANSPORTS, "config/sync.py", "reference/sync.md"),
]
ENGINE_OPTIONS = {"engine", "engines", "nodes_per_engine", "max_total_tokens", "enable_prefix_caching", "hosts", "max_restarts"}
ENGINE_OPTIONS |= {"start_timeout", "request_timeout", "health_timeout"}  # other projects have no equivalent


@pytest.mark.parametrize("plug, config, page", PAGES, ids=[plug.field for plug, *_ in PAGES])
def test_every_built_in_plug_is_documented(plug, config, page):
    texts = (ROOT / "megatron_rl" / config).read_text(), (ROOT / "docs" / page).read_text()
    assert [name for name in plug.builtin for text in texts if f"`{name}`" not in text] == []


@pytest.mark.parametrize("section", ["algorithm", "critic", "lora", "replay", "rollout", "train"])
def test_other_names_has_one_row_for_each_option(section):
    page = (ROOT / "docs/reference/other_names.md").read_text()
    table = page.split(f"| `[{section}]` |")[1].split("\n\n")[0]
    names = [name for name, *_ in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)]
    annotation = Config.model_fields[section].annotation
    model = next((part for part in get_args(annotation) if part is not type(None)), annotation)  # the section may be optional
    assert sorted(names) == sorted(set(model.model_fields) - ENGINE_OPTIONS)
