"""What a sync moves: planned once from the model, the layouts and the precision contract. No torch, so a bad layout is refused early."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import PrecisionContract
from parallel.chunking import Bucket, fill_buckets, list_tensor_specs
from parallel.layout import Layout
from parallel.layout_hints import add_layout_hints
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import GeometryError, Shard

_ITEMSIZE = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class SyncPlan:
    """All that a sync needs to know beforehand; the same on every rank."""

    transfers: tuple[Transfer, ...]
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
        if (refused := contract.find_engine_error(model)) is not None:
            raise refused
        roles, int8_roles = contract.fp8_roles, contract.int8_roles
        try:
            targets = build_engine_shards(model, *rollout, engines)
            planned = add_scale_transfers(
                reshard(build_trainer_shards(model, train, quantised=bool(roles)), targets, roles, int8_roles=int8_roles)
            )
            cut = fill_buckets(list_tensor_specs(targets, roles, _ITEMSIZE[contract.high], int8_roles), bucket_bytes)
        except GeometryError as error:
            told = add_layout_hints(error, model, train, rollout, roles, quantised=bool(roles))
            field = f"train.{told.field}" if told.field.startswith("layout.") else told.field
            raise UserError(field, told.value, told.rule, told.fix) from None
        except ValueError as error:
            raise UserError("sync.bucket_mb", bucket_bytes >> 20, str(error), "raise it") from None
        return cls(tuple(planned), tuple(cut), targets, contract)

    @classmethod
    def from_config(cls, model: ModelGeometry, train: Layout, config: Config) -> SyncPlan:
        """`make` with the configuration's rollout, precision and chunk size."""
        sizes = config.rollout.tp, config.rollout.ep
        return cls.make(
            model, train, sizes, PrecisionContract.from_config(config.precision), config.sync.chunk_bytes, config.rollout.engines
        )

    def count_bytes(self, transfer: Transfer) -> int:
        itemsize = {"fp8": 1, "int8": 1, "scale": 4, "fp32": 4, "high": _ITEMSIZE[self.contract.high]}[transfer.kind]
        return transfer.target_rect.rows * transfer.target_rect.cols * itemsize
