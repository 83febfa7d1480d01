"""The sync plan, the checks of a live engine against it, and the errors after which a sync is repeated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from support.geometries import small_model

from megatron_rl.config import PrecisionConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import EngineTensorSpec
from megatron_rl.sync.checks import check_live_engine, check_live_tensors
from megatron_rl.sync.plan import SyncPlan, cut_into_chunks
from megatron_rl.sync.transfer import WeightTransfer
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError
from parallel.transport.base import Transport

QKV = "model.layers.0.self_attn.qkv_proj.weight"
FP8 = "('float8_e4m3fn', (1024, 256))"


def make(mode: str = "fp8_unified", high: str = "bf16", train: Layout | None = None, rollout_tp: int = 2, **widths: object) -> SyncPlan:
    contract = PrecisionContract.from_config(PrecisionConfig(mode=mode, high=high))
    return SyncPlan.make(small_model(**widths), train or Layout(), (rollout_tp, 1), contract, 1 << 20)


def live_engine(high: str = "bfloat16") -> list[dict[str, EngineTensorSpec]]:
    """Return SGLang's tensors of `small_model()` at tp = 2, written by hand: 8 heads, 4 kv heads, hidden 256, ffn 1024, vocabulary 320."""
    layer = {
        "input_layernorm.weight": (high, (256,)),
        "self_attn.qkv_proj.weight": ("float8_e4m3fn", (1024, 256)),
        "self_attn.qkv_proj.weight_scale_inv": ("float32", (8, 2)),
        "self_attn.q_norm.weight": (high, (128,)),
        "self_attn.k_norm.weight": (high, (128,)),
        "self_attn.o_proj.weight": ("float8_e4m3fn", (256, 512)),
        "self_attn.o_proj.weight_scale_inv": ("float32", (2, 4)),
        "post_attention_layernorm.weight": (high, (256,)),
        "mlp.gate_up_proj.weight": ("float8_e4m3fn", (1024, 256)),
        "mlp.gate_up_proj.weight_scale_inv": ("float32", (8, 2)),
        "mlp.down_proj.weight": ("float8_e4m3fn", (256, 512)),
        "mlp.down_proj.weight_scale_inv": ("float32", (2, 4)),
    }
    tensors = {"model.embed_tokens.weight": (high, (160, 256)), "model.norm.weight": (high, (256,)), "lm_head.weight": (high, (160, 256))}
    tensors |= {f"model.layers.{index}.{name}": tensor for index in range(2) for name, tensor in layer.items()}
    return [{name: EngineTensorSpec(*tensor) for name, tensor in tensors.items()} for _ in range(2)]


@pytest.mark.parametrize(
    "name, live, expected",
    [
        (QKV, None, FP8),
        (QKV + "_scale_inv", None, "('float32', (8, 2))"),
        ("model.layers.0.self_attn.qkv_proj.bias", ("bfloat16", (1024,)), "absent"),
        (QKV, ("float8_e4m3fn", (512, 256)), FP8),
        (QKV, ("bfloat16", (1024, 256)), FP8),
        (QKV + "_scale_inv", ("bfloat16", (8, 2)), "('float32', (8, 2))"),
        ("model.norm.weight", ("float32", (256,)), "('bfloat16', (256,))"),
        ("model.norm.weight", ("bfloat16", (256, 1)), "('bfloat16', (256,))"),
        ("lm_head.weight", ("float8_e4m3fn", (160, 256)), "('bfloat16', (160, 256))"),
    ],
)
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


def test_an_engine_that_matches_the_contract_passes():
    check_live_tensors(make(), live_engine())
    check_live_tensors(make(high="fp32"), live_engine("float32"))
    plain = [
        {name: dataclasses.replace(tensor, dtype="bfloat16") for name, tensor in rank.items() if not name.endswith("_scale_inv")}
        for rank in live_engine()
    ]
    check_live_tensors(make("bf16"), plain)
    with pytest.raises(RunError, match="engine rank 0: model.layers.0.mlp.down_proj.weight is "):
        check_live_tensors(make(), plain)


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


def test_an_int8_engine_passes_only_in_int8():
    check_live_engine(make("int8_rollout"), FakeEngine({"a": "int8 fp32"}, int8_engine()))
    with pytest.raises(RunError, match=r"is \('int8', .* the precision contract says \('float8_e4m3fn'"):
        check_live_tensors(make("fp8_rollout"), int8_engine())
    with pytest.raises(RunError, match=r"is \('float8_e4m3fn', .* the precision contract says \('int8'"):
        check_live_tensors(make("int8_rollout"), live_engine())


@pytest.mark.parametrize(
    "mode, formats, line",
    [
        ("fp8_unified", {"a": "fp8 pow2", "b": "fp8 fp32"}, "b quantizes activations as fp8 fp32; .* says fp8 pow2"),
        ("fp8_unified", {}, "no FP8 linear layer is live"),
        ("int8_rollout", {"a": "int8 fp32", "b": "fp8 pow2"}, "b quantizes activations as fp8 pow2; .* says int8 fp32"),
        ("int8_rollout", {}, "no INT8 linear layer is live"),
    ],
)
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


def test_the_chunks_of_one_rank_are_those_of_the_plan():
    contract = PrecisionContract.from_config(PrecisionConfig())
    plan = SyncPlan.make(small_model(), Layout(tp=2, dp=2), EngineLayout(tp=2, engines=2), contract, 1 << 20)
    for rank in range(4):
        own = [chunk for chunk in plan.chunks if chunk.source == rank]
        assert own and cut_into_chunks(plan.transfers, 1 << 20, rank) == own


def test_a_chunk_smaller_than_a_row_is_refused():
    wide = ModelGeometry("qwen3", layers=1, hidden=(1 << 20) + 128, heads=1, kv_heads=1, head_dim=128, ffn=128, vocab=4, tied=True)
    with pytest.raises(GeometryError, match=r"sync.bucket_mb = None: one row of .* is \d+ bytes, a chunk holds 1048576; raise it"):
        SyncPlan.make(wide, Layout(), EngineLayout(), PrecisionContract.from_config(PrecisionConfig()), 1 << 20)


@pytest.mark.parametrize("error, raised", [(KeyError("gone"), EngineLostError), (OSError("no memory"), RunError)])
def test_only_the_transports_lost_errors_repeat_a_sync(error, raised):
    transfer, engine = WeightTransfer.__new__(WeightTransfer), SimpleNamespace(finish_receiving=lambda hashing: None)
    transfer._rank, transfer._outbox, transfer._engine = 0, None, Rank0(lambda: engine)
    transfer._transport = Transport("own_transport", lost_errors=(KeyError,))

    def fail() -> None:
        raise error

    with pytest.raises(RunError, match="the sync broke: trainer rank 0: ") as caught:
        transfer._run_on_all_ranks(fail)
    assert type(caught.value) is raised
