"""What a sync moves: planned once from the model, the layouts and the precision contract. No torch, so a bad layout is refused early."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.rollout.engine import Engine, LiveTensor
from megatron_rl.errors import RunError, UserError
from megatron_rl.precision.contract import PrecisionContract
from parallel.formats import SCHEMES
from parallel.chunking import Bucket, buckets, planes_of
from parallel.model_geometry import GeometryError, ModelGeometry, Shard
from parallel.layout import Layout
from parallel.megatron_shards import trainer_shards
from parallel.layout_hints import explained
from parallel.reshard import Move, kind_of, moves, reshard, scale_name
from parallel.sglang_shards import engine_shards

_ITEMSIZE = {"bf16": 2, "fp32": 4}
_TORCH_NAME = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class SyncPlan:
    """All that a sync needs to know beforehand; the same on every rank."""

    moves: tuple[Move, ...]
    buckets: tuple[Bucket, ...]
    targets: dict[int, list[Shard]]
    contract: PrecisionContract

    @classmethod
    def make(
        cls,
        model: ModelGeometry,
        train: Layout,
        rollout: tuple[int, int],
        contract: PrecisionContract,
        bucket_bytes: int,
        engines: int = 1,
    ) -> SyncPlan:
        """Plans trainer -> equal engines of `rollout` (tp, ep), whose ranks are numbered through. Raises UserError where the layouts do not
        fit the model or cut FP8 blocks, and for a model that no engine serves in the contract's precision."""
        if (refused := contract.engine_refusal(model)) is not None:
            raise refused
        roles, int8_roles = contract.fp8_roles(), contract.int8_roles()
        try:
            targets = engine_shards(model, *rollout, engines)
            planned = moves(reshard(trainer_shards(model, train, quantised=bool(roles)), targets, roles, int8_roles=int8_roles))
            cut = buckets(planes_of(targets, roles, _ITEMSIZE[contract.high], int8_roles), bucket_bytes)
        except GeometryError as error:
            told = explained(error, model, train, rollout, roles, quantised=bool(roles))
            field = f"train.{told.field}" if told.field.startswith("layout.") else told.field
            raise UserError(field, told.value, told.rule, told.fix) from None
        except ValueError as error:
            raise UserError("sync.bucket_mb", bucket_bytes >> 20, str(error), "raise it") from None
        return cls(tuple(planned), tuple(cut), targets, contract)

    @classmethod
    def of_config(cls, model: ModelGeometry, train: Layout, config: Config) -> SyncPlan:
        """`make` with the configuration's rollout, precision and chunk size."""
        sizes = config.rollout.tp, config.rollout.ep
        return cls.make(model, train, sizes, PrecisionContract.of(config.precision), config.sync.chunk_bytes, config.rollout.engines)

    def bytes_of(self, move: Move) -> int:
        itemsize = {"fp8": 1, "int8": 1, "scale": 4, "fp32": 4, "high": _ITEMSIZE[self.contract.high]}[move.kind]
        return move.target_rect.rows * move.target_rect.cols * itemsize


def check_live_engine(plan: SyncPlan, engine: Engine) -> None:
    """Refuses, by RunError, an engine that does not follow the precision contract: its weights, or how it quantises activations."""
    check_live_tensors(plan, engine.live_tensors())
    wanted = plan.contract.activation_format
    if wanted is not None:
        formats = engine.activation_scale_formats()
        wrong = [name for name, used in formats.items() if used != wanted]
        if wrong or not formats:
            kind = "INT8" if plan.contract.rollout_int8 else "FP8"
            what = f"{wrong[0]} quantises activations with {formats[wrong[0]]} scales" if wrong else f"no {kind} linear layer is live"
            rule = "precision.mode is int8_rollout" if plan.contract.rollout_int8 else f"precision.scale_format is {wanted}"
            raise RunError(f"the engine breaks the precision contract: {what}; {rule}")


def check_live_tensors(plan: SyncPlan, live: list[dict[str, LiveTensor]]) -> None:
    """Compares what the engine really holds with what the plan will write: names, shapes and dtypes. Raises RunError by name."""
    roles, int8_roles = plan.contract.fp8_roles(), plan.contract.int8_roles()
    if len(live) != len(plan.targets):
        raise RunError(f"the engine answers with {len(live)} ranks, the plan has {len(plan.targets)}")
    dtypes = {"fp8": "float8_e4m3fn", "int8": "int8", "fp32": "float32", "high": _TORCH_NAME[plan.contract.high]}
    for rank, shards in plan.targets.items():
        expected = {}
        for shard in shards:
            kind = kind_of(shard.role, roles, int8_roles)
            expected[shard.name] = (dtypes[kind], shard.shape)
            if kind in SCHEMES:
                expected[scale_name(shard.name, kind)] = ("float32", shard.scale_shape_of(kind))
        held = {name: (tensor.dtype, tensor.shape) for name, tensor in live[rank].items()}
        for name in sorted(expected.keys() | held.keys()):
            if expected.get(name) != held.get(name):
                raise RunError(
                    f"engine rank {rank}: {name} is {held.get(name, 'absent')}, the precision contract says {expected.get(name, 'absent')}"
                )
