"""A layer under sequence parallelism whose results are summed in parts. Stand-ins play DeepGEMM and Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.mcore.layers import overlap, quantized_linear
from support import fake_gpu_libraries
from support.fp8_reference import uneven
from support.megatron_models import build
from support.trainer import start

WIDTH, TOKENS = 512, 256


def run_layer(kind: str, backend: str, by_tree: bool, parts: int, scale_format: str = "pow2") -> dict[str, Any]:
    """A layer's results, and the widths of what was summed under way, in order: "start" before "wait"."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    x, dy = (uneven(TOKENS, WIDTH, torch.bfloat16) for _ in "xd")
    events: list[tuple[str, int]] = []

    def observe(plain: Any) -> Any:
        def exchange(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
            work, width = plain(output, input, *args, **options), input.shape[-1]
            events.append(("start", width))
            plain_wait = work.wait

            class Observed:
                def wait(self) -> None:
                    events.append(("wait", width))
                    plain_wait()

            return Observed()

        return exchange

    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(quantized_linear, "count_parts", lambda *_: parts)
        layer = build(kind, scale_format, True, weight)
        layer.config.linear_backend, layer.config.sums_by_tree = backend, by_tree
        for name in ("reduce_scatter_tensor", "all_to_all_single"):
            patch.setattr(overlap.dist, name, observe(getattr(dist, name)))
        column = kind == "column"
        own = (x.chunk(tp)[rank] if column else x.chunk(tp, 1)[rank]).unsqueeze(1).clone().requires_grad_()
        y, _ = layer(own)
        y.backward((dy[:, : y.shape[-1]] if column else dy.chunk(tp)[rank]).unsqueeze(1).contiguous())
    return {"y": y.detach(), "dx": own.grad, "dw": layer.weight.main_grad, "events": events}


def with_and_without(kind: str, backend: str, by_tree: bool, parts: int) -> list[dict[str, Any]]:
    return [run_layer(kind, backend, by_tree, count) for count in (parts, 1)]
