"""The sync plan, checks of a live engine against it, errors that repeat a sync, and delta syncs over real transports."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.geometries import small_model
from support.receiving_engine import ReceivingEngine

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import EngineTensorSpec
from megatron_rl.sync.checks import check_live_engine, check_live_tensors
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.transfer import WeightTransfer
from megatron_rl.sync.weight_sync import WeightSync
from parallel.adapters import AdapterGeometry, is_adapter
from parallel.digest import make_stored_tensors, view_bytes
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.transport.base import Transport
from parallel.transport.pack import ChunkPacker

QKV = "model.layers.0.self_attn.qkv_proj.weight"
FP8 = "('float8_e4m3fn', (1024, 256))"


def make(mode: str = "fp8_unified", high: str = "bf16", train: Layout | None = None, rollout_tp: int = 2, **widths: object) -> SyncPlan:
    contract = PrecisionContract.from_config(PrecisionConfig(mode=mode, high=high))
    return SyncPlan.make(small_model(**widths), train or Layout(), (rollout_tp, 1), contract, 1 << 20)


def live_engine(high: str = "bfloat16") -> list[dict[str, EngineTensorSpec]]:
    """Return SGLang's tensors of `small_model()` at tp = 2, written by hand: 8 heads, 4 kv heads, hidden 256, ffn 1024, vocabulary 320."""
    fp8 = {"self_attn.qkv_proj": (1024, 256), "self_attn.o_proj": (256, 512), "mlp.gate_up_proj": (1024, 256), "mlp.down_proj": (256, 512)}
    layer = {f"{name}.weight": ("float8_e4m3fn", shape) for name, shape in fp8.items()}
    layer |= {f"{name}.weight_scale_inv": ("float32", (rows // 128, cols // 128)) for name, (rows, cols) in fp8.items()}
    layer |= {f"{name}_layernorm.weight": (high, (256,)) for name in ("input", "post_attention")}
    layer |= {f"self_attn.{name}_norm.weight": (high, (128,)) for name in "qk"}
    tensors = {"model.embed_tokens.weight": (high, (160, 256)), "model.norm.weight": (high, (256,)), "lm_head.weight": (high, (160, 256))}
    tensors |= {f"model.layers.{index}.{name}": tensor for index in range(2) for name, tensor in layer.items()}
    return [{name: EngineTensorSpec(*tensor) for name, tensor in tensors.items()} for _ in range(2)]


@pytest.mark.parametrize("name, live, expected", [
    (QKV, None, FP8),
    (QKV + "_scale_inv", None, "('float32', (8, 2))"),
    ("model.layers.0.self_attn.qkv_proj.bias", ("bfloat16", (1024,)), "absent"),
    (QKV, ("float8_e4m3fn", (512, 256)), FP8),
    (QKV, ("bfloat16", (1024, 256)), FP8),
    (QKV + "_scale_inv", ("bfloat16", (8, 2)), "('float32', (8, 2))"),
    ("model.norm.weight", ("float32", (256,)), "('bfloat16', (256,))"),
    ("model.norm.weight", ("bfloat16", (256, 1)), "('bfloat16', (256,))"),
    ("lm_head.weight", ("float8_e4m3fn", (160, 256)), "('bfloat16', (160, 256))"),
])  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_a_live_tensor_that_differs_is_named(rank, name, live, expected):
    engine = live_engine()
    if live is None:
        del engine[rank][name]
    else:
        engine[rank][name] = EngineTensorSpec(*live)
    with pytest.raises(RunError) as caught:
        check_live_tensors(make(), engine)
    fix = "; SGLang may have no class for this `architectures` entry and serve its generic model"
    line = f"engine rank {rank}: {name} is {live or 'absent'}, the precision contract says {expected}"
    assert str(caught.value) == line + fix * ("absent" in (live or "absent", expected))


def test_an_engine_that_matches_the_contract_passes_and_one_in_int8_only_in_int8():
    check_live_tensors(make(), live_engine())
    check_live_tensors(make(high="fp32"), live_engine("float32"))
    plain = [
        {name: dataclasses.replace(tensor, dtype="bfloat16") for name, tensor in rank.items() if not name.endswith("_scale_inv")}
        for rank in live_engine()
    ]
    check_live_tensors(make("bf16"), plain)
    with pytest.raises(RunError, match="engine rank 0: model.layers.0.mlp.down_proj.weight is "):
        check_live_tensors(make(), plain)
    check_live_engine(make("int8_rollout"), FakeEngine({"a": "int8 fp32"}, int8_engine()))
    with pytest.raises(RunError, match=r"is \('int8', .* the precision contract says \('float8_e4m3fn'"):
        check_live_tensors(make("fp8_rollout"), int8_engine())
    with pytest.raises(RunError, match=r"is \('float8_e4m3fn', .* the precision contract says \('int8'"):
        check_live_tensors(make("int8_rollout"), live_engine())


class FakeEngine:
    """An engine with correct weights and the given activation formats."""

    def __init__(self, formats: dict[str, str], live: list[dict[str, EngineTensorSpec]] | None = None) -> None:
        self._formats, self._live = formats, live or live_engine()

    def describe_tensors(self) -> list[dict[str, EngineTensorSpec]]:
        return self._live

    def read_activation_formats(self) -> dict[str, str]:
        return self._formats


def int8_engine() -> list[dict[str, EngineTensorSpec]]:
    """Return `live_engine` in INT8, with one scale per row of a weight."""
    ranks = []
    for rank in live_engine():
        data = {name: EngineTensorSpec("int8", tensor.shape) for name, tensor in rank.items() if tensor.dtype == "float8_e4m3fn"}
        scales = {name + "_scale": EngineTensorSpec("float32", (tensor.shape[0], 1)) for name, tensor in data.items()}
        ranks.append({name: tensor for name, tensor in rank.items() if tensor.dtype == "bfloat16"} | data | scales)
    return ranks


@pytest.mark.parametrize("mode, formats, line", [
    ("fp8_unified", {"a": "fp8 pow2", "b": "fp8 fp32"}, "b quantizes activations as fp8 fp32; .* says fp8 pow2"),
    ("fp8_unified", {}, "no FP8 linear layer is live"),
    ("int8_rollout", {"a": "int8 fp32", "b": "fp8 pow2"}, "b quantizes activations as fp8 pow2; .* says int8 fp32"),
    ("int8_rollout", {}, "no INT8 linear layer is live"),
])  # fmt: skip
def test_an_engine_with_wrong_activation_formats_is_refused(mode, formats, line):
    check_live_engine(make(), FakeEngine({"a": "fp8 pow2", "b": "fp8 pow2"}))
    with pytest.raises(RunError, match=line):
        check_live_engine(make(mode), FakeEngine(formats, int8_engine() if mode == "int8_rollout" else live_engine()))


@pytest.mark.parametrize("mode", ["bf16", "fp8_rollout", "fp8_unified"])
@pytest.mark.parametrize("high, itemsize", [("bf16", 2), ("fp32", 4)])
def test_the_bytes_of_all_moves_are_the_bytes_of_the_model(mode, high, itemsize):
    plan = make(mode, high, Layout(tp=2))
    fp8 = 2 * (2 * 1024 * 256 + 2 * 512 * 256) * 2  # ranks * (qkv and gate_up, o and down) * layers
    norms, vocabulary = 2 * (256 * 5 + 128 * 4), 2 * 300 * 256
    weights = fp8 * itemsize if mode == "bf16" else fp8 + fp8 // 128**2 * 4
    assert sum(transfer.nbytes for transfer in plan.transfers) == weights + (norms + vocabulary) * itemsize
    assert 0 < max(chunk.nbytes for chunk in plan.chunks) <= 1 << 20


@pytest.mark.parametrize("error, raised", [(KeyError("gone"), EngineLostError), (OSError("no memory"), RunError)])
def test_only_the_transports_lost_errors_repeat_a_sync(error, raised):
    transfer, engine = WeightTransfer.__new__(WeightTransfer), SimpleNamespace(finish_receiving=lambda hashing: None)
    transfer._rank, transfer._outbox, transfer._engine = 0, None, Rank0(lambda: engine)
    transfer._transport = Transport("own_transport", lost_errors=(KeyError,))

    def fail() -> None:
        raise error

    with pytest.raises(RunError, match="the sync broke: trainer rank 0: ") as caught:
        transfer._run_on_all_ranks(fail, None)
    assert type(caught.value) is raised


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
        contract = replace(CONTRACT, kv="e4m3_per_layer") if model.kv_scales else CONTRACT
        plan = SyncPlan.make(model, Layout(), EngineLayout(engines=2), contract, 100_000)
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
def test_only_adapters_and_scales_of_the_cache_are_sent_and_a_changed_base_is_found(bridge, proof):
    model = replace(MODEL, adapters=AdapterGeometry(8, ("linear_qkv", "linear_proj", "linear_fc2")), kv_scales=True)
    adapted = bridge(model, proof=proof)
    changing = [tensor for name, tensor in adapted.tensors.items() if is_adapter(name) or name.endswith("kv_scales")]
    own = 2 * sum(tensor.nbytes for tensor in changing)  # to two engines
    assert adapted.run().bytes == adapted.full > 10 * own > 0
    for tensor in changing:
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
    view_bytes(adapted.tensors["decoder.layers.0.mlp.linear_fc2.weight"])[5, 6] ^= 1
    with pytest.raises(RunError, match=f"{name} of engine rank 0 differs from .* of trainer rank 0; first in rows 0..127, columns 0..127"):
        adapted.run()
    adapted.sync.close()  # the engine gets the changed weights, which only the trainer's memory of the first sync can tell
    if proof == "streamed":
        with pytest.raises(RunError, match=r"decoder\..* or a weight after it on trainer rank 0 has changed in the trainer, although"):
            adapted.run()


def test_the_age_of_the_proof_is_reported(bridge):
    """Streamed hashes are of bytes that were just written. What happens to them later is hashed only in the first sync."""
    streamed, reread = bridge(proof="streamed"), bridge(proof="reread")
    assert [streamed.run().metrics()["sync/proof_age"] for _ in range(3)] == [0, 1, 2]
    streamed.sync.close()  # as after the loss of an engine
    assert [streamed.run().proof_age for _ in range(2)] == [0, 1]
    assert [reread.run().proof_age for _ in range(3)] == [0, 0, 0]
    wrong = bridge(proof="streamed", delta="on")
    wrong.run()
    view_bytes(wrong.engine.tensors[1]["model.norm.weight"])[0, 0] ^= 1
    assert (report := wrong.run()).wrong_bases == 1 and report.proof_age == 1


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
        count, *lanes = finish(live, hashing)
        return [count, *(lane ^ 1 for lane in lanes)]

    monkeypatch.setattr(receiver, "finish", finish_and_flip)
    with pytest.raises(RunError, match="the sync is not proved: model.norm.weight of engine rank 0|differed for a while"):
        both.run()
    monkeypatch.undo()
    assert both.run().bytes == both.full
