"""Part `quickstart`: the quickstart in `fp8_unified` on the GPU, shortened, with the first back end that a run accepts here."""

from __future__ import annotations

from gpu_parts.rows import Rows, run_part
from gpu_parts.training import train
from megatron_rl.precision.backends import requirements

SETTINGS = {
    "precision.mode": "fp8_unified",
    "precision.high": "bf16",
    "sync.transport": "cuda_ipc",
    "model.warm_start.steps": 150,
    "train.steps": 5,
    "rollout.start_timeout": 60.0,
}
_PREFERRED = ("deep_gemm", "transformer_engine", "emulated")


def part(rows: Rows) -> None:
    backend = next(name for name in _PREFERRED if not requirements.find_missing(name))
    for name in _PREFERRED[: _PREFERRED.index(backend)]:
        rows.add(f"back end {name}", f"not used: {', '.join(what for what, _ in requirements.find_missing(name))}")
    train(rows, f"fp8_unified, {backend}", SETTINGS | {"precision.backend": backend})


if __name__ == "__main__":
    run_part(part)
