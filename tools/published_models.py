"""Write docs/reference/models.md: which published models the trainer supports, from their config.json (configs/published_models.jsonl).

    python tools/published_models.py

A line of the file has a model's name, its config.json, and where known its published size: the bytes that its safetensors index names, two
for each parameter, or the rounded number of parameters of its model card or hub page. The command applies the rules of `plan` and refuses
sizes that differ from the counted ones.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config
from megatron_rl.cost.weights import count_kv_bytes_per_token, count_state_bytes_per_request
from megatron_rl.cost.workload import Workload
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format, stores_mxfp4
from parallel.mtp_layers import list_mtp_tensors
from parallel.wrappers import unwrap

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "configs" / "published_models.jsonl"
PAGE = ROOT / "docs" / "reference" / "models.md"
_CONFIG = Config.model_validate({"model": {"path": "x"}, "precision": {"mode": "bf16"}, "rollout": {"max_new_tokens": 64}}, strict=False)
_UNITS = {"B": 10**9, "M": 10**6}
_TEXT = """# Published models

Made by `python tools/published_models.py` from the [config.json files](../../configs/published_models.jsonl) of published models, by the
rules of `megatron-rl plan`. No weights were read. The fields come from copies of the files in public repositories, or were written from
their published values; nested sections of refused models are left out. *Published*: the bytes in the checkpoint's safetensors index, two
for each parameter, or the number of parameters that the model card or the hub names. Each agrees with the counted *parameters*, which
exclude layers for multi-token prediction (MTP) and vision towers. *Cache*: bytes per token of all layers in BF16, and the size of the
states of gated delta nets per request, with `rollout.tp = 1`. *At most 2,048 tokens*: the longest prompt and completion together, up to
which sparse attention selects every token.

| model | family | parameters | published | cache | checkpoint |
|---|---|---|---|---|---|
{supported}

The tokenizers of Moonlight and Kimi-K2 are published as code: [convert them](../guides/checkpoints.md) first.

Refused, with the line that `plan` and `train` print:

| model | line |
|---|---|
{refused}
"""


class Row(NamedTuple):
    model: str
    cells: tuple[str, ...]
    refusal: str = ""


def describe(line: dict[str, Any]) -> Row:
    """Return the table row of a model. Raise RunError if its published size differs from the counted one."""
    name, config, published = line["model"], line["config"], line.get("published", "")
    try:
        job = Workload.from_config(_CONFIG, unwrap(config))
    except UserError as error:
        return Row(name, (), str(error))
    parameters = sum(tensor.rows * tensor.cols for tensor in (job.model.tensors() | job.model.list_kept()).values())
    mtp = sum(tensor.rows * tensor.cols for tensor in list_mtp_tensors(job.model).values())
    if published and not _agrees(published, parameters, mtp):
        raise RunError(f"{name} has {parameters} parameters and {mtp} of MTP layers, but {published} are published")
    format = find_checkpoint_format(config)
    kv, states = count_kv_bytes_per_token(job, 1), count_state_bytes_per_request(job, 1)
    cache = f"{kv:,} + {states / 2**20:.1f} MiB" if states else f"{kv:,}"
    return Row(
        name,
        (
            f"`{job.model.family}`" + (f", at most {most:,} tokens" if (most := job.model.most_tokens) else ""),
            f"{parameters:,}",
            published,
            cache,
            "MXFP4" if stores_mxfp4(config) else format.name.upper() if format else "BF16",
        ),
    )


def _agrees(published: str, parameters: int, mtp: int) -> bool:
    """Return whether a published size is that of the parameters: "16381470720 bytes", "7.62B", or "110B with MTP"."""
    number, _, kind = published.partition(" ")
    if kind == "bytes":
        return int(number) == 2 * parameters
    value, decimals = number[:-1], len(number[:-1].partition(".")[2])
    return f"{(parameters + mtp * (kind == 'with MTP')) / _UNITS[number[-1]]:.{decimals}f}" == value


def describe_all() -> list[Row]:
    return [describe(json.loads(line)) for line in MODELS.read_text(encoding="utf-8").splitlines()]


def render(rows: list[Row]) -> str:
    supported = "\n".join(f"| {' | '.join((row.model, *row.cells))} |" for row in rows if not row.refusal)
    refused = "\n".join(f"| {row.model} | {row.refusal} |" for row in rows if row.refusal)
    return _TEXT.format(supported=supported, refused=refused)


def main() -> None:
    PAGE.write_text(render(describe_all()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    run_script(main)
