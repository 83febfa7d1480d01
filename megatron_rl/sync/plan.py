"""What a sync moves: planned once from the model, the layouts and the precision contract. No torch, so a bad layout is refused early."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import PrecisionContract
from parallel.chunking import Chunk, make_chunks
from parallel.formats import element_bytes
from parallel.layout import Layout
from parallel.layout_hints import add_layout_hints
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import GeometryError, Shard


@dataclass(frozen=True)
class SyncPlan:
    """All that a sync needs to know beforehand; the same on every rank."""

    transfers: tuple[Transfer, ...]
    chunks: tuple[Chunk, ...]
    """What of the transfers is sent in one go, in the order in which every rank goes through them."""
    targets: dict[int, list[Shard]]
    """Engine rank -> its shards."""
    contract: PrecisionContract

    @classmethod
    def make(
        cls,
        model: ModelGeometry,
        train: Layout,
        rollout: tuple[int, int],
        contract: PrecisionContract,
        chunk_bytes: int,
        engines: int = 1,
    ) -> SyncPlan:
        """Plan trainer -> equal engines of `rollout` (tp, ep), whose ranks are numbered consecutively.

        Raises UserError where the layouts do not fit the model or cut FP8 blocks, where a row of a tensor is more than `chunk_bytes`,
        and for a model that no engine serves in the contract's precision.
        """
        if (unserved := contract.find_engine_error(model)) is not None:
            raise unserved
        roles, int8_roles = contract.fp8_roles, contract.int8_roles
        try:
            sources = build_trainer_shards(model, train, quantized=bool(roles))
            targets = build_engine_shards(model, *rollout, engines)
            transfers = add_scale_transfers(reshard(sources, targets, roles, int8_roles=int8_roles))
            chunks = make_chunks(transfers, chunk_bytes, contract.high)
        except GeometryError as error:
            hinted = add_layout_hints(error, model, train, rollout, roles, quantized=bool(roles))
            field = f"train.{hinted.field}" if hinted.field.startswith("layout.") else hinted.field
            raise UserError(field, hinted.value, hinted.rule, hinted.fix) from None
        except ValueError as error:
            raise UserError("sync.bucket_mb", chunk_bytes >> 20, str(error), "raise it") from None
        return cls(tuple(transfers), tuple(chunks), targets, contract)

    @classmethod
    def from_config(cls, model: ModelGeometry, train: Layout, config: Config) -> SyncPlan:
        """`make` with the configuration's rollout, precision and chunk size."""
        rollout, contract = (config.rollout.tp, config.rollout.ep), PrecisionContract.from_config(config.precision)
        return cls.make(model, train, rollout, contract, config.sync.chunk_bytes, config.rollout.engines)

    def count_bytes(self, transfer: Transfer) -> int:
        """Return the bytes that a transfer moves."""
        return transfer.target_rect.rows * transfer.target_rect.cols * element_bytes(transfer.kind, self.contract.high)
