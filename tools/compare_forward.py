"""Run the same tokens through the trainer and a live engine and compare them operator by operator: where is the first difference?

    python tools/checks/compare_forward.py                                    # a tiny random Qwen3 in unified FP8
    python tools/checks/compare_forward.py --config configs/quickstart.toml --rollout.temperature=0.7
    python tools/checks/compare_forward.py --model FOLDER --mode bf16 --high fp32 --json FILE

The engine samples answers and records, in its scheduler, the outputs of its operators for every token of prompt and answer as it serves
them; then the trainer computes all samples packed into one row. Trainer and engine are one process each. Operators are named as in the
precision graph; `rope.q` and `rope.k` are queries and keys behind the rotary positions. Exit code 0 whatever differs.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_random_checkpoint
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import run_script
from megatron_rl.config import Config, load_config
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.model import build_model, freeze, start_megatron, stop_megatron
from megatron_rl.mcore.passes.activation_hooks import record_activations
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import GRAPH, check_run, pin_model
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.model_geometry import ModelGeometry
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

OperatorRows = dict[str, torch.Tensor]
"""Operator -> [T, columns] for the tokens of one sample."""

_LONGEST_PROMPT = 40


@dataclass(frozen=True)
class TensorDifference:
    """The difference of two tensors [T, columns]."""

    tokens: int
    differing: int
    """Tokens whose bits are not all the same."""
    largest: float
    """Largest absolute difference."""
    ulps: int
    """The same, counted in representable numbers."""

    @staticmethod
    def of(trainer: torch.Tensor, engine: torch.Tensor) -> TensorDifference:
        if trainer.dtype != engine.dtype:  # SGLang keeps bf16 logits as float32
            trainer, engine = trainer.float(), engine.float()
        ulps = (_ordinal(trainer) - _ordinal(engine)).abs()
        largest = float((trainer.double() - engine.double()).abs().max()) if trainer.numel() else 0.0
        return TensorDifference(len(trainer), int((ulps > 0).any(-1).sum()), largest, int(ulps.max()) if trainer.numel() else 0)


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Count the representable numbers between zero and x, signed; +0 and -0 are both zero."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * x.element_size() - 1)) - 1)), bits)


def split_engine_record(recorded: OperatorRows, samples: list[TrainingSample]) -> list[OperatorRows]:
    """Return the engine's rows of each sample: of every token but the last, which it never computed with.

    `lm_head` has rows only for tokens after which an answer token was sampled. Raise RunError where the record holds no such sample.
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
    logit_of_row = torch.full((len(tokens),), -1).scatter(0, logit_rows, torch.arange(len(logit_rows)))
    rows_of_samples = []
    for sample in samples:
        stream = by_tokens.get(tuple(sample.ids[:-1].tolist()))
        if stream is None:
            raise RunError("the engine did not record all tokens; ask for fewer with --prompts or --tokens")
        answer = stream[len(sample.prompt_ids) - 1 :]
        rows_of_samples.append({op: values[stream] for op, values in recorded.items()} | {"lm_head": logits[logit_of_row[answer]]})
    return rows_of_samples


def record_trainer(policy: Policy, samples: list[TrainingSample]) -> list[OperatorRows]:
    """Return the trainer's rows of each sample, all of them packed into one micro-batch; shapes as `split_engine_record`."""
    (batch,) = make_micro_batches(samples, sum(sample.length for sample in samples))
    with torch.no_grad(), record_activations(policy.chunks[0]) as recorded:
        policy.forward(batch)
    rows_of_samples: list[OperatorRows] = [{} for _ in samples]
    for op, values in recorded.items():
        for index, rows in zip(batch.sample_indices, values.split(batch.lengths), strict=False):
            rows_of_samples[index][op] = rows[len(samples[index].prompt_ids) - 1 :] if op == "lm_head" else rows
    return rows_of_samples


def compare(trainer: list[OperatorRows], engine: list[OperatorRows], prompt_lengths: list[int]) -> dict[str, dict[str, TensorDifference]]:
    """Return operator -> {"prompt": ..., "answer": ...} over all samples, in the order of computation.

    The engine computes a prompt's tokens together, an answer's one by one.
    """
    differences = {}
    for op in [op for op in trainer[0] if op in engine[0]]:
        pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"prompt": [], "answer": []}
        for trainer_rows, engine_rows, length in zip(trainer, engine, prompt_lengths, strict=True):
            end = 1 if op == "lm_head" else length
            pairs["prompt"].append((trainer_rows[op][:end], engine_rows[op][:end]))
            pairs["answer"].append((trainer_rows[op][end:], engine_rows[op][end:]))
        differences[op] = {
            part: TensorDifference.of(*(torch.cat(side) for side in zip(*of_part, strict=True))) for part, of_part in pairs.items()
        }
    return differences


def run(config: Config, folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Start both sides, sample, compare, and stop everything; return the report, ready for JSON."""
    config = pin_model(config)
    layout = check_run(config, GRAPH)
    if layout.world_size > 1 or config.rollout.tp > 1:
        raise UserError("train.layout", None, "must be one process, and rollout.tp 1: parts of tensors are not compared", "set them to 1")
    with ExitStack() as resources:
        start_megatron(layout, config.train.seed)
        resources.callback(stop_megatron)
        hf_config, contract = read_config(config.model.folder), PrecisionContract.from_config(config.precision)
        shards, model = build_rank_shards(hf_config, layout), freeze(build_model(hf_config, layout, contract))
        load_checkpoint(model, config.model.folder, shards)
        policy = Policy(model, config.rollout.temperature, config.train.micro_batch_tokens)
        write_all_but_weights(folder, describe_weights(hf_config, contract), config.model.folder)
        engine = SGLangEngine(EngineLaunchSpec(config, folder, folder, empty=True))
        resources.callback(engine.stop)
        engine.wait_until_ready()
        plan = SyncPlan.make(ModelGeometry.from_hf_config(hf_config), layout, config.rollout.to_layout(), contract, config.sync.chunk_bytes)
        sync = WeightSync(plan, Rank0(lambda: engine), partial(collect_named_tensors, model, shards, contract), config.sync)
        resources.callback(sync.close)
        sync.run(0)
        engine.tap()
        prompt_ids = _random_prompts(prompts, hf_config["vocab_size"], config.train.seed)
        answers = engine.generate(prompt_ids, SamplingParams(temperature=config.rollout.temperature, max_new_tokens=tokens))
        (record,) = engine.untap(folder)
        pairs = zip(prompt_ids, answers, strict=True)
        samples = [TrainingSample(torch.from_numpy(prompt), torch.from_numpy(answer.output_ids_T)) for prompt, answer in pairs]
        trainer_rows, engine_rows = record_trainer(policy, samples), split_engine_record(load_file(record), samples)
        differences = compare(trainer_rows, engine_rows, [len(prompt) for prompt in prompt_ids])
        engine_logprobs = torch.cat([torch.from_numpy(answer.logprobs_T) for answer in answers])
        distances = (torch.cat(policy.compute_logprobs(samples)[0]) - engine_logprobs).abs()
    first = next((op for op, parts in differences.items() if any(part.differing for part in parts.values())), None)
    return {
        "precision": config.precision.model_dump(mode="json"),
        "operators": {op: {part: asdict(difference) for part, difference in parts.items()} for op, parts in differences.items()},
        "first_difference": first,
        "logprobs": {
            "tokens": len(distances),
            "mean": float(distances.mean()),
            "largest": float(distances.max()),
            "exact": float((distances == 0).float().mean()),
        },
    }


def _random_prompts(count: int, vocabulary: int, seed: int) -> list[np.ndarray]:
    """Return prompts of two tokens or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, _LONGEST_PROMPT + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator, dtype=torch.int32).numpy() for length in lengths]


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report as a table and two lines."""
    table = Table("operator", "prompt", "answer", title="tokens that differ, largest difference", title_justify="left", box=None)
    for op, parts in report["operators"].items():
        table.add_row(op, *(_format_difference(parts[part]) for part in ("prompt", "answer")))
    console.print(table)
    first, logprobs = report["first_difference"], report["logprobs"]
    console.print("No operator differs." if first is None else f"The first difference is in {first}.")
    console.print(
        f"log-probs of {logprobs['tokens']} sampled tokens: |dlogp| mean {logprobs['mean']:.2g}, largest {logprobs['largest']:.2g}, "
        f"exactly 0 for {100 * logprobs['exact']:.4g} %"
    )


def _format_difference(difference: dict[str, Any]) -> str:
    if not difference["differing"]:
        return f"0 of {difference['tokens']}"
    return f"{difference['differing']} of {difference['tokens']}, {difference['largest']:.2g} ({difference['ulps']} ulp)"


def make_config(
    folder: Path, file: Path | None, model: Path | None, mode: str, high: str, layers: int, tokens: int, overrides: list[str]
) -> Config:
    """Return a run's configuration: without a file one of a tiny engine, without a model one of a random model."""
    if file is not None:
        return load_config(file, overrides)
    if model is None:
        model = folder / "model"
        make_random_checkpoint(model, ArchitectureConfig(num_hidden_layers=layers, initializer_range=0.05, rope_theta=100.0), seed=0)
    rollout = {"max_running_requests": 64, "max_total_tokens": 16384, "max_new_tokens": tokens}
    others = {"precision": {"mode": mode, "high": high}, "rollout": rollout, "data": {"max_prompt_tokens": _LONGEST_PROMPT}}
    return Config.model_validate({"model": {"path": model}, **others})


def main(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="A run's TOML file; --section.key=value may follow.")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face checkpoint's folder.")] = None,
    mode: Annotated[str, typer.Option(help="precision.mode, without --config")] = "fp8_unified",
    high: Annotated[str, typer.Option(help="precision.high, without --config")] = "fp32",
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Samples, served at the same time.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled per prompt.")] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
) -> None:
    """Compare trainer and engine, operator by operator."""
    with tempfile.TemporaryDirectory(prefix="megatron-rl-compare-", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # for this user alone
        report = run(make_config(folder, config, model, mode, high, layers, tokens, context.args), folder, prompts, tokens)
    show(report, Console())
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
