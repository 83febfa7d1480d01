"""Part `speed_linears`: what tools/bench_backends.py measures, case by case: products against BF16, quantisers against a copy;
and whether compiling the weights' quantiser would pay."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_backends import REFERENCE, SHAPES, cases, measure

from gpu_parts.backends import usable
from gpu_parts.found import find
from gpu_parts.parts import SECONDS
from gpu_parts.rows import Rows, run_part
from megatron_rl.precision.fp8 import quantize_weight

TOKENS, REPEAT = 8192, 10
_SECONDS_TO_START = 10.0  # of Python and torch, before the clock here begins
_SECONDS_TO_COMPILE = 20.0  # of torch.compile, at a guess


def part(rows: Rows) -> None:
    """DeepGEMM compiles three kernels for each shape: shapes that do not fit into the time limit are left out by name."""
    backends = usable(find(), rows)
    start, limit = time.monotonic(), float(os.environ.get(SECONDS, "600"))
    for done, (shape, (n, k)) in enumerate(SHAPES.items()):
        spent = time.monotonic() - start
        if spent + spent / max(done, 1) > limit - _SECONDS_TO_START:
            rows.add(f"{shape} [{n}, {k}]", "left out: no time left")
            continue
        with rows.guarded(shape):
            times = measure(cases(backends, "pow2", TOKENS, n, k), REPEAT)
            tell(rows, shape, n, k, {case: statistics.median(seconds) for case, seconds in times.items()})
        torch.cuda.empty_cache()
    if time.monotonic() - start + _SECONDS_TO_COMPILE > limit - _SECONDS_TO_START:
        rows.add("quantising a weight", "left out: no time left")
        return
    with rows.guarded("quantising a weight"):
        weights(rows, *SHAPES["8B fc1"])


def weights(rows: Rows, n: int, k: int) -> None:
    """The weights' quantiser as it runs and compiled, against a copy that reads and writes as many bytes in all."""
    master = torch.randn(n, k, device="cuda") * 0.02
    compiled = torch.compile(quantize_weight)
    moved = torch.empty(n * k * 5 // 2, dtype=torch.uint8, device="cuda")  # four bytes of a value are read, one is written
    cases: dict[str, Callable[[], Any]] = {
        "as it runs": lambda: quantize_weight(master, "pow2"),
        "by torch.compile": lambda: compiled(master, "pow2"),
        "a copy": lambda: moved.clone(),
    }
    same = all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(cases["as it runs"](), cases["by torch.compile"](), strict=True))
    seconds = {case: statistics.median(times) for case, times in measure(cases, REPEAT).items()}
    for case, took in seconds.items():
        told = f"{took * 1e3:.3f} ms, {seconds['a copy'] / took:.2f}x of a copy's speed"
        rows.add(f"quantising a weight [{n}, {k}], {case}", told, None, seconds=took, ratio=seconds["a copy"] / took)
    rows.add("quantising a weight, by torch.compile", f"{'the same' if same else 'OTHER'} bytes and scales", None, same=same)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def tell(rows: Rows, shape: str, n: int, k: int, seconds: dict[str, float]) -> None:
    """One row per case: milliseconds, TFLOP/s or GB/s, and the ratio to BF16 or to a copy."""
    for case, took in seconds.items():
        what = case.rpartition(" ")[2]
        ratio = seconds[f"bf16 {what}"] / took
        moved, computed = 4 * TOKENS * k, 2 * TOKENS * n * k  # a copy reads and writes two bytes; a quantiser reads two, writes one twice
        rate = f"{moved / took / 1e9:,.0f} GB/s" if what == "quantize" else f"{computed / took / 1e12:,.0f} TFLOP/s"
        rows.add(
            f"{shape} [{n}, {k}], {case}",
            f"{took * 1e3:.3f} ms, {rate}, {ratio:.2f}x of {REFERENCE[what]}",
            None,
            seconds=took,
            ratio=ratio,
        )


if __name__ == "__main__":
    run_part(part)
