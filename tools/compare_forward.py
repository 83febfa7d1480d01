"""Compare the forward passes of the trainer and a live engine operator by operator, to find the first difference.

    python tools/compare_forward.py                                    # a tiny random Qwen3 in unified FP8
    python tools/compare_forward.py --config configs/quickstart.toml --rollout.temperature=0.7
    python tools/compare_forward.py --model FOLDER --mode bf16 --high fp32 --json FILE

The engine samples responses and records the outputs of its operators for every token. The trainer then computes all samples packed into one
row. Trainer and engine are one process each. Operators have their names in the precision graph; `rope.q` and `rope.k` are queries and keys
after the rotary embedding. The exit code is 0 even if operators differ.
"""

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness import JsonFile, write_json
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
"""Operator -> output of shape [tokens, columns] for one sample."""

_LONGEST_PROMPT = 40


def measure_difference(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, Any]:
    """Compare two tensors of shape [tokens, columns].

    Return the number of `tokens`, how many of them are `differing` in any bit, the `largest` absolute difference, and the same in `ulps`.
    """
    if trainer.dtype != engine.dtype:  # SGLang keeps bf16 logits as float32
        trainer, engine = trainer.float(), engine.float()
    ulps = (_ordinal(trainer) - _ordinal(engine)).abs()
    largest = float((trainer.double() - engine.double()).abs().max()) if trainer.numel() else 0.0
    differing = int((ulps > 0).any(-1).sum())
    return {"tokens": len(trainer), "differing": differing, "largest": largest, "ulps": int(ulps.max()) if trainer.numel() else 0}


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Return the signed number of representable values between zero and x. Both +0 and -0 give 0."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & ((1 << (8 * x.element_size() - 1)) - 1)), bits)


def split_engine_record(recorded: OperatorRows, samples: list[TrainingSample]) -> list[OperatorRows]:
    """Return the engine's rows of each sample, for all tokens but the last, which is no input.

    `lm_head` has rows only for the positions that predict a response token. Raise RunError if a sample was not recorded.
    """
    recorded = dict(recorded)
    requests, positions, tokens, logit_rows = (recorded.pop(name) for name in ("requests", "positions", "tokens", "logit_rows"))
    logits = recorded.pop("lm_head")
    newest: dict[int, list[int]] = {}
    streams: list[list[int]] = []
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        if position == 0:
            streams.append([])
            newest[request] = streams[-1]
        newest[request].append(row)
    served_tokens = [tokens[stream].tolist() for stream in streams]
    logit_of_row = torch.full((len(tokens),), -1).scatter(0, logit_rows, torch.arange(len(logit_rows)))
    rows_of_samples = []
    for sample in samples:
        inputs = sample.ids[:-1].tolist()
        # an overlapped scheduler computes one token beyond the end of a response
        stream = next((s[: len(inputs)] for s, served in zip(streams, served_tokens, strict=True) if served[: len(inputs)] == inputs), None)
        if stream is None:
            raise RunError("the engine did not record all tokens; ask for fewer with --prompts or --tokens")
        response = stream[len(sample.prompt_ids) - 1 :]
        rows_of_samples.append({op: values[stream] for op, values in recorded.items()} | {"lm_head": logits[logit_of_row[response]]})
    return rows_of_samples


def record_trainer(policy: Policy, samples: list[TrainingSample]) -> list[OperatorRows]:
    """Return the trainer's rows of each sample, in the form of `split_engine_record`. All samples are in one micro-batch."""
    (batch,) = make_micro_batches(samples, sum(sample.length for sample in samples))
    with torch.no_grad(), record_activations(policy.chunks[0]) as recorded:
        policy.forward(batch.to(next(policy.chunks[0].parameters()).device))
    rows_of_samples: list[OperatorRows] = [{} for _ in samples]
    for op, values in recorded.items():
        for index, rows in zip(batch.sample_indices, values.cpu().split(batch.lengths), strict=False):
            rows_of_samples[index][op] = rows[len(samples[index].prompt_ids) - 1 :] if op == "lm_head" else rows
    return rows_of_samples


def compare(trainer: list[OperatorRows], engine: list[OperatorRows], prompt_lengths: list[int]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {operator: {"prompt": difference, "answer": difference}} over all samples, in the order of computation.

    The two parts are separate because the engine computes the tokens of a prompt together and those of a response one by one.
    """
    differences = {}
    for op in [op for op in trainer[0] if op in engine[0]]:
        pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"prompt": [], "answer": []}
        for trainer_rows, engine_rows, length in zip(trainer, engine, prompt_lengths, strict=True):
            end = 1 if op == "lm_head" else length
            pairs["prompt"].append((trainer_rows[op][:end], engine_rows[op][:end]))
            pairs["answer"].append((trainer_rows[op][end:], engine_rows[op][end:]))
        differences[op] = {part: measure_difference(*map(torch.cat, zip(*each, strict=True))) for part, each in pairs.items()}
    return differences


def run(config: Config, folder: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Start trainer and engine, sample, compare, and stop them; return the report."""
    config = pin_model(config)
    layout = check_run(config, GRAPH)
    if layout.world_size > 1 or config.rollout.tp > 1:
        raise UserError("train.layout", None, "must be one process, and rollout.tp 1: sharded tensors are not compared", "set them to 1")
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
        prompt_ids = _make_random_prompts(prompts, hf_config["vocab_size"], config.train.seed)
        answers = engine.generate(prompt_ids, SamplingParams(temperature=config.rollout.temperature, max_new_tokens=tokens))
        (record,) = engine.untap(folder)
        pairs = zip(prompt_ids, answers, strict=True)
        samples = [TrainingSample(torch.from_numpy(prompt), torch.from_numpy(answer.output_ids_T)) for prompt, answer in pairs]
        trainer_rows, engine_rows = record_trainer(policy, samples), split_engine_record(load_file(record), samples)
        differences = compare(trainer_rows, engine_rows, [len(prompt) for prompt in prompt_ids])
        engine_logprobs = torch.cat([torch.from_numpy(answer.logprobs_T) for answer in answers])
        distances = (torch.cat(policy.compute_logprobs(samples)[0]) - engine_logprobs).abs()
    first = next((op for op, parts in differences.items() if any(part["differing"] for part in parts.values())), None)
    return {
        "precision": config.precision.model_dump(mode="json"),
        "operators": differences,
        "first_difference": first,
        "logprobs": {
            "tokens": len(distances),
            "mean": float(distances.mean()),
            "largest": float(distances.max()),
            "exact": float((distances == 0).float().mean()),
        },
    }


def _make_random_prompts(count: int, vocabulary: int, seed: int) -> list[np.ndarray]:
    """Return random prompts of two tokens or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, _LONGEST_PROMPT + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocabulary, (length,), generator=generator, dtype=torch.int32).numpy() for length in lengths]


def show(report: dict[str, Any], console: Console) -> None:
    table = Table("operator", "prompt", "answer", title="tokens that differ, largest difference", title_justify="left", box=None)
    for op, parts in report["operators"].items():
        table.add_row(op, *(_format_difference(parts[part]) for part in ("prompt", "answer")))
    console.print(table)
    first, logprobs = report["first_difference"], report["logprobs"]
    console.print("No operator differs." if first is None else f"The first difference is in {first}.")
    console.print(
        f"log-probs of {logprobs['tokens']} sampled tokens: |Δ log p| mean {logprobs['mean']:.2g}, largest {logprobs['largest']:.2g}, "
        f"exactly 0 for {100 * logprobs['exact']:.4g} %"
    )


def _format_difference(difference: dict[str, Any]) -> str:
    if not difference["differing"]:
        return f"0 of {difference['tokens']}"
    return f"{difference['differing']} of {difference['tokens']}, {difference['largest']:.2g} ({difference['ulps']} ulp)"


def make_config(
    folder: Path, file: Path | None, model: Path | None, mode: str, high: str, layers: int, tokens: int, overrides: list[str]
) -> Config:
    """Return the configuration to run: the one in `file`, or else one with a small engine. Without a model, make a random one."""
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
    config: Annotated[Path | None, typer.Option(help="TOML file of a run; --section.key=value may follow.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face checkpoint.")] = None,
    mode: Annotated[str, typer.Option(help="precision.mode, without --config.")] = "fp8_unified",
    high: Annotated[str, typer.Option(help="precision.high, without --config.")] = "fp32",
    layers: Annotated[int, typer.Option(help="Layers of the random model.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Samples, generated at the same time.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled per prompt.")] = 32,
    json_file: JsonFile = None,
) -> None:
    """Compare trainer and engine operator by operator."""
    with tempfile.TemporaryDirectory(prefix="megatron-rl-compare-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        report = run(make_config(folder, config, model, mode, high, layers, tokens, context.args), folder, prompts, tokens)
    show(report, Console())
    write_json(json_file, report)


if __name__ == "__main__":
    run_script(main)
