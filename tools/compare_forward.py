"""Runs the same tokens through the trainer and a live engine and compares them operator by operator: where is the first difference?

    python tools/compare_forward.py                                    # a tiny random Qwen3 in unified FP8
    python tools/compare_forward.py --config configs/quickstart.toml --rollout.temperature=0.7
    python tools/compare_forward.py --model FOLDER --mode bf16 --high fp32 --json FILE

The engine samples answers and records, in its scheduler, what its operators gave for every token of prompt and answer as it served them;
then the trainer computes all sequences packed into one row. Trainer and engine are one process each. Operators are named as in the
precision graph; `rope.q` and `rope.k` are queries and keys behind the rotary positions. Exit code 0 whatever differs.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import format_error
from megatron_rl.config import ArchitectureConfig, Config, load_config
from megatron_rl.errors import MegatronRLError, RunError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.activation_hooks import record_activations
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.export import save_hf
from megatron_rl.mcore.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.mcore.model import build_model, freeze, start_megatron, stop_megatron
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.training.preflight import preflight
from megatron_rl.training.sft_warmup import make_warm_start_checkpoint
from megatron_rl.types import SamplingParams
from rollout_sglang.engine import start_engine_and_wait

OperatorRows = dict[str, torch.Tensor]
"""Operator -> [T, columns] for the tokens of one sequence."""

_LONGEST_PROMPT = 40


@dataclass(frozen=True)
class TensorDifference:
    """How far two tensors [T, columns] are apart."""

    tokens: int
    differing: int
    """Tokens whose bits are not all the same."""
    largest: float
    """Largest absolute difference."""
    ulps: int
    """The same, counted in representable numbers."""

    @staticmethod
    def of(ours: torch.Tensor, theirs: torch.Tensor) -> TensorDifference:
        if ours.dtype != theirs.dtype:  # SGLang keeps bf16 logits as float32
            ours, theirs = ours.float(), theirs.float()
        apart = (_ordinal(ours) - _ordinal(theirs)).abs()
        largest = float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
        return TensorDifference(len(ours), int((apart > 0).any(-1).sum()), largest, int(apart.max()) if ours.numel() else 0)


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """The number of representable numbers between zero and x, signed; +0 and -0 are both zero."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * x.element_size() - 1)) - 1)), bits)


def engine_rows(recorded: OperatorRows, sequences: list[TrainingSample]) -> list[OperatorRows]:
    """What the engine recorded for each sequence; every token but the last, which was never computed with. `lm_head` is there for the
    tokens that an answer token was sampled after.

    Raises RunError where the record holds no such sequence.
    """
    recorded = dict(recorded)
    requests, positions, tokens, logit_rows = (recorded.pop(name) for name in ("requests", "positions", "tokens", "logit_rows"))
    logits = recorded.pop("lm_head")
    served: dict[int, list[int]] = {}
    streams: list[list[int]] = []
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        if position == 0:
            streams.append(served.setdefault(request, []))
            streams[-1] = served[request] = []
        served[request].append(row)
    by_tokens = {tuple(tokens[stream].tolist()): stream for stream in streams}
    place = torch.full((len(tokens),), -1).scatter(0, logit_rows, torch.arange(len(logit_rows)))
    found = []
    for sequence in sequences:
        stream = by_tokens.get(tuple((sequence.prompt_ids + sequence.response_ids)[:-1]))
        if stream is None:
            raise RunError("the engine did not record all tokens; ask for fewer with --prompts or --tokens")
        answered = stream[len(sequence.prompt_ids) - 1 :]
        found.append({op: values[stream] for op, values in recorded.items()} | {"lm_head": logits[place[answered]]})
    return found


def trainer_rows(policy: Policy, sequences: list[TrainingSample]) -> list[OperatorRows]:
    """What the trainer's operators give for each sequence, all of them packed into one row; shapes as `engine_rows`."""
    (batch,) = make_micro_batches(sequences, sum(sequence.length for sequence in sequences))
    with torch.no_grad(), record_activations(policy.chunks[0]) as recorded:
        policy.forward(batch)
    found: list[OperatorRows] = [{} for _ in sequences]
    for op, values in recorded.items():
        for index, rows in zip(batch.sample_indices, values.split(batch.lengths), strict=False):
            found[index][op] = rows[len(sequences[index].prompt_ids) - 1 :] if op == "lm_head" else rows
    return found


def compare(ours: list[OperatorRows], theirs: list[OperatorRows], prompts: list[int]) -> dict[str, dict[str, TensorDifference]]:
    """Operator -> {"prompt": TensorDifference, "answer": TensorDifference} over all sequences, in the order of computation. `prompts`:
    lengths of the prompts;
    the engine computes their tokens together, the rest one by one."""
    found = {}
    for op in [op for op in ours[0] if op in theirs[0]]:
        pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"prompt": [], "answer": []}
        for trainer, engine, length in zip(ours, theirs, prompts, strict=True):
            cut = 1 if op == "lm_head" else length
            pairs["prompt"].append((trainer[op][:cut], engine[op][:cut]))
            pairs["answer"].append((trainer[op][cut:], engine[op][cut:]))
        found[op] = {part: TensorDifference.of(*(torch.cat(side) for side in zip(*given, strict=True))) for part, given in pairs.items()}
    return found


def run(config: Config, folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Brings up both sides, samples, compares, and ends everything. The findings, ready for JSON."""
    layout = preflight(config, data=False)
    if layout.world_size > 1 or config.rollout.tp > 1:
        raise UserError("train.layout", None, "must be one process, and rollout.tp 1: parts of tensors are not compared", "set them to 1")
    with ExitStack() as resources:
        start_megatron(layout, config.train.seed)
        resources.callback(stop_megatron)
        if not (config.model.path / "config.json").is_file():
            make_warm_start_checkpoint(config, layout, lambda _: None)
        hf_config, contract = read_config(config.model.path), PrecisionContract.from_config(config.precision)
        shards, model = build_rank_shards(hf_config, layout), freeze(build_model(hf_config, layout, contract))
        load_checkpoint(model, config.model.path, shards)
        policy = Policy(model, config.rollout.temperature, config.train.micro_batch_tokens)
        save_hf(folder / "engine", collect_named_tensors(model, shards, contract), hf_config, layout, contract, config.model.path)
        engine = start_engine_and_wait(config, folder / "engine", folder)
        resources.callback(engine.stop)
        engine.tap()
        asked = _random_prompts(prompts, hf_config["vocab_size"], config.train.seed)
        answers = engine.generate(asked, SamplingParams(temperature=config.rollout.temperature, max_new_tokens=tokens))
        (record,) = engine.untap(folder)
        sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(asked, answers, strict=True)]
        sizes = compare(trainer_rows(policy, sequences), engine_rows(load_file(record), sequences), [len(prompt) for prompt in asked])
        theirs = torch.tensor([value for answer in answers for value in answer.logprobs_T])
        apart = (torch.cat(policy.compute_logprobs(sequences)[0]) - theirs).abs()
    first = next((op for op, parts in sizes.items() if any(size.differing for size in parts.values())), None)
    return {
        "precision": config.precision.model_dump(mode="json"),
        "operators": {op: {part: asdict(size) for part, size in parts.items()} for op, parts in sizes.items()},
        "first_difference": first,
        "logprobs": {
            "tokens": len(apart),
            "mean": float(apart.mean()),
            "largest": float(apart.max()),
            "exact": float((apart == 0).float().mean()),
        },
    }


def _random_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of two tokens or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, _LONGEST_PROMPT + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def show(found: dict[str, Any], console: Console) -> None:
    """The findings as a table and two lines."""
    table = Table("operator", "prompt", "answer", title="tokens that differ, largest difference", title_justify="left", box=None)
    for op, parts in found["operators"].items():
        table.add_row(op, *(_size_text(parts[part]) for part in ("prompt", "answer")))
    console.print(table)
    first, apart = found["first_difference"], found["logprobs"]
    console.print("No operator differs." if first is None else f"The first difference is in {first}.")
    console.print(
        f"log-probs of {apart['tokens']} sampled tokens: |dlogp| mean {apart['mean']:.2g}, largest {apart['largest']:.2g}, "
        f"exactly 0 for {100 * apart['exact']:.4g} %"
    )


def _size_text(size: dict[str, Any]) -> str:
    if not size["differing"]:
        return f"0 of {size['tokens']}"
    return f"{size['differing']} of {size['tokens']}, {size['largest']:.2g} ({size['ulps']} ulp)"


def _config(
    folder: Path, file: Path | None, model: Path | None, mode: str, high: str, layers: int, tokens: int, overrides: list[str]
) -> Config:
    """A run's configuration; without a file one of a tiny engine, without a model that of a random one that is never trained."""
    if file is not None:
        config = load_config(file, overrides)
        warm = config.model.warm_start.model_copy(update={"steps": 0})
        made = {} if (config.model.path / "config.json").is_file() else {"path": folder / "model"}
        return config.model_copy(update={"model": config.model.model_copy(update={"warm_start": warm, **made})})
    tiny = ArchitectureConfig(num_hidden_layers=layers, initializer_range=0.05, rope_theta=100.0).model_dump()
    described = {"path": model} if model else {"path": folder / "model", "create": tiny, "warm_start": {"steps": 0}}
    rollout = {"max_running_requests": 64, "max_total_tokens": 16384, "max_new_tokens": tokens}
    fixed = {"precision": {"mode": mode, "high": high}, "rollout": rollout, "data": {"max_prompt_tokens": _LONGEST_PROMPT}}
    return Config.model_validate({"model": described, **fixed})


def main(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="A run's TOML file; --section.key=value may follow.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face checkpoint's folder.")] = None,
    mode: Annotated[str, typer.Option(help="precision.mode, without --config")] = "fp8_unified",
    high: Annotated[str, typer.Option(help="precision.high, without --config")] = "fp32",
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Sequences, served at the same time.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled per sequence.")] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the findings here.")] = None,
) -> None:
    """Compare trainer and engine, operator by operator."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-compare-"))  # for this user alone
    try:
        found = run(_config(folder, config, model, mode, high, layers, tokens, context.args), folder, prompts, tokens)
    except MegatronRLError as error:
        print(format_error(error), file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(found, Console())
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app()
