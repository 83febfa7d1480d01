"""Part `speed_linears`: what tools/bench_backends.py measures, case by case: products against BF16, quantisers against a copy."""

from __future__ import annotations

import os
import statistics
import time

import torch
from bench_backends import REFERENCE, SHAPES, cases, measure

from gpu_parts.backends import usable
from gpu_parts.found import find
from gpu_parts.parts import SECONDS
from gpu_parts.rows import Rows, run_part

TOKENS, REPEAT = 8192, 10
_SECONDS_TO_START = 10.0  # of Python and torch, before the clock here begins


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
