"""Part `speed_decode`: tokens per second that engines decode in BF16, FP8 and INT8, at several batch sizes: all layers of an 8B model.

Asked as a run asks, by HTTP and with log-probs; a short prompt's prefill is in it. The engines are up side by side and take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.rows import Rows, run_part
from gpu_parts.side_by_side import Engines, started, those_up
from gpu_parts.sizes import LAYERS_OF_8B, VOCABULARY_OF_8B, stack
from gpu_parts.targets import add
from megatron_rl.config import PrecisionConfig
from megatron_rl.types import SamplingParams
from rollout_sglang.engine import SGLangEngine

PRECISIONS = {
    "bf16": PrecisionConfig(mode="bf16"),
    "fp8": PrecisionConfig(mode="fp8_unified"),
    "int8": PrecisionConfig(mode="int8_rollout"),
}
BATCHES = (1, 16, 64, 256)
_PROMPT = 32
_ROLLOUT = {"max_running_requests": 256, "max_total_tokens": 40960, "start_timeout": 90.0, "request_timeout": 90.0}


def part(rows: Rows) -> None:
    architecture = stack("8B", LAYERS_OF_8B, vocab_size=VOCABULARY_OF_8B)
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), architecture, PRECISIONS, _ROLLOUT, BATCHES) as engines:
        measure(rows, "8B", those_up(rows, engines), BATCHES, tokens=96, repeat=2)


def measure(rows: Rows, model: str, engines: Engines, batches: Sequence[int], tokens: int, repeat: int) -> None:
    """Medians of `repeat` turns after one to warm up, for each batch size."""
    for batch in batches:
        rates: dict[str, list[float]] = {}
        for turn in range(repeat + 1):
            for name, engine in engines.items():
                with rows.guarded(f"{model} decoding {batch} at once, {name}"):
                    rate = decoded(engine, batch, tokens)
                    if turn:
                        rates.setdefault(name, []).append(rate)
        tell(rows, f"{model} decoding {batch} at once", batch, {name: statistics.median(found) for name, found in rates.items()})


def decoded(engine: SGLangEngine, batch: int, tokens: int) -> float:
    """Tokens per second of one call: sequences end early only where they draw the end token."""
    prompts = [[(7 * index + place) % 250 for place in range(_PROMPT)] for index in range(batch)]
    start = time.perf_counter()
    answers = engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))
    return sum(len(answer.output_ids_T) for answer in answers) / (time.perf_counter() - start)


def tell(rows: Rows, what: str, batch: int, rates: dict[str, float]) -> None:
    """One row per engine; the ratio to BF16 where that engine is up."""
    for name, rate in rates.items():
        told, numbers = f"{rate:,.0f} tokens/s, {rate / batch:,.0f} for each sequence", {"tokens_per_second": rate, "batch": batch}
        if name == "bf16" or "bf16" not in rates:
            rows.add(f"{what}, {name}", told, None, **numbers)
            continue
        ratio = rate / rates["bf16"]
        told = f"{told}, {ratio:.2f}x of BF16"
        if name == "fp8":
            add(rows, "rollout", f"{what}, {name}", told, ratio, **numbers, of_bf16=ratio)
        else:
            rows.add(f"{what}, {name}", told, None, **numbers, of_bf16=ratio)


if __name__ == "__main__":
    run_part(part)
