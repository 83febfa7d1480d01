"""Delta syncs over real transports and the engine's receivers: what is sent, what is proved, and wrong bases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.geometries import small_model
from support.receiving_engine import ReceivingEngine

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.adapters import AdapterGeometry, is_adapter
from parallel.digest import make_stored_tensors, view_bytes
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.transport.pack import ChunkPacker

CONTRACT = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified"))
MODEL = small_model(layers=1)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bridge:
    """A trainer rank and two engines."""

    def __init__(self, settings: SyncConfig, model: ModelGeometry = MODEL) -> None:
        shards = build_trainer_shards(model, Layout(), format_of=CONTRACT.format_of)[0]
        self.tensors = make_stored_tensors(shards, CONTRACT.format_of)
        plan = SyncPlan.make(model, Layout(), EngineLayout(engines=2), CONTRACT, 100_000)
        self.engine, self.said = ReceivingEngine(plan), list[str]()
        self.sync = WeightSync(plan, Rank0(lambda: self.engine), lambda: self.tensors, settings, notify=self.said.append)
        self.version, self.full = 0, sum(chunk.nbytes for chunk in plan.chunks)

    def change(self, count: int) -> None:
        """Change the first `count` bytes of every tensor."""
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).view(-1)[:count] += 1

    def run(self):
        """Run a sync, and check that both engines hold the trainer's weights."""
        self.version += 1
        report = self.sync.run(self.version)
        assert report.proved == report.tensors and self.sync.prove() == report.tensors
        return report


@pytest.fixture
def bridge(tmp_path, request):
    bridges = []

    def build(model: ModelGeometry = MODEL, **settings) -> Bridge:
        bridges.append(Bridge(SyncConfig(dir=tmp_path, timeout=20.0, **settings), model))
        return bridges[-1]

    yield build
    for each in bridges:
        each.sync.close()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "disk"])
def test_only_changed_bytes_are_sent_and_everything_if_the_base_is_wrong(bridge, transport, staged):
    both = bridge(transport=transport, staged=staged, delta="on", proof="streamed")
    first = both.run()
    assert (first.bytes, first.changed_share) == (both.full, None)
    assert both.sync._transfer._base.nbytes == both.full // 2  # one copy for two engines
    both.change(5)
    small = both.run()
    assert 0 < small.bytes < both.full / 20 and 0 < small.changed_share < 0.05
    same = both.run()
    assert (same.bytes, same.changed_share, same.wrong_bases) == (0, 0.0, 0)
    both.change(100_000)
    assert both.run().bytes > both.full / 2  # chunks with many changes are sent as a whole
    receiver = both.engine.receivers[1]
    name = "model.layers.0.mlp.down_proj.weight"
    flipped = receiver._staging._matrices[name][0] if staged else view_bytes(both.engine.tensors[1][name])
    flipped[130, 140] ^= 1
    wrong = both.run()
    assert (wrong.bytes, wrong.wrong_bases) == (both.full, 1) and wrong.metrics()["sync/wrong_bases"] == 1
    (line,) = [line for line in both.said if "did not hold" in line]
    assert f"{name} of engine rank 1 differs from decoder.layers.0.mlp.linear_fc2.weight of trainer rank 0; first in rows 128..255" in line
    assert both.run().bytes == 0
    both.sync.close()  # as after the loss of an engine
    assert both.run().bytes == both.full


@pytest.mark.parametrize("proof", ["streamed", "reread"])
def test_only_adapters_are_sent_and_a_changed_base_is_found(bridge, proof):
    adapted = bridge(replace(MODEL, adapters=AdapterGeometry(8, ("linear_qkv", "linear_proj", "linear_fc2"))), proof=proof)
    own = 2 * sum(tensor.nbytes for name, tensor in adapted.tensors.items() if is_adapter(name))  # to two engines
    assert adapted.run().bytes == adapted.full > 10 * own > 0
    for name, tensor in adapted.tensors.items():
        if is_adapter(name):
            tensor.view(torch.uint8).add_(1)
    assert adapted.run().bytes == own
    name = "model.layers.0.mlp.down_proj.weight"
    view_bytes(adapted.engine.tensors[1][name])[130, 140] ^= 1
    if proof == "streamed":
        wrong = adapted.run()
        assert (wrong.bytes, wrong.wrong_bases) == (adapted.full, 1) and adapted.run().bytes == own
    else:
        with pytest.raises(RunError, match=f"not proved: {name} of engine rank 1 differs"):
            adapted.run()
    adapted.sync.close()  # as after the loss of an engine
    assert adapted.run().bytes == adapted.full


def test_auto_sends_deltas_only_if_they_are_small(bridge):
    auto, near, off = bridge(transport="disk", delta="auto", proof="streamed"), bridge(delta="auto"), bridge(transport="disk")
    for each in (auto, near, off):
        each.run()
        each.change(3)
        report = each.run()
        assert (report.bytes < each.full) == (each is auto) == ("sync/changed_share" in report.metrics())
        assert bool(each.sync._transfer._base.nbytes) == (each is auto)
    for _ in range(2):
        auto.change(1 << 20)
        assert auto.run().bytes == auto.full
    auto.change(3)
    assert auto.run().bytes < auto.full
    assert [line.split(";")[0] for line in auto.said] == [
        "sync.delta = auto: sending what changed",
        "sync.delta = auto: sending everything",
    ]


def test_chunks_for_two_engines_are_hashed_once(bridge, monkeypatch):
    pack, hashed = ChunkPacker.pack, []

    def count_and_pack(packer, named_rects, flat, hashing):
        hashed.append(hashing)
        return pack(packer, named_rects, flat, hashing)

    monkeypatch.setattr(ChunkPacker, "pack", count_and_pack)
    both = bridge(delta="off", proof="streamed")
    both.run()
    assert len(hashed) == len(both.sync.plan.chunks) == 2 * sum(hashed)


def test_a_failed_proof_of_a_full_sync_is_an_error(bridge, monkeypatch):
    """The next sync then sends everything."""
    both = bridge(transport="disk", delta="on", proof="streamed")
    both.run()
    both.change(3)
    receiver = both.engine.receivers[0]
    finish = receiver.finish

    def finish_and_flip(live, hashing):
        view_bytes(live["model.norm.weight"])[0, 0] ^= 1
        return [digest[::-1] for digest in finish(live, hashing)]

    monkeypatch.setattr(receiver, "finish", finish_and_flip)
    with pytest.raises(RunError, match="the sync is not proved: model.norm.weight of engine rank 0|differed for a while"):
        both.run()
    monkeypatch.undo()
    assert both.run().bytes == both.full
