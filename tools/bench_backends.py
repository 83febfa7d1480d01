"""Times each backend's products on a GPU against torch's BF16 matmul, and its quantiser against a copy; prints ratios, writes JSON.

    python tools/bench_backends.py [--tokens 8192] [--json FILE]

Shapes are the linear layers of an 8B and a 32B model without tensor parallelism. All cases of a shape take turns; medians are shown.
Back ends that this machine cannot run are left out by name. Exits with 2 without a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from megatron_rl.precision.backends import make_backend, requirements
from megatron_rl.precision.fp8 import quantize_weight

SHAPES = {  # name: (N, K)
    "8B qkv": (6144, 4096),
    "8B fc1": (28672, 4096),
    "8B fc2": (4096, 14336),
    "32B qkv": (10240, 5120),
    "32B fc1": (51200, 5120),
    "32B fc2": (5120, 25600),
}


def main(
    tokens: int = 8192,
    repeat: int = 20,
    scale_format: str = "pow2",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measures and prints."""
    if not torch.cuda.is_available():
        typer.echo("bench_backends: torch sees no GPU; this benchmark needs one", err=True)
        raise typer.Exit(2)
    backends = [name for name in ("deep_gemm", "transformer_engine") if not requirements.find_missing(name)]
    for name in requirements.BACKENDS:
        for what, fix in requirements.find_missing(name):
            typer.echo(f"without {name}: {what}; {fix}")
    found = {"gpu": torch.cuda.get_device_name(), "tokens": tokens, "scale_format": scale_format, "shapes": {}}
    for shape, (n, k) in SHAPES.items():
        seconds = {case: statistics.median(times) for case, times in measure(cases(backends, scale_format, tokens, n, k), repeat).items()}
        found["shapes"][shape] = {"N": n, "K": k, "seconds": seconds}
        typer.echo(f"{shape} [{n}, {k}]")
        for case, time in seconds.items():
            product = case.rpartition(" ")[2]
            typer.echo(f"  {case:32} {time * 1e3:8.3f} ms   {seconds['bf16 ' + product] / time:5.2f}x of {REFERENCE[product]}")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


REFERENCE = {"fprop": "BF16", "dgrad": "BF16", "wgrad": "BF16 into FP32", "quantize": "a copy's speed"}


def cases(backends: list[str], scale_format: str, tokens: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """Name -> what to time. `bf16 quantize` is a copy of x that moves the bytes of both quantised forms: 2 read and 2 written."""
    x, dy = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
    master = torch.randn(n, k, device="cuda") * 0.02
    plain, gradient, blocks = master.bfloat16(), torch.zeros_like(master), quantize_weight(master, scale_format)
    found: dict[str, Callable[[], object]] = {
        "bf16 fprop": lambda: x @ plain.t(),
        "bf16 dgrad": lambda: dy @ plain,
        "bf16 wgrad": lambda: gradient.add_(dy.t() @ x),
        "bf16 quantize": lambda: x.clone(),
    }
    for name in backends:
        backend = make_backend(name, scale_format)
        weight = backend.prepare(blocks, None)
        forward, slope = (backend.quantize(v, rows=True, columns=True) for v in (x, dy))
        found |= {
            f"{name} fprop": lambda b=backend, f=forward, w=weight: b.fprop(f, w),
            f"{name} dgrad": lambda b=backend, s=slope, w=weight: b.dgrad(s, w),
            f"{name} wgrad": lambda b=backend, s=slope, f=forward: b.wgrad(s, f, gradient),
            f"{name} quantize": lambda b=backend: b.quantize(x, rows=True, columns=True),
        }
    return found


def measure(cases: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Seconds of every case, `repeat` times each in turns after three to warm up (kernels are compiled at first use)."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeat + 3):
        for name, case in cases.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            case()
            end.record()
            end.synchronize()
            if turn >= 3:
                found[name].append(start.elapsed_time(end) / 1e3)
    return found


if __name__ == "__main__":
    typer.run(main)
