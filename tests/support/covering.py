"""A covering array of the documented values of the configuration. `python -m support.covering` writes it to `ARRAY`.

Every value of every enumeration and switch is in a row, and so is every pair of the values that meet in a computation
(`support.choices.meets`) and that preflight accepts together. Enumerations and switches are found in the configuration's models, so a new
one is missing from the array until it is written again, or until `support.choices.LEFT_OUT` says why no row can have it.
"""

import itertools
import json
import random
import shutil
from collections import ChainMap, Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pandas
import torch
from pydantic import BaseModel

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.config import Config, load_config
from megatron_rl.config.algorithm import PRESETS, Correction
from megatron_rl.errors import UserError
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.precision.contract import QUANTIZED_ROLES
from megatron_rl.precision.quantizers import quantize
from megatron_rl.preflight import LAYOUTS, PLAN, Facts, find_mistakes
from parallel.formats import BF16, FORMATS
from parallel.model_geometry import ModelGeometry, with_trained_mtp
from parallel.shards import FP32_ROLES
from support.choices import ALONE, COMPOSED, LEFT_OUT, MODELS, NEEDS, TOGETHER, meets
from support.models import masters
from support.processes import ROOT
from support.train_command import TINY

ARRAY = ROOT / "tests" / "engine" / "covering_array.json"
QUICKSTART = ROOT / "configs" / "quickstart.toml"
Row = dict[str, str]
"""Label of the chosen value of each factor."""
ALWAYS = {
    "reward.function": "support.agent_programs:judge",
    "algorithm.entropy_coef": 0.01,
    "algorithm.kl_coef": 0,
    "algorithm.updates_per_step": 1,
    "train.learning_rate": 1e-4,
}
"""Completions of a random model have different rewards, and the entropy's gradient is a learning signal even if no reward is left."""
END = 256  # the byte tokenizer's token


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


def list_present(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of every field of a configuration, once per element of a tuple, without tables."""
    if isinstance(value, BaseModel):
        for field in type(value).model_fields:
            yield from list_present(getattr(value, field), f"{name}.{field}".lstrip("."))
    elif isinstance(value, tuple):
        for each in value:
            yield from list_present(each, name)
    elif not isinstance(value, dict):
        yield name, value


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flatten(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType, tuple, list):
        return [part for argument in get_args(annotation) for part in _flatten(argument)]
    return [annotation]


def list_factors() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the overrides of each value of each factor."""
    chosen = TOGETHER | ALONE
    found = {
        name: {label: {name: label} for label in map(_as_toml, values) if (name, label) not in LEFT_OUT}
        for name, values in find_values().items()
        if name not in chosen and name not in COMPOSED and Correction not in values
    }
    return chosen | {name: values for name, values in found.items() if len(values) > 1}


def merge(row: Row, folder: Path, server: str = "http://127.0.0.1:9") -> dict[str, Any]:
    """Return the overrides of a row for a run in `folder`."""
    factors, merged = list_factors(), {**TINY, "model.path": "FOLDER/model", **ALWAYS}
    for factor, label in row.items():
        merged |= factors[factor][label]
    places = {"FOLDER": str(folder), "SERVER": server}
    for name, value in merged.items():
        for place, path in places.items() if isinstance(value, str) else ():
            merged[name] = merged[name].replace(place, path)
    return {name: value for name, value in merged.items() if not name.startswith(("architecture.", "warm_start."))}


def load(row: Row, folder: Path) -> tuple[Config, dict[str, Any]]:
    """Return the configuration and the config.json of a row. Raise UserError if the rules that need no files refuse it."""
    config = load_config(QUICKSTART, [f"--{field}={value}" for field, value in merge(row, folder).items()])
    layers = 4 if row["trainer"] == "vpp" else 2
    model = MODELS[row["model"]] | {"num_hidden_layers": layers, "eos_token_id": END, "pad_token_id": END, "bos_token_id": None}
    format = FORMATS[row["weights"]].with_scales(config.precision.scale_format)
    if not format.quantized:
        return config, model | {"torch_dtype": format.dtype}
    return config, model | {"torch_dtype": BF16.dtype, "quantization_config": format.quantization_config()}


def is_valid(row: Row, folder: Path) -> bool:
    """Return whether the rules that need no weights and no machine accept a row."""
    try:
        config, hf_config = load(row, folder)
    except UserError:
        return False
    folder.joinpath("model").mkdir(parents=True, exist_ok=True)
    folder.joinpath("model", "config.json").write_text(json.dumps(hf_config))  # the teacher's
    return not any(find_mistakes(Facts(config, hf_config), PLAN | LAYOUTS))


def write_inputs(row: Row, folder: Path) -> None:
    """Write the model and the problems of a row."""
    config, hf_config = load(row, folder)
    hf_config, model = with_trained_mtp(hf_config), folder / "model"
    make_byte_tokenizer(model)
    shutil.copy(CHAT_TEMPLATE, model)
    format, weights = FORMATS[row["weights"]].with_scales(config.precision.scale_format), masters(hf_config)
    geometry = ModelGeometry.from_hf_config(hf_config)
    for tensor in (geometry.tensors() | geometry.list_kept()).values():
        if format.quantized and tensor.role in QUANTIZED_ROLES:
            weights[tensor.name], weights[format.scale_name(tensor.name)] = quantize(weights[tensor.name], format)
        elif tensor.role not in FP32_ROLES:
            weights[tensor.name] = weights[tensor.name].to(getattr(torch, (BF16 if format.quantized else format).dtype))
    write_checkpoint(model, load(row, folder)[1], weights, None)
    write_problems(folder)


def write_problems(folder: Path) -> None:
    """Write 48 training problems and 8 held-out ones in the format of every choice of data."""
    for part, numbers in {"train": range(10, 58), "eval": range(58, 66)}.items():
        sums = [(f"{number}+{number}=", str(2 * number)) for number in numbers]
        rows = {
            "gsm8k.jsonl": [{"question": question, "answer": f"thus #### {answer}"} for question, answer in sums],
            "deepmath.jsonl": [{"question": question, "final_answer": answer, "difficulty": 3.0} for question, answer in sums],
            "aime.jsonl": [{"problem": question, "answer": answer} for question, answer in sums],
            "math.json": [{"problem": question, "answer": answer, "level": f"Level {answer[0]}"} for question, answer in sums],
            "columns.parquet": [{"q": question, "a": answer, "l": int(answer[0]), "p": 0.5} for question, answer in sums],
            "verl.jsonl": [
                {"data_source": "sums", "prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": answer}}
                for question, answer in sums
            ],
        }
        for name, values in rows.items():
            path = folder / f"{part}_{name}"
            if path.suffix == ".parquet":
                pandas.DataFrame(values).to_parquet(path)
            else:
                path.write_text(json.dumps(values) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in values))


def build(folder: Path, seed: int = 0) -> list[Row]:
    """Return rows that have every valid pair of values that meet, and every value. The array's rows stay, and more are found greedily."""
    factors, source = {name: list(values) for name, values in list_factors().items()}, random.Random(seed)
    default = {name: labels[0] for name, labels in factors.items()} | _defaults(factors)
    single = {((name, label),) for name, labels in factors.items() for label in labels}
    missing = single | {
        (one, other) for (one,), (other,) in itertools.product(single, single) if one[0] < other[0] and meets(one[0], other[0])
    }
    rows = [row for row in _keep(default, factors) if is_valid(row, folder)]
    missing -= set().union(*map(_parts, rows))
    presets = [_of_preset(name, factors) for name in PRESETS if (("algorithm.name", name),) in missing]
    while missing:
        left = Counter(tuple(name for name, _ in part) for part in missing)  # the largest factors first; others fit in beside them
        wanted = presets.pop(0) if presets else dict(min(missing, key=lambda part: (-left[tuple(name for name, _ in part)], part)))
        first = _complete(wanted, default, factors, source, folder)
        if first is None:
            assert "algorithm.name" not in wanted, wanted
            print("no row has", wanted, flush=True)
            missing -= _parts(wanted)
            continue
        row = max((_fill(first, wanted, missing, factors, source, folder) for _ in range(5)), key=lambda row: len(_parts(row) & missing))
        missing -= _parts(row)
        rows.append(row)
        print(len(rows), len(missing), flush=True)
    return rows


def _fill(row: Row, wanted: Row, missing: set[Any], factors: dict[str, list[str]], source: random.Random, folder: Path) -> Row:
    """Return the row with other choices that cover more of what is missing, apart from the wanted ones."""
    for name in source.sample(list(factors), len(factors)):
        if name in wanted or name == "algorithm.name":
            continue
        gains = {label: len(_parts(row | {name: label}, name) & missing) for label in factors[name]}
        better = sorted((label for label in gains if gains[label] > gains[row[name]]), key=lambda label: -gains[label])
        if name in ALONE and not better and source.random() < 0.3:  # once more, beside other choices
            better = source.sample(factors[name], 1)
        row = row | {name: next((label for label in better if is_valid(row | {name: label}, folder)), row[name])}
    return row


def write_array(rows: list[Row]) -> None:
    lines = [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)]
    ARRAY.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")


def read_array() -> list[Row]:
    names, *rows = json.loads(ARRAY.read_text())
    return [dict(zip(names, row, strict=True)) for row in rows]


def _keep(default: Row, factors: dict[str, list[str]]) -> list[Row]:
    """Return the rows of the array that only have choices of `factors`, with the default of a new factor. Without a file there are none."""
    rows = read_array() if ARRAY.exists() else []
    return [default | row for row in rows if all(label in factors.get(name, ()) for name, label in row.items())]


def _of_preset(name: str, factors: dict[str, list[str]]) -> Row:
    """Return the choices that a preset stands for."""
    values = {f"algorithm.{field}": str(value) for field, value in PRESETS[name].items()}
    kl = {"algorithm.kl_in": "in the reward", "algorithm.kl_estimator": values.get("algorithm.kl_estimator", "")}
    chosen = {"KL": next((label for field, label in kl.items() if field in values), "none")}
    return {"algorithm.name": name} | chosen | {factor: label for factor, label in values.items() if label in factors.get(factor, ())}


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


def _complete(fixed: Row, default: Row, factors: dict[str, list[str]], source: random.Random, folder: Path, tries: int = 40) -> Row | None:
    """Return a valid row with these values: the defaults, or defaults with ever more other values."""
    for number in range(tries):
        others = source.sample([name for name in factors if name not in fixed], min(number // 2, len(factors) - 2))
        needed = [NEEDS.get(choice, {}) for choice in fixed.items()]
        row = default | dict(ChainMap(*needed)) | {name: source.choice(factors[name]) for name in others} | fixed
        if is_valid(row, folder):
            return row
    return None


def _parts(row: Row, of: str = "") -> set[tuple[tuple[str, str], ...]]:
    """Return the values and the pairs of values that a row covers, or those of one factor."""
    pairs = ((of, name) for name in row) if of else itertools.combinations(row, 2)
    met = {tuple(sorted([(one, row[one]), (other, row[other])])) for one, other in pairs if one != other and meets(one, other)}
    return met | {((name, row[name]),) for name in ([of] if of else row)}


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        write_array(build(Path(scratch)))
