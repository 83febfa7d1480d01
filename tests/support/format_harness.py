"""What a test of a number format needs: a trainer, an engine's receivers and an export, without SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.mcore.checkpoint.write import CheckpointWriter
from megatron_rl.mcore.export import convert
from megatron_rl.mcore.layers.quantized_linear import find_quantized_layers
from megatron_rl.rollout.engine import Places, ServedReport
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.chunking import Chunk
from parallel.digest import digest_all, make_stored_tensors
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import NamedRect
from parallel.transport.base import Link
from rollout_sglang.weight_receiver import WeightReceiver
from support import toy_format
from support.trainer import Trainer


class ReceivingEngine:
    """The engine that `WeightSync` talks to: tensors of every engine rank in this process, filled by the engine's own receivers."""

    def __init__(self, plan: SyncPlan) -> None:
        self.tensors = {rank: make_stored_tensors(shards, plan.contract.format_of) for rank, shards in plan.targets.items()}
        self._receivers: dict[int, WeightReceiver] = {}

    def connect(self, link: Link, chunks: tuple[Chunk, ...], staged: bool) -> None:
        for rank, tensors in self.tensors.items():
            self._receivers[rank] = WeightReceiver(link, rank, [chunk for chunk in chunks if chunk.target == rank], tensors, staged)

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        for rank, receiver in self._receivers.items():
            receiver.start(self.tensors[rank], hashing, places and places[rank])

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        return {rank: receiver.finish(self.tensors[rank], hashing) for rank, receiver in self._receivers.items()}

    def reread(self) -> dict[int, list[str]]:
        return {rank: receiver.reread(self.tensors[rank]) for rank, receiver in self._receivers.items()}

    def digest_rects(self, rects_by_rank: dict[int, list[NamedRect]]) -> dict[int, list[str]]:
        return {rank: digest_all(self.tensors[rank], rects) for rank, rects in rects_by_rank.items()}

    def account_for_tensors(self) -> list[ServedReport]:
        return [ServedReport()] * len(self._receivers)

    def disconnect(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    def pause(self, running: str) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...


def sync_and_export(folder: Path, layout: Layout, rollout: EngineLayout, output: Path, mode: str) -> dict[str, Any]:
    """In a rank: build and load a trainer in the mode, run one proved sync over shared memory, export. Returns the report, what the
    engine's ranks hold, and the operands and results of a layer's three products."""
    with toy_format.registered():
        trainer = Trainer(folder, {"mode": mode, "high": "fp32"}, layout=layout)
        plan = SyncPlan.make(ModelGeometry.from_hf_config(trainer.hf_config), layout, rollout, trainer.contract, 1 << 20)
        engine: Rank0[Any] = Rank0(lambda: ReceivingEngine(plan))
        sync = WeightSync(plan, engine, trainer.collect_named_tensors, SyncConfig(bucket_mb=2))
        try:
            report = sync.run(1)
        finally:
            sync.close()
        state = {"step": 1, "precision": trainer.precision.model_dump(mode="json")}
        CheckpointWriter(folder.parent / "step_00001", trainer.model, trainer.hf_config, folder, state).finish()
        convert(folder.parent / "step_00001", output, {})
        layer = next(layer for name, layer in find_quantized_layers(trainer.model).items() if name.endswith("fc2"))
        random = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(8, 1, layer.weight.shape[1], generator=random, requires_grad=True)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        y = layer(x)[0]
        dy = torch.randn(y.shape, generator=random)
        y.backward(dy)
        served: list[dict[int, dict[str, torch.Tensor]]] = []
        engine.tell(lambda held: served.append(held.tensors))
        operands = {"x": x.detach().flatten(0, 1), "dy": dy.flatten(0, 1), "blocks": layer.blocks}
        products = {"y": y.detach().flatten(0, 1), "dx": x.grad.flatten(0, 1), "dw": layer.weight.main_grad}
        return {"report": report, "served": served, **operands, **products}
