"""The report of a sync, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.metrics import STEP_SECONDS, declare

_SECONDS = "sync (seconds)"
_METRICS = (
    declare("sync/bytes", "bytes moved from trainer to engine", "bytes", "bytes moved"),
    declare("sync/blocks", "blocks of quantized weights moved", "count"),
    declare("sync/tensors", "tensors moved", "count"),
    declare("sync/proved", "tensors whose hashes were equal on both sides", "count"),
    declare("time/sync", "moving the weights to the engine", "seconds", STEP_SECONDS, _SECONDS),
    declare("time/proof", "hashing the weights on both sides, and comparing the hashes", "seconds", STEP_SECONDS, _SECONDS),
    declare("time/served", "recomputing and comparing the tensors that the engine derived from the weights", "seconds", STEP_SECONDS),
    declare("time/canary", "a few tokens through every engine and the trainer, before any completion is returned", "seconds", STEP_SECONDS),
    declare("sync/derived", "tensors derived by the engine that were recomputed and found equal", "count"),
    declare("sync/canary", "largest |log p trainer - log p engine| of the canary's tokens", "nats"),
    declare("time/recovery", "from the loss of an engine to the next proved sync", "seconds"),
    declare("engine/restarts", "engines that replaced lost engines", "count"),
    declare("sync/wrong_bases", "delta syncs that were repeated in full because the engine held other weights than assumed", "count"),
)
_CHANGED_SHARE = declare("sync/changed_share", "share of the bytes that changed since the last sync, if they were compared", "share")


@dataclass(frozen=True)
class SyncReport:
    """Result of one sync. A sync that is not proved raises an error instead."""

    bytes: int  # bytes sent; with `sync.delta` fewer than the weights have
    blocks: int  # scales moved: one per block or row of a quantized weight
    tensors: int  # engine tensors written, including scales
    proved: int  # engine tensors whose bytes had equal digests on both sides
    seconds: float  # total duration, including the proof
    proof_seconds: float
    served_seconds: float
    canary_seconds: float
    derived: int  # tensors derived by the engine that were recomputed and found equal
    canary: float  # largest |log p trainer - log p engine| of the canary's tokens
    wrong_bases: int  # 1 if the engine did not hold the weights of the last sync, so that everything was sent
    changed_share: float | None  # share of the bytes that changed since the last sync, or None if they were not compared
    restarts: int = 0  # engines that replaced lost engines since the last report
    recovery_seconds: float = 0.0  # seconds spent on replacing engines and repeating syncs

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their names in the run log."""
        proofs = self.proof_seconds, self.served_seconds, self.canary_seconds
        counts = map(float, (self.bytes, self.blocks, self.tensors, self.proved))
        rest = float(self.derived), self.canary, self.recovery_seconds, float(self.restarts), float(self.wrong_bases)
        metrics = dict(zip(_METRICS, (*counts, self.seconds - sum(proofs), *proofs, *rest), strict=True))
        return metrics if self.changed_share is None else metrics | {_CHANGED_SHARE: self.changed_share}
