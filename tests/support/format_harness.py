"""A trainer, an engine's receivers (`support.receiving_engine`) and an export, for a test of a number format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.weights.export import convert
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from support import toy_format
from support.receiving_engine import ReceivingEngine
from support.trainer import Trainer


def sync_and_export(folder: Path, layout: Layout, rollout: EngineLayout, output: Path, mode: str) -> dict[str, Any]:
    """Load a trainer in the mode, run one proved sync over shared memory, and export. Return the report, what the engine's ranks hold,
    and the operands and results of a layer's three products."""
    with toy_format.registered():
        trainer = Trainer(folder, {"mode": mode, "high": "fp32"}, layout=layout)
        plan = SyncPlan.make(ModelGeometry.from_hf_config(trainer.hf_config), layout, rollout, trainer.contract, 1 << 20)
        engine: Rank0[Any] = Rank0(lambda: ReceivingEngine(plan))
        sync = WeightSync(plan, engine, trainer.collect_named_tensors, SyncConfig(bucket_mb=2))
        try:
            report = sync.run(1)
        finally:
            sync.close()
        convert(trainer.save(folder.parent / "step_00001"), output, {})
        layer = next(layer for name, layer in find_quantized_layers(trainer.model).items() if name.endswith("fc2"))
        random = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(8, 1, layer.weight.shape[1], generator=random, requires_grad=True)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        y = layer(x)[0]
        dy = torch.randn(y.shape, generator=random)
        y.backward(dy)
        served: list[dict[int, dict[str, torch.Tensor]]] = []
        engine.run_local(lambda held: served.append(held.tensors))
        operands = {"x": x.detach().flatten(0, 1), "dy": dy.flatten(0, 1), "blocks": layer.blocks}
        products = {"y": y.detach().flatten(0, 1), "dx": x.grad.flatten(0, 1), "dw": layer.weight.main_grad}
        return {"report": report, "served": served, **operands, **products}
