"""Measure the way of a step's completions from the engines' answers to the replicas: CPU time and bytes per token.

    python tools/rollout_data.py                                    # 10^5 tokens per replica
    python tools/rollout_data.py --tokens 300000 --replicas 1,3     # other sizes
    python tools/rollout_data.py --experts 48x8                     # with the routing of 48 layers and 8 experts

1. The engine's server writes the answers of a request as SGLang's JSON, in columns (`rollout_sglang.answers`), and without texts and
   columns, which it keeps (`rollout_sglang.remote_columns`). Rank 0 reads the JSON and the columns.
2. Rank 0 alone does what it does in a step of `--planned` replicas up to the sends: it reads their answers, asks for the rewards, and makes
   and serializes the samples. Once all columns pass rank 0, which decodes the texts and writes the tasks of the reward workers; once they
   stay at the engines, which score.
3. A world of one real rank per replica shares samples over gloo (`training.samples`), in both ways. The engine is a process with the real
   store and routes, from which each replica fetches its columns over HTTP.

Times are CPU time, medians of `--repeat`. Texts are of a tokenizer that is trained here on Python's own sources.
"""

import base64
import itertools
import json
import multiprocessing
import re
import secrets
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
import uvicorn
from harness import JsonFile, parse_numbers, run_on_ranks, write_json
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.sample_bytes import SampleBytes
from megatron_rl.cli.main import run_script
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.errors import UserError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.model import start_megatron
from megatron_rl.mcore.passes.replicas import PIECE_BYTES
from megatron_rl.rewards.foreign import Sample
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.thinking import decode_completion
from megatron_rl.rollout.groups import RolloutBatch, assign_scored
from megatron_rl.training.samples import prepare_samples, share_samples
from megatron_rl.types import Completion, Problem, Reward, Scored
from megatron_rl.workers.plain import dump
from parallel.layout import Layout
from rollout_sglang import remote_columns
from rollout_sglang.access import require_key
from rollout_sglang.answers import Answer, pack_answers, parse_generation, read_answers, read_generation, read_routed_experts
from rollout_sglang.remote_columns import ColumnStore, Kept
from rollout_sglang.scoring import SCORED

_GROUP = 4
_ATTENTION_LENGTH = 60_000.0
_VOCABULARY = 8192
_PROBLEM = Problem("0", "", "")
Answers = list[dict[str, Any]]


def train_tokenizer() -> tuple[PreTrainedTokenizerFast, np.ndarray]:
    """Return a byte-level tokenizer and the int32 tokens of its texts."""
    files = [str(file) for file in sorted(Path(statistics.__file__).parent.glob("*.py"))[:40]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(files, vocab_size=_VOCABULARY, show_progress=False)
    ids = [number for file in files for number in tokenizer.encode(Path(file).read_text(errors="replace", encoding="utf-8")).ids]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer), np.array(ids, np.int32)


class Request:
    """SGLang's answers to `_GROUP` prompts of one token each, with `tokens` tokens in all."""

    def __init__(self, tokens: int, shape: RoutingShape | None) -> None:
        self.tokenizer, texts = train_tokenizer()
        self.tokens, self.answers = tokens, make_answers(np.resize(texts, tokens), self.tokenizer, shape)

    def leave(self) -> bytes:
        """Return what rank 0 gets of them if texts and columns stay at the server. Handles are numbers."""
        store, numbers = ColumnStore(), itertools.count()

        def leave(_: int, answer: Answer) -> Answer:
            left = store.leave([0], answer, "remote", 0)
            assert left.remains is not None
            left.remains.handle = str(next(numbers))
            return left

        return pack_answers(self.answers, lambda _, ids: decode_completion(self.tokenizer, ids.tolist()), leave)


def make_answers(ids: np.ndarray, tokenizer: Any, shape: RoutingShape | None) -> Answers:
    """Return SGLang's answers to one prompt token each; `ids`: tokens of all completions, int32."""
    source, answers = np.random.default_rng(0), []
    for part in np.array_split(ids, _GROUP):
        logprobs = (-source.random(len(part), np.float32)).astype(float).tolist()
        meta: dict[str, Any] = {"id": "0" * 32, "finish_reason": {"type": "stop", "matched": 0}, "weight_version": "7", "cached_tokens": 0}
        meta["output_token_logprobs"] = list(zip(logprobs, part.tolist(), [None] * len(part), strict=True))
        if shape is not None:
            first = source.integers(0, shape.num_experts, (len(part), shape.num_layers, 1), dtype=np.int32)
            experts = (first + np.arange(shape.top_k, dtype=np.int32)) % shape.num_experts  # no token has an expert twice
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


def measure_answers(request: Request, shape: RoutingShape | None, repeat: int) -> dict[str, float]:
    """Return the bytes and CPU microseconds per token of the answers to a request: what the server writes, and rank 0 reads."""
    seconds = defaultdict[str, list[float]](list)

    def clock(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        seconds[name].append(time.process_time() - start)
        return result

    for _ in range(repeat):
        by_json = clock("write JSON", lambda: orjson.dumps(request.answers))
        by_columns = clock("write columns", lambda: pack_answers(request.answers))
        left = clock("keep text and columns", request.leave)
        read = [clock("read JSON", partial(read_json, by_json, shape)), clock("read columns", partial(read_columns, by_columns, shape))]
        for one, other in zip(*read, strict=True):
            assert all(np.array_equal(each, same) for each, same in zip(one, other, strict=True)), "the forms differ"
    result = {name: 1e6 * statistics.median(each) / request.tokens for name, each in seconds.items()}
    sizes = {"bytes JSON": by_json, "bytes columns": by_columns, "bytes left": left}
    return result | {name: len(content) / request.tokens for name, content in sizes.items()}


def measure_rank0(request: Request, replicas: int, shape: RoutingShape | None, repeat: int) -> dict[str, float]:
    """Return the CPU microseconds of rank 0 per token of one replica, if every replica's completions are those of `request`."""
    contents = {"through rank 0": pack_answers(request.answers), "at the engines": request.leave()}
    config, results = make_config(Path.cwd()), dict[str, float]()
    scorer = Scorer(config.reward, print)
    scored = SCORED.dump_json([Scored(Reward(float(number % 2), True), 0.0, False) for number in range(_GROUP)])
    for way, content in contents.items():
        seconds = []
        for _ in range(repeat):
            start = time.process_time()
            completions = list[Completion]()
            for _ in range(replicas):
                group = list(read_completions(content, request.tokenizer, shape))
                if all(completion.remote for completion in group):
                    dump(([completion.remote.handle for completion in group if completion.remote], _PROBLEM))
                    assign_scored(group, SCORED.validate_python(json.loads(scored)), scorer)
                else:
                    for completion in group:
                        dump((completion.text, _PROBLEM, Sample(completion.output_ids_T.tobytes())))
                completions += group
            rollout = RolloutBatch(completions, {"ahead/generate": 1.0})
            (samples,) = prepare_samples(rollout, 1, config, shape, None).mini_batches
            for share in deal(compute_costs([sample.length for sample in samples], _ATTENTION_LENGTH), replicas):
                for _ in SampleBytes([samples[index] for index in share]).iterate(PIECE_BYTES):
                    pass  # it would be sent
            seconds.append(time.process_time() - start)
        results[way] = 1e6 * statistics.median(seconds) / request.tokens
    return results


def read_completions(content: bytes, tokenizer: Any, shape: RoutingShape | None) -> Iterator[Completion]:
    """Yield the completions in a request's answers, as the client and the sampler make them."""
    for number, answer in enumerate(read_answers(content)):
        got = read_generation(answer, 1, shape, False, False, "http://127.0.0.1:1", "key")
        text = decode_completion(tokenizer, got.output_ids_T.tolist()) if got.text is None else got.text
        arrays = np.zeros(1, np.int32), got.output_ids_T, got.logprobs_T
        completion = Completion(_PROBLEM, *arrays, got.finish_reason, 0, text, routed_experts_T=got.routed_experts_T, remote=got.remote)
        completion.reward = Reward(float(number % 2), True)
        yield completion


def share(
    _: int, ranks: int, content: bytes, address: tuple[str, str], tokenizer: Any, shape: RoutingShape | None, repeat: int
) -> list[dict[str, float]]:
    """Share a step's samples, those of a request per replica, in a world of replicas. `address`: of the engine that keeps columns, with its
    key. Return each rank's CPU microseconds per token of one replica, and its bytes of samples per token. Collective."""
    start_megatron(Layout(dp=ranks), seed=0)
    config, seconds = make_config(Path.cwd()), []
    completions = [completion for _ in range(ranks) for completion in read_completions(content, tokenizer, shape)]
    for completion in completions:
        if completion.remote is not None:
            completion.remote = replace(completion.remote, url=address[0], key=address[1])
    for _ in range(1 + repeat):  # the first opens connections
        rollout = Rank0(lambda: RolloutBatch([*completions], {"ahead/generate": 1.0}))
        start = time.process_time()
        samples = share_samples(rollout, 1, config, shape, _ATTENTION_LENGTH)
        seconds.append(time.process_time() - start)
    columns = [column for each in samples.own for column in (each.response_ids, each.rollout_logprobs, each.routed_experts)]
    tokens = sum(each.sampled_count for each in samples.own)
    own = {"seconds": 1e6 * statistics.median(seconds[1:]) / tokens, "bytes": sum(each.nbytes for each in columns) / tokens}
    return gather_from_ranks(own, dict[str, float])


def make_config(model: Path) -> Config:
    return Config.model_validate({"model": {"path": model}, "rollout": {"group_size": _GROUP}, "log": {"samples": 4}})


def serve(port: int, key: str, answers: Answers) -> None:
    """Answer for an engine whose columns have been left: keep them under the handles that `Request.leave` has made."""
    app = Starlette()
    remote_columns.add_routes(app)
    require_key(app, key)
    kept = read_answers(pack_answers(answers))
    for number, answer in enumerate(kept):
        answer.prompt = bytearray(4)
        remote_columns.store._by_version.setdefault(int(answer.version), {})[str(number)] = Kept(answer, "")
    uvicorn.run(app, port=port, log_level="error")


def main(
    tokens: Annotated[int, typer.Option(min=100, help="Tokens of a request's completions, and of each replica.")] = 100_000,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas with a real rank each, separated by commas.")] = "1,2",
    planned: Annotated[str, typer.Option(help="Numbers of replicas for which rank 0 works alone.")] = "1,8,64,512",
    experts: Annotated[str, typer.Option(help="LAYERSxEXPERTS of the routing; 0x0 for none.")] = "0x0",
    repeat: Annotated[int, typer.Option(min=1, help="Turns, of which the median counts.")] = 3,
    file: JsonFile = None,
) -> None:
    """Measure, and print a table of each part."""
    if re.fullmatch(r"\d{1,3}x\d{1,2}", experts) is None:
        raise UserError("--experts", experts, "must be like 48x8", "correct it")
    layers, chosen = (int(number) for number in experts.split("x"))
    shape = RoutingShape(layers, tuple(range(layers)), 256, chosen) if layers else None
    request = Request(tokens, shape)
    report: dict[str, Any] = {"tokens": tokens, "answers": measure_answers(request, shape, repeat), "rank 0": {}, "share": {}}
    for count in parse_numbers(planned):
        report["rank 0"][count] = measure_rank0(request, count, shape, repeat)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port, key = free.getsockname()[1], secrets.token_hex(24)
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(port, key, request.answers), daemon=True)
    engine.start()
    contents = {"through rank 0": pack_answers(request.answers), "at the engines": request.leave()}
    for count in parse_numbers(replicas):
        common: dict[str, Any] = {"ranks": count, "address": (f"http://127.0.0.1:{port}", key), "tokenizer": request.tokenizer}
        report["share"][count] = {
            way: run_on_ranks(partial(share, content=content, shape=shape, repeat=repeat, **common), count, start_method="spawn")
            for way, content in contents.items()
        }
    engine.terminate()
    write_json(file, report)
    _print(report)


def _print(report: dict[str, Any]) -> None:
    costs, forms = report["answers"], Table("per token", "SGLang's JSON", "columns", "text and columns kept")
    for name, names in {
        "bytes of an answer": ("bytes JSON", "bytes columns", "bytes left"),
        "engine's server writes (µs)": ("write JSON", "write columns", "keep text and columns"),
        "rank 0 reads (µs)": ("read JSON", "read columns"),
    }.items():
        forms.add_row(name, *(f"{costs[each]:.3f}" for each in names))
    alone = Table("replicas", "rank 0 works (µs per token of one replica): columns through rank 0", "at the engines", "µs per completion")
    for count, ways in report["rank 0"].items():
        before, after = ways["through rank 0"], ways["at the engines"]
        alone.add_row(str(count), f"{before:.3f}", f"{after:.4f}", f"{after * report['tokens'] / (count * _GROUP):.1f}")
    ranks = Table("replicas", "share (µs per token of one replica): columns", "rank 0", "largest other")
    for count, by_way in report["share"].items():
        for way, usage in by_way.items():
            first, others = usage[0]["seconds"], [each["seconds"] for each in usage[1:]]
            ranks.add_row(str(count), way, f"{first:.3f}", f"{max(others):.3f}" if others else "none")
    Console(width=140).print(forms, alone, ranks)


if __name__ == "__main__":
    run_script(main)
