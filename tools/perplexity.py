"""Measure what each precision mode costs a model: perplexity of a text, and |Δ log p| of its tokens against transformers in FP32.

    python tools/perplexity.py --model FOLDER --text FILE                       # all modes, with high = fp32 and bf16
    python tools/perplexity.py --model FOLDER --text FILE --modes bf16,fp8_unified --high fp32 --documents 32 --tokens 256

A text file is split into documents of `--tokens` tokens; in a JSONL file, `question` and `answer` of each row are one document. All tokens
but the first of a document are scored by transformers, and by the trainer with the weights and quantized inputs that the engine has in that
mode (`mcore.passes.engine_emulation`). Masters are not spread.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import JsonFile, parse_names, write_json
from rich.console import Console
from rich.table import Table

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import run_script
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.model import build_model, freeze, start_megatron, stop_megatron
from megatron_rl.mcore.passes.engine_emulation import emulate_engine
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import GRAPH, check_run
from parallel.formats import MODES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_documents(text: Path, model: Path, count: int, tokens: int) -> list[list[int]]:
    """Return up to `count` documents of 2 to `tokens` token ids. Raise UserError if there are none."""
    try:
        content = text.read_text()
        rows = [json.loads(line) for line in content.splitlines() if line] if text.suffix == ".jsonl" else []
        texts = [f"{row['question']}\n{row['answer']}" for row in rows] or [content]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("--text", str(text), f"cannot be read ({error!r})", "give a text file, or JSONL with question and answer") from None
    tokenizer = load_tokenizer(model)
    documents = []
    for ids in (tokenizer(one)["input_ids"] for one in texts[: count if rows else 1]):
        documents += [ids[:tokens]] if rows else [ids[start : start + tokens] for start in range(0, len(ids), tokens)]
    documents = [ids for ids in documents if len(ids) > 1][:count]
    if not documents:
        raise UserError("--text", str(text), "contains fewer than two tokens", "give a longer text")
    return documents


def score_by_transformers(model: Path, dtype: str, documents: list[list[int]]) -> torch.Tensor:
    """Return the float32 log-probs of all scored tokens. Needs a process without Megatron, whose CPU platform changes torch."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype], local_files_only=True)
    logprobs = []
    with torch.no_grad():
        for ids in map(torch.tensor, documents):
            rows = network(ids[None]).logits[0, :-1].float().log_softmax(-1)
            logprobs.append(rows.gather(1, ids[1:, None])[:, 0])
    return torch.cat(logprobs)


def score_by_trainer(config: Config, documents: list[list[int]]) -> torch.Tensor:
    """Return the same log-probs as the engine of this mode computes them. Megatron must be running."""
    folder, contract = config.model.folder, PrecisionContract.from_config(config.precision)
    hf_config, layout = read_config(folder), config.train.layout.to_layout()
    shards, model = build_rank_shards(hf_config, layout), freeze(build_model(hf_config, layout, contract))
    load_checkpoint(model, folder, shards)
    policy = Policy(model, 1.0, config.train.micro_batch_tokens)
    with emulate_engine(model, collect_named_tensors(model, shards, contract), contract.engine_format):
        return torch.cat(policy.compute_logprobs([TrainingSample(ids[:1], ids[1:]) for ids in map(torch.tensor, documents)])[0])


def measure(model: Path, text: Path, modes: list[str], highs: list[str], count: int, tokens: int) -> list[dict[str, Any]]:
    """Return one row per mode and `high`. The other rows are compared with the first, transformers in FP32."""
    sections = {"model": {"path": model}, "data": {"max_prompt_tokens": 1}, "rollout": {"max_new_tokens": tokens - 1}}
    runs = {
        (mode, high): Config.model_validate({**sections, "precision": {"mode": mode, "high": high}}) for high in highs for mode in modes
    }
    layouts = [check_run(config, GRAPH) for config in runs.values()]
    documents = read_documents(text, model, count, tokens)
    scores = {}
    for dtype in dict.fromkeys(["fp32", *highs]):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            scores["transformers", dtype] = pool.submit(score_by_transformers, model, dtype, documents).result()
    with ExitStack() as resources:
        start_megatron(layouts[0], 0)
        resources.callback(stop_megatron)
        for key, config in runs.items():
            scores[key] = score_by_trainer(config, documents)
    reference = scores["transformers", "fp32"].double()
    return [_compare(mode, high, logprobs.double(), reference) for (mode, high), logprobs in scores.items()]


def _compare(mode: str, high: str, logprobs: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    difference = logprobs - reference
    return {
        "mode": mode,
        "high": high,
        "tokens": len(logprobs),
        "perplexity": math.exp(-float(logprobs.mean())),
        "nats_more": 0.0 - float(difference.mean()),
        "standard_error": float(difference.std()) / math.sqrt(len(difference)),
        "abs_mean": float(difference.abs().mean()),
        "abs_max": float(difference.abs().max()),
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print perplexity, extra nats per token with standard error, and |Δ log p| of a token."""
    table = Table("mode", "high", "perplexity", "nats more", "|Δ log p| mean", "largest", box=None)
    for row in rows:
        more = f"{row['nats_more']:+.5f} ± {row['standard_error']:.5f}"
        table.add_row(row["mode"], row["high"], f"{row['perplexity']:.4f}", more, f"{row['abs_mean']:.2g}", f"{row['abs_max']:.2g}")
    console.print(table)
    console.print(f"{rows[0]['tokens']} tokens; the last three columns compare with the first row.")


def main(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face checkpoint.", show_default=False)],
    text: Annotated[Path, typer.Option(help="Text file, or JSONL with question and answer.", show_default=False)],
    modes: Annotated[str, typer.Option(help="Values of precision.mode, separated by commas.")] = ",".join(MODES),
    high: Annotated[str, typer.Option(help="Values of precision.high.")] = "fp32,bf16",
    documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens per document.")] = 256,
    json_file: JsonFile = None,
) -> None:
    """Measure what each precision mode costs a model on a text."""
    chosen = parse_names("--modes", modes, MODES), parse_names("--high", high, DTYPES)
    rows = measure(model, text, *chosen, documents, tokens)
    show(rows, Console())
    write_json(json_file, rows)


if __name__ == "__main__":
    run_script(main)
