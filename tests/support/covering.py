"""A pairwise covering array of the documented values of the configuration. `python -m support.covering` writes it to `ARRAY`.

Every value of every enumeration and switch is in a row, and so is every pair of values that preflight accepts. Enumerations and switches
are found in the configuration's models, so a new one is missing from the array until it is written again.
"""

import itertools
import json
import random
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from examples.arithmetic.config import DemoConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.config import Config, load_config
from megatron_rl.config.algorithm import Correction
from megatron_rl.errors import UserError
from megatron_rl.plugs import ADVANTAGES, LOSSES
from megatron_rl.preflight import LAYOUTS, PLAN, Facts, find_mistakes
from parallel.formats import MODES
from parallel.transport import TRANSPORTS
from support.processes import ROOT
from support.train_command import TINY

ARRAY = ROOT / "tests" / "engine" / "covering_array.json"
Row = dict[str, str]
"""Label of the chosen value of each factor."""

NEED_A_GPU = {"precision.backend": {"transformer_engine", "deep_gemm"}}  # and the transport cuda_ipc
ELSEWHERE = {  # fields that other tests take through a real run, because they need data or programs of their own
    "data.train.curriculum", "data.train.pass_rate", "data.overlap", "data.chat", "agent.own_reward",
    "algorithm.name", "lora.targets",
}  # fmt: skip
NAMED = {  # enumerations that are registries of names
    "precision.mode": tuple(MODES),
    "algorithm.loss": tuple(LOSSES.builtin),
    "algorithm.advantage": (*ADVANTAGES.builtin, "gae"),
    "algorithm.correction": ("none", *get_args(Correction)),
}
CHOICES: dict[str, dict[str, dict[str, Any]]] = {  # of several fields at once
    "trainer": {
        "one rank": {},
        "tp": {"train.layout.tp": 2},
        "pp": {"train.layout.pp": 2},
        "vpp": {"train.layout.pp": 2, "train.layout.vpp": 2, "architecture.num_hidden_layers": 4},
        "cp": {"train.layout.cp": 2},
        "dp": {"train.layout.dp": 2},
        "ep": {"train.layout.dp": 2, "train.layout.ep": 2},
    },
    "engines": {
        "one": {},
        "tp": {"rollout.tp": 2},
        "two": {"rollout.engines": 2},
        "ep": {"rollout.tp": 2, "rollout.ep": 2},
    },
    "model": {"dense": {}, "experts": {}},
    "more": {
        "nothing": {},
        "replay": {"replay.prompts_per_step": 2, "replay.max_staleness": 2},
        "teacher": {"teacher.path": "{folder}/model"},
        "lora": {"lora.rank": 8},
    },
    "KL": {"none": {}, "some": {"algorithm.kl_coef": 0.01}},
    "batch": {
        "one update": {},
        "two updates": {"algorithm.updates_per_step": 2},
        "dynamic sampling": {"algorithm.dynamic_sampling_max_rounds": 2},
        "more prompts": {"rollout.over_sampling_prompts": 2},
    },
    "sync.transport": {
        **{name: {"sync.transport": name} for name in TRANSPORTS.builtin if name not in ("cuda_ipc", "disk")},
        "disk": {"sync.transport": "disk", "sync.dir": "{folder}/chunks"},
    },
    "train.decay_style": {
        **{name: {"train.decay_style": name} for name in ("constant", "linear", "cosine")},
        "WSD": {"train.decay_style": "WSD", "train.wsd_decay_steps": 1},
    },
    "algorithm.multi_objective_aggregation": {
        "sum_then_normalize": {},
        "normalize_then_sum": {
            "algorithm.multi_objective_aggregation": "normalize_then_sum",
            "reward.function": "",
            "reward.functions": '[{{name = "math"}}, {{name = "length", full_tokens = 4, zero_tokens = 8}}]',
        },
    },
    "ahead": {"no": {}, "one step": {"placement.max_staleness": 1}},
}
ALWAYS = {"algorithm.entropy_coef": 0.01, "train.learning_rate": 1e-4, "rollout.prompts_per_step": 4, "architecture.num_hidden_layers": 2}
"""The entropy's gradient is the learning signal, whatever the rewards of a random model."""


def find_values(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Return the values of all enumerations and switches among the fields of a configuration section."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, field in model.model_fields.items():
        parts = list(_flatten(field.annotation))
        values = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        values += [value for part in parts if part is bool for value in (False, True)]
        values += [value for part in parts if isinstance(part, type) and issubclass(part, Enum) for value in part]
        if values:
            found[prefix + name] = tuple(values)
        for part in parts:
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= find_values(part, f"{prefix}{name}.")
    return found


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flatten(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType, tuple, list):
        return [part for argument in get_args(annotation) for part in _flatten(argument)]
    return [annotation]


def list_factors() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the overrides of each value of each factor."""
    fields = {**find_values(), **NAMED}
    factors = {
        name: {label: {name: label} for label in map(_as_toml, values) if label not in NEED_A_GPU.get(name, ())}
        for name, values in fields.items()
        if name not in ELSEWHERE and Correction not in values
    }
    return {**CHOICES, **{name: values for name, values in factors.items() if len(values) > 1 and name not in CHOICES}}


def merge(row: Row, folder: Path) -> dict[str, Any]:
    """Return the overrides of a row for a run in `folder`, without those of an optional section that the row does not have."""
    factors, merged = list_factors(), {**TINY, "model.path": folder / "model", **ALWAYS}
    for factor, label in row.items():
        section = factor.split(".")[0]
        if section not in ("teacher", "lora", "replay") or row["more"] == section:
            merged |= factors[factor][label]
    return {name: value.format(folder=folder) if isinstance(value, str) else value for name, value in merged.items()}


def config_name(row: Row) -> str:
    return "quickstart_moe" if row["model"] == "experts" else "quickstart"


def load(row: Row, folder: Path) -> tuple[Config, dict[str, Any]]:
    """Return the configuration and the config.json of a row. Raise UserError if the rules that need no files refuse it."""
    name = config_name(row)
    overrides = [f"--{field}={value}" for field, value in merge(row, folder).items()]
    files = [ROOT / "configs" / f"{name}.toml", ROOT / "examples" / "arithmetic" / f"{name}.toml"]
    config = load_config(files[0], overrides, root=DemoConfig, more=files[1])
    return config, make_hf_config(config.architecture, 0, "bf16")


def is_valid(row: Row, folder: Path) -> bool:
    """Return whether the rules that need no weights and no machine accept a row."""
    try:
        config, hf_config = load(row, folder)
    except UserError:
        return False
    folder.joinpath("model").mkdir(parents=True, exist_ok=True)
    folder.joinpath("model", "config.json").write_text(json.dumps(hf_config))  # the teacher's
    return not any(find_mistakes(Facts(config, hf_config), PLAN | LAYOUTS))


def build(folder: Path, seed: int = 0) -> list[Row]:
    """Return rows that cover every valid pair of values, found greedily."""
    factors, source = {name: list(values) for name, values in list_factors().items()}, random.Random(seed)
    default = {name: labels[0] for name, labels in factors.items()} | _defaults(factors)
    items = [(name, label) for name, labels in factors.items() for label in labels]
    missing = {pair for pair in itertools.combinations(items, 2) if pair[0][0] != pair[1][0]}
    rows: list[Row] = []
    while missing:
        pair = min(missing)
        row = _complete(dict(pair), default, factors, source, folder)
        if row is None:
            missing.discard(pair)
            continue
        for name in source.sample(list(factors), len(factors)):
            if name not in dict(pair):
                gains = {label: len(_pairs(row | {name: label}) & missing) for label in factors[name]}
                better = sorted((label for label in gains if gains[label] > gains[row[name]]), key=lambda label: -gains[label])
                row |= {name: next((label for label in better if is_valid(row | {name: label}, folder)), row[name])}
        missing -= _pairs(row)
        rows.append(row)
        print(len(rows), len(missing), flush=True)
    return rows


def write_array(rows: list[Row]) -> None:
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]
    ARRAY.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")


def read_array() -> list[Row]:
    names, *rows = json.loads(ARRAY.read_text())
    return [dict(zip(names, row, strict=True)) for row in rows]


def _defaults(factors: dict[str, list[str]]) -> Row:
    values = {}
    for name in factors:
        found: Any = Config.model_fields.get(name.split(".")[0])
        for part in name.split(".")[1:]:
            models = [each for each in _flatten(found.annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
            found = models[0].model_fields.get(part) if models else None
        if found is not None and _as_toml(found.default) in factors[name]:
            values[name] = _as_toml(found.default)
    return values | {"precision.high": "fp32"}


def _complete(fixed: Row, default: Row, factors: dict[str, list[str]], source: random.Random, folder: Path, tries: int = 20) -> Row | None:
    """Return a valid row with these values: the defaults, or defaults with ever more other values."""
    for number in range(tries):
        others = source.sample([name for name in factors if name not in fixed], min(number, len(factors) - 2))
        row = default | {name: source.choice(factors[name]) for name in others} | fixed
        if is_valid(row, folder):
            return row
    return None


def _pairs(row: Row) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(row.items(), 2))


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        write_array(build(Path(scratch)))
