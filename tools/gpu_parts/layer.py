"""Part `layer`: one transformer layer, forward and backward, with every back end: log-probs and gradients against `emulated`.

Sums in another order make single activations round to the neighbouring E4M3 value, 2^-4 of themselves away, so results differ a little. A
gradient is refused where its relative L2 distance is beyond 0.1, more than FP8 itself costs; a wrong scale or layout gives 1 and more.
"""

from __future__ import annotations

import torch

from gpu_parts.backends import FORMATS, usable
from gpu_parts.differences import compare
from gpu_parts.found import find
from gpu_parts.one_layer import SIZES, actor, batch_of, loss
from gpu_parts.rows import Rows, run_part
from megatron_rl.config import ArchitectureConfig, PrecisionConfig
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

_FURTHEST = 0.1


def part(rows: Rows) -> None:
    start_megatron(Layout(), seed=0)
    try:
        check(rows, usable(find(), rows), SIZES["small"], tokens=2048)
    finally:
        stop_megatron()


def check(rows: Rows, backends: list[str], architecture: ArchitectureConfig, tokens: int) -> None:
    """`emulated` first, then each back end, in both scale formats."""
    for scale_format in FORMATS:
        with rows.guarded(f"emulated, {scale_format}"):
            wanted = computed("emulated", scale_format, architecture, tokens)
            finite = all(bool(value.isfinite().all()) for value in wanted.values())
            rows.add(
                f"emulated, {scale_format}", f"log-probs and {len(wanted) - 1} gradients, {'all' if finite else 'NOT all'} finite", finite
            )
            for name in backends:
                with rows.guarded(f"{name}, {scale_format}"):
                    told(rows, f"{name}, {scale_format}", computed(name, scale_format, architecture, tokens), wanted)


def told(rows: Rows, what: str, got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """A row for the log-probs and one for the gradient that is furthest away."""
    logprobs = compare(got["log-probs"], wanted["log-probs"])
    rows.add(f"{what}: log-probs", str(logprobs), logprobs.relative <= _FURTHEST, largest=logprobs.largest, relative_l2=logprobs.relative)
    distances = {name: compare(got[name], wanted[name]) for name in wanted if name != "log-probs"}
    name, worst = max(distances.items(), key=lambda item: item[1].relative)
    rows.add(
        f"{what}: the furthest of {len(distances)} gradients, {name}", str(worst), worst.relative <= _FURTHEST, relative_l2=worst.relative
    )


def computed(backend: str, scale_format: str, architecture: ArchitectureConfig, tokens: int) -> dict[str, torch.Tensor]:
    """float32 `log-probs` [answer tokens], and the gradient of their sum by parameter."""
    trained = actor(architecture, PrecisionConfig.model_validate({"backend": backend, "scale_format": scale_format}))
    batch = batch_of(tokens, length=min(tokens, 256))
    found = {"log-probs": torch.cat(trained.compute_logprobs(batch)[0])}
    trained.update(batch, loss)
    return found | {name: parameter.main_grad.float().clone() for name, parameter in trained.chunks[0].named_parameters()}


if __name__ == "__main__":
    run_part(part)
