"""What one sync did, and its metrics."""

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
    declare("time/proof", "hashing the weights on both sides, and comparing", "seconds", STEP_SECONDS, _SECONDS),
    declare("time/served", "making anew, and comparing, what the engine made of the weights", "seconds", STEP_SECONDS),
    declare("time/canary", "a few tokens through every engine and the trainer, before anything is served", "seconds", STEP_SECONDS),
    declare("sync/derived", "tensors that the engine made of others, made anew and found equal", "count"),
    declare("sync/canary", "largest |log p trainer - log p engine| of the canary's tokens", "nats"),
    declare("time/recovery", "from the loss of an engine to the next proved sync", "seconds"),
    declare("engine/restarts", "engines that took the place of lost ones", "count"),
    declare("sync/wrong_bases", "syncs of which the engine did not hold what was not sent, so that all was sent after all", "count"),
)
_CHANGED_SHARE = declare("sync/changed_share", "bytes that differ from those of the sync before, where they were compared", "share")


@dataclass(frozen=True)
class SyncReport:
    """What one sync did."""

    bytes: int
    """Sent; with `sync.delta` fewer than the weights have."""
    blocks: int
    """Scales moved: one for a block of a quantized weight, or for a row."""
    tensors: int
    """Engine tensors written; scales count."""
    proved: int
    """Engine tensors whose bytes all had equal digests on both sides; otherwise the sync would have raised."""
    seconds: float
    """In all, the proof included."""
    proof_seconds: float
    served_seconds: float = 0.0
    canary_seconds: float = 0.0
    derived: int = 0
    """Engine tensors made of those, made anew and found equal."""
    canary: float = 0.0
    """Largest |log p trainer - log p engine| of the canary's tokens."""
    restarts: int = 0
    """Engines that replaced lost ones since the previous sync."""
    recovery_seconds: float = 0.0
    """Spent on replacing engines and repeating syncs."""
    wrong_bases: int = 0
    """1 where the engine did not hold what the sync before proved; everything was then sent."""
    changed_share: float | None = None
    """Bytes that differ from those of the sync before, where they were compared."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their names in the run log."""
        proofs = self.proof_seconds, self.served_seconds, self.canary_seconds
        counts = map(float, (self.bytes, self.blocks, self.tensors, self.proved))
        rest = float(self.derived), self.canary, self.recovery_seconds, float(self.restarts), float(self.wrong_bases)
        metrics = dict(zip(_METRICS, (*counts, self.seconds - sum(proofs), *proofs, *rest), strict=True))
        return metrics if self.changed_share is None else metrics | {_CHANGED_SHARE: self.changed_share}
