"""A number format that the source does not know, like MXFP8: E4M3 values, one power-of-two scale (its exponent, a byte) per 1x32 block.

All that a new format takes: a row with its mode, a quantizer, a product. `registered` adds them for a test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.mcore.export import save_hf
from megatron_rl.mcore.layers.quantized_linear import find_quantized_layers, quantize_model
from megatron_rl.precision.backends import PRODUCTS, make_backend
from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.backends.emulated import DequantizedWeight
from megatron_rl.precision.ops.batch_invariant import append_zeros
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import QUANTIZERS, Quantizer, dequantize, quantize
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.chunking import Chunk
from parallel.digest import digest_all, make_stored_tensors
from parallel.formats import FORMATS, MODES, Mode, TensorFormat
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import NamedRect
from parallel.transport.base import Link
from rollout_sglang.weight_receiver import WeightReceiver
from support.trainer import Trainer

GROUP = 32
TOY = TensorFormat(
    "toy8",
    "float8_e4m3fn",
    (1, GROUP),
    scale_dtype="uint8",
    scale_format="e8m0",
    scale_suffix="_exponents",
    quantization=(("quant_method", "toy8"), ("weight_block_size", (1, GROUP))),
)
MODE = "toy8_unified"


def quantize_toy(weight: torch.Tensor, format: TensorFormat, max_over_ranks: Any) -> QuantizedWeight:
    cols = weight.shape[1]
    groups = append_zeros(weight.float(), -1, -cols % GROUP).unflatten(1, (-1, GROUP))
    amax = groups.abs().amax(2).clamp_min(2.0**-100)
    if not torch.isfinite(amax).all():
        raise ValueError("weight holds inf or NaN")
    exponent = torch.frexp(amax).exponent - 1 - 8  # E4M3's largest exponent is 8
    data = (groups * torch.exp2(-exponent.float())[..., None]).clamp(-448, 448).flatten(1)[:, :cols]
    return QuantizedWeight(data.to(torch.float8_e4m3fn).contiguous(), (exponent + 127).to(torch.uint8))


def read_exponents(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """The float32 values of x quantised in groups along its last dimension."""
    return dequantize(quantize(x, TOY), TOY)


class ToyProduct:
    def __init__(self, format: TensorFormat) -> None:
        self.format = format

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> torch.Tensor:
        return DequantizedWeight(blocks, self.format, row_order).as_dtype(torch.float32)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        return Operand(x.shape[0], (x,) if rows else (), (x,) if columns else ())

    def fprop(self, x: Operand, weight: torch.Tensor) -> torch.Tensor:
        return (round_trip(x.rows[0]) @ weight.t()).to(x.rows[0].dtype)

    def dgrad(self, dy: Operand, weight: torch.Tensor) -> torch.Tensor:
        return (round_trip(dy.rows[0]) @ weight).to(dy.rows[0].dtype)

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        dw = round_trip(dy.columns[0].t()) @ round_trip(x.columns[0].t()).t()
        return dw if into is None else into.add_(dw)


@contextmanager
def registered() -> Iterator[None]:
    """Within the context, the format is one like any other: one row, one quantizer, one product."""
    additions: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [
        (FORMATS, {TOY.name: TOY}),
        (MODES, {MODE: Mode(trainer=TOY, engine=TOY)}),
        (QUANTIZERS, {TOY.name: Quantizer(quantize_toy, read_exponents)}),
        (PRODUCTS, {(TOY.name, "emulated"): f"{__name__}:ToyProduct"}),
    ]
    with ExitStack() as added:
        for table, rows in additions:
            added.enter_context(mock.patch.dict(table, rows))
        yield
    make_backend.cache_clear()


class ReceivingEngine:
    """The engine that `WeightSync` talks to: tensors of every engine rank in this process, filled by the engine's own receivers."""

    def __init__(self, plan: SyncPlan) -> None:
        self.tensors = {rank: make_stored_tensors(shards, plan.contract.format_of) for rank, shards in plan.targets.items()}
        self._receivers: dict[int, WeightReceiver] = {}

    def connect(self, link: Link, chunks: tuple[Chunk, ...], staged: bool) -> None:
        for rank, tensors in self.tensors.items():
            self._receivers[rank] = WeightReceiver(link, rank, [chunk for chunk in chunks if chunk.target == rank], tensors, staged)

    def start_receiving(self, hashing: bool) -> None:
        for rank, receiver in self._receivers.items():
            receiver.start(self.tensors[rank], hashing)

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        return {rank: receiver.finish(self.tensors[rank], hashing) for rank, receiver in self._receivers.items()}

    def digest_rects(self, rects_by_rank: dict[int, list[NamedRect]]) -> dict[int, list[str]]:
        return {rank: digest_all(self.tensors[rank], rects) for rank, rects in rects_by_rank.items()}

    def disconnect(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    def pause(self, running: str) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...


def sync_and_export(folder: Path, layout: Layout, rollout: EngineLayout, output: Path) -> dict[str, Any]:
    """In a rank: build and load a trainer in the format, run one proved sync over shared memory, export. Returns the report, what the
    engine's ranks hold, and what a layer's products give."""
    with registered():
        trainer = Trainer(folder, {"mode": MODE, "high": "fp32"}, layout=layout)
        quantize_model(trainer.model)
        plan = SyncPlan.make(ModelGeometry.from_hf_config(trainer.hf_config), layout, rollout, trainer.contract, 1 << 20)
        engine: Rank0[Any] = Rank0(lambda: ReceivingEngine(plan))
        sync = WeightSync(plan, engine, trainer.collect_named_tensors, SyncConfig(bucket_mb=2))
        try:
            report = sync.run(1)
        finally:
            sync.close()
        save_hf(output, trainer.collect_named_tensors(), trainer.hf_config, layout, trainer.contract, folder)
        layer = next(layer for name, layer in find_quantized_layers(trainer.model).items() if name.endswith("fc2"))
        x = torch.randn(8, 1, layer.weight.shape[1], generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = layer(x)[0]
        y.sum().backward()
        served: list[dict[int, dict[str, torch.Tensor]]] = []
        engine.tell(lambda held: served.append(held.tensors))
        return {"report": report, "served": served, "x": x.detach(), "y": y.detach(), "dx": x.grad, "blocks": layer.blocks}
