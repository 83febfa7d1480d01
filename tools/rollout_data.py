"""Measure the way of a step's completions from the engines' answers to the replicas: CPU time and bytes per token.

    python tools/rollout_data.py                                    # 10^5 tokens per answer and replica, 1, 2 and 4 replicas
    python tools/rollout_data.py --tokens 300000 --replicas 1,3     # other sizes
    python tools/rollout_data.py --experts 48x8                     # with the routing of 48 layers and 8 experts

The engine's server writes answers of several completions, once as SGLang's JSON and once in columns (`rollout_sglang.answers`), and rank 0
reads them into arrays, decodes the text, and writes the tasks of the reward workers, once with lists of tokens and once with their bytes.
The forms take turns. Then a world of one rank per replica shares samples over gloo (`training.samples`), with so many tokens per replica.
Times are CPU time, medians of `--repeat`. Texts are of a tokenizer that is trained here on Python's own sources.
"""

import base64
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from harness import JsonFile, parse_numbers, run_on_ranks, write_json
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.errors import UserError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.model import start_megatron
from megatron_rl.rewards.foreign import Sample
from megatron_rl.rewards.thinking import decode_completion
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.samples import share_samples
from megatron_rl.types import Completion, Problem, Reward
from megatron_rl.workers.plain import dump
from parallel.layout import Layout
from rollout_sglang.answers import pack_answers, parse_generation, read_answers, read_routed_experts

_GROUP = 4
_ATTENTION_LENGTH = 60_000.0
_VOCABULARY = 8192
Answers = list[dict[str, Any]]


def train_tokenizer() -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """Return a byte-level tokenizer and the int32 tokens of its texts."""
    files = [str(file) for file in sorted(Path(statistics.__file__).parent.glob("*.py"))[:40]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(files, vocab_size=_VOCABULARY, show_progress=False)
    ids = [number for file in files for number in tokenizer.encode(Path(file).read_text(errors="replace")).ids]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer), np.array(ids, np.int32)


def make_answers(ids: np.ndarray, tokenizer: Any, shape: RoutingShape | None) -> Answers:
    """Return SGLang's answers to one prompt token each; `ids`: tokens of all completions, int32."""
    source, answers = np.random.default_rng(0), []
    for part in np.array_split(ids, _GROUP):
        logprobs = (-source.random(len(part), np.float32)).astype(float).tolist()
        meta: dict[str, Any] = {"id": "0" * 32, "finish_reason": {"type": "stop", "matched": 0}, "weight_version": "7", "cached_tokens": 0}
        meta["output_token_logprobs"] = list(zip(logprobs, part.tolist(), [None] * len(part), strict=True))
        if shape is not None:
            experts = source.integers(0, shape.num_experts, (len(part), shape.num_layers, shape.top_k), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        answers.append({"text": tokenizer.decode(part.tolist()), "output_ids": part.tolist(), "meta_info": meta})
    return answers


def read_json(content: bytes, shape: RoutingShape | None) -> list[tuple[np.ndarray, ...]]:
    """Return the arrays of SGLang's JSON answers, as httpx decodes them for a client without columns."""
    results = []
    for answer in json.loads(content):
        entries = (meta := answer["meta_info"])["output_token_logprobs"]
        arrays = [np.array([entry[1] for entry in entries], np.int32), np.array([entry[0] for entry in entries], np.float32)]
        if shape is not None:
            arrays.append(np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).astype(shape.dtype))
        results.append(tuple(arrays))
    return results


def read_columns(content: bytes, shape: RoutingShape | None) -> list[tuple[np.ndarray, ...]]:
    """Return the same arrays of answers in columns, as the client reads them."""
    results = []
    for answer in read_answers(content):
        generation = parse_generation(answer, False)
        arrays = [generation.output_ids_T, generation.logprobs_T]
        if shape is not None:
            arrays.append(read_routed_experts(answer, shape, 1 + len(generation.output_ids_T)).reshape(-1))
        results.append(tuple(arrays))
    return results


def measure_answers(tokens: int, shape: RoutingShape | None, repeat: int) -> dict[str, float]:
    """Return the bytes and CPU microseconds per token of what the server, and then rank 0, does with the answers of one request."""
    tokenizer, texts = train_tokenizer()
    ids = np.resize(texts, tokens)
    answers, parts, seconds = make_answers(ids, tokenizer, shape), np.array_split(ids, _GROUP), defaultdict[str, list[float]](list)

    def clock(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        seconds[name].append(time.process_time() - start)
        return result

    for _ in range(repeat):
        by_json = clock("write JSON", lambda: orjson.dumps(answers))
        by_columns = clock("write columns", lambda: pack_answers(answers))
        read = [clock("read JSON", partial(read_json, by_json, shape)), clock("read columns", partial(read_columns, by_columns, shape))]
        for one, other in zip(*read, strict=True):
            assert all(np.array_equal(each, same) for each, same in zip(one, other, strict=True)), "the forms differ"
        clock("text", lambda: [decode_completion(tokenizer, part.tolist()) for part in parts])
        clock("task of lists", lambda: [dump(("", part.tolist())) for part in parts])
        clock("task of bytes", lambda: [dump(("", Sample(part.tobytes()))) for part in parts])
    result = {name: 1e6 * statistics.median(each) / tokens for name, each in seconds.items()}
    return result | {"bytes JSON": len(by_json) / tokens, "bytes columns": len(by_columns) / tokens}


def share(_: int, ranks: int, tokens: int, shape: RoutingShape | None, folder: Path, repeat: int) -> list[dict[str, float]]:
    """Share a step's samples, `tokens` per replica, in a world of replicas. Return each rank's CPU microseconds per token of one replica,
    and its bytes of samples per token. Collective."""
    start_megatron(Layout(dp=ranks), seed=0)
    config = Config.model_validate({"model": {"path": folder}, "rollout": {"group_size": _GROUP}, "log": {"samples": 4}})
    seconds = []
    for _ in range(1 + repeat):  # the first opens connections
        rollout = Rank0(partial(_make_rollout, tokens * ranks, _GROUP * ranks, shape))
        start = time.process_time()
        samples = share_samples(rollout, 1, config, shape, _ATTENTION_LENGTH)
        seconds.append(time.process_time() - start)
    columns = [column for each in samples.own for column in (each.response_ids, each.rollout_logprobs, each.routed_experts)]
    own = {"seconds": 1e6 * statistics.median(seconds[1:]) / tokens, "bytes": sum(each.nbytes for each in columns) / tokens}
    return gather_from_ranks(own, dict[str, float])


def _make_rollout(tokens: int, count: int, shape: RoutingShape | None) -> RolloutBatch:
    source, length, completions = np.random.default_rng(0), tokens // count, []
    for number in range(count):
        ids = source.integers(0, _VOCABULARY, length, dtype=np.int32)
        completion = Completion(Problem(str(number), "", ""), ids[:1], ids, -source.random(length, np.float32), "stop", 0, "")
        completion.reward = Reward(float(number % 2), True)
        if shape is not None:
            chosen = np.arange(shape.top_k, dtype=shape.dtype)
            completion.routed_experts_T = np.tile(chosen, (length, shape.num_layers, 1))
        completions.append(completion)
    return RolloutBatch(completions, {"ahead/generate": 1.0})


def main(
    tokens: Annotated[int, typer.Option(min=100, help="Tokens of a request's completions, and of each replica.")] = 100_000,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")] = "1,2,4",
    experts: Annotated[str, typer.Option(help="LAYERSxEXPERTS of the routing; 0x0 for none.")] = "0x0",
    repeat: Annotated[int, typer.Option(min=1, help="Turns, of which the median counts.")] = 3,
    file: JsonFile = None,
) -> None:
    """Measure, and print a table of each part."""
    if re.fullmatch(r"\d{1,3}x\d{1,2}", experts) is None:
        raise UserError("--experts", experts, "must be like 48x8", "correct it")
    layers, chosen = (int(number) for number in experts.split("x"))
    shape = RoutingShape(layers, tuple(range(layers)), 256, chosen) if layers else None
    report: dict[str, Any] = {"tokens": tokens, "answers": measure_answers(tokens, shape, repeat), "share": {}}
    for count in parse_numbers(replicas):
        work = partial(share, ranks=count, tokens=tokens, shape=shape, folder=Path.cwd(), repeat=repeat)
        report["share"][count] = run_on_ranks(work, count, start_method="spawn")
    write_json(file, report)
    _print(report)


def _print(report: dict[str, Any]) -> None:
    costs, forms = report["answers"], Table("per token", "SGLang's JSON, lists", "columns, bytes", "ratio")
    for name, names in {
        "bytes of an answer": ("bytes JSON", "bytes columns"),
        "engine's server writes (µs)": ("write JSON", "write columns"),
        "rank 0 reads (µs)": ("read JSON", "read columns"),
        "rank 0 writes reward tasks (µs)": ("task of lists", "task of bytes"),
    }.items():
        before, after = (costs[each] for each in names)
        forms.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{before / max(after, 1e-4):.1f}")
    forms.add_row("rank 0 decodes text (µs)", f"{costs['text']:.3f}", f"{costs['text']:.3f}", "1.0")
    ranks = Table("replicas", "share (µs per token of one replica): rank 0, largest other", "rank 0 in all: JSON, columns", "ratio")
    for count, usage in report["share"].items():
        first, others = usage[0]["seconds"], [each["seconds"] for each in usage[1:]]
        before = count * (costs["read JSON"] + costs["task of lists"] + costs["text"]) + first
        after = count * (costs["read columns"] + costs["task of bytes"] + costs["text"]) + first
        ranks.add_row(str(count), f"{first:.3f}, {max(others, default=0.0):.3f}", f"{before:.3f}, {after:.3f}", f"{before / after:.1f}")
    Console(width=140).print(forms, ranks)


if __name__ == "__main__":
    run_script(main)
