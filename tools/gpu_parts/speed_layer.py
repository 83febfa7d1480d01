"""Part `speed_layer`: a transformer layer of 8B and of 32B widths, FP8 against BF16: forward, and forward + backward + optimizer step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from gpu_parts.backends import usable
from gpu_parts.found import find
from gpu_parts.one_layer import SIZES, actor, batch_of, loss
from gpu_parts.rows import Rows, run_part
from gpu_parts.targets import add
from megatron_rl.config import ArchitectureConfig, PrecisionConfig
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout


def part(rows: Rows) -> None:
    start_megatron(Layout(), seed=0)
    try:
        for size in ("8B", "32B"):
            with rows.guarded(f"{size} layer"):
                measure(rows, f"{size} layer", SIZES[size], usable(find(), rows), tokens=8192, repeat=5)
    finally:
        stop_megatron()


def measure(
    rows: Rows,
    name: str,
    architecture: ArchitectureConfig,
    backends: list[str],
    tokens: int,
    repeat: int,
    targets: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Medians of `repeat` turns after one to warm up; all cases take turns. `targets`: names of `gpu_parts.targets` to hold `forward` and
    `step` against."""
    precisions = {"bf16": PrecisionConfig(mode="bf16")} | {
        backend: PrecisionConfig.model_validate({"backend": backend}) for backend in backends
    }
    actors = {case: actor(architecture, precision) for case, precision in precisions.items()}
    batch = batch_of(tokens, length=min(tokens, 512))
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeat + 1):
        for case, trained in actors.items():
            for what, call in {
                "forward": lambda a=trained: a.compute_logprobs(batch),
                "step": lambda a=trained: a.update(batch, loss),
            }.items():
                took = timed(call)
                if turn:
                    seconds.setdefault((what, case), []).append(took)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for (what, case), median in medians.items():
        ratio = medians[what, "bf16"] / median
        told = f"{median * 1e3:.2f} ms, {tokens / median:,.0f} tokens/s, {ratio:.2f}x of BF16"
        numbers = {"seconds": median, "tokens": tokens, "of_bf16": ratio}
        if what in targets and case != "bf16":
            add(rows, targets[what], f"{name} {what}, {case}", told, ratio, **numbers)
        else:
            rows.add(f"{name} {what}, {case}", told, None, **numbers)


def timed(call: Callable[[], object]) -> float:
    """Seconds until the device is done."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_part(part)
