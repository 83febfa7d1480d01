"""Time an engine's decoding on this machine: tokens per second by the number of sequences decoded at once; print a table, write JSON.

    python tools/bench/decoding.py configs/gsm8k.toml --model.path=MODEL --rollout.engines=2
    python tools/bench/decoding.py configs/gsm8k.toml --sequences 64 --prompt 256
    python tools/bench/decoding.py configs/gsm8k.toml --sequences 64 --prompt 256 --group 8

Of the run's configuration `model`, `precision` and `rollout` count. Weights are made up by SGLang: of the model's folder only
config.json and tokenizer are read. Every sequence has a random prompt of `--prompt` tokens, as many as `--group` the same one, and decodes
`--tokens` more, whatever it samples; caches are emptied before every batch. The time of a decode step is that of such a batch less that of
its prompts alone, by HTTP and with log-probs; medians of `--repeat` batches. CPU seconds are those of all engine processes: on a busy
machine they say more than the clock.
"""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import torch
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config, load_config
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import pin_model
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec


def request(engine: SGLangEngine, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {engine.server.api_key}"}
    response = httpx.post(engine.server.url + path, json=body, headers=headers, timeout=600).raise_for_status()
    return response.json() if path == "/generate" else None


def empty_caches(engines: list[SGLangEngine]) -> None:
    time.sleep(0.5)  # SGLang removes a request a moment after its answer
    for engine in engines:
        request(engine, "/flush_cache", {})


def time_batch(engines: list[SGLangEngine], prompts: list[list[int]], tokens: int) -> tuple[float, int]:
    """Return the seconds of one batch of exactly `tokens` new tokens each, in groups split evenly over the engines, and the prompts' tokens
    that came from the cache."""
    empty_caches(engines)
    share = -(-len(prompts) // len(engines))
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    bodies = [
        {"input_ids": prompts[number * share : (number + 1) * share], "sampling_params": sampling, "return_logprob": True}
        for number in range(len(engines))
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(engines)) as threads:
        answers = list(threads.map(lambda pair: request(pair[0], "/generate", pair[1]), zip(engines, bodies, strict=True)))
    return time.perf_counter() - start, sum(answer["meta_info"]["cached_tokens"] for part in answers for answer in part)


def count_cpu_seconds(engines: list[SGLangEngine]) -> float:
    """Return the processor seconds that the engines' processes have used."""
    servers = [psutil.Process(pid) for engine in engines for pid in engine.server.processes.pids]
    processes = [process for server in servers for process in (server, *server.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(engines: list[SGLangEngine], prompts: list[list[int]], tokens: int, repeat: int) -> dict[str, float]:
    prefills, steps, cached = [], [], 0
    for _ in range(repeat):
        used = [count_cpu_seconds(engines)]
        seconds = []
        for count in (1, tokens):
            spent, cached = time_batch(engines, prompts, count)
            seconds.append(spent)
            used.append(count_cpu_seconds(engines))
        prefill_cpu, batch_cpu = used[1] - used[0], used[2] - used[1]
        prefills.append((seconds[0], prefill_cpu))
        steps.append(((seconds[1] - seconds[0]) / (tokens - 1), (batch_cpu - prefill_cpu) / (tokens - 1)))
    (prefill, prefill_cpu), (step, step_cpu) = (map(statistics.median, zip(*pairs, strict=True)) for pairs in (prefills, steps))
    count, prompt_tokens = len(prompts), sum(map(len, prompts))
    return {
        "sequences": count,
        "cached share": cached / prompt_tokens,
        "prefill tokens/s": prompt_tokens / prefill,
        "decoded tokens/s": count / step,
        "prefill tokens/CPU s": prompt_tokens / prefill_cpu,
        "decoded tokens/CPU s": count / step_cpu,
    }


def main(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A run's TOML file; --section.key=value may follow.")],
    sequences: Annotated[list[int], typer.Option(help="Sequences decoded at once.")] = [16, 32, 64],  # noqa: B006 - typer reads it
    prompt: Annotated[int, typer.Option(min=1)] = 64,
    group: Annotated[int, typer.Option(min=1, help="Sequences with the same prompt.")] = 1,
    tokens: Annotated[int, typer.Option(min=2)] = 33,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Start the engines, measure, stop them."""
    with TemporaryDirectory(prefix="megatron-rl-decoding-") as name, ExitStack() as stack:
        folder = Path(name)
        config: Config = pin_model(load_config(file, context.args))
        contract = PrecisionContract.from_config(config.precision)
        write_all_but_weights(folder, describe_weights(read_config(config.model.folder), contract), config.model.folder)
        engines = []
        for number in range(config.rollout.engines):
            engines.append(SGLangEngine(EngineLaunchSpec(config, folder, folder, number, arguments=("--load-format", "dummy"))))
            stack.callback(engines[-1].stop)
        start = time.perf_counter()
        for engine in engines:
            engine.wait_until_ready()
        print(f"ready after {time.perf_counter() - start:.1f} s")
        vocabulary, generator = read_config(config.model.folder)["vocab_size"], torch.Generator().manual_seed(0)
        rows = []
        for count in sequences:
            distinct = torch.randint(vocabulary, (-(-count // group), prompt), generator=generator).tolist()
            prompts = [ids for ids in distinct for _ in range(group)][:count]
            time_batch(engines, prompts, 2)
            rows.append(measure(engines, prompts, tokens, repeat))
            print("  ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
