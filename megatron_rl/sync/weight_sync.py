"""Weight sync: the trainer's weights reach the live engine byte for byte, and every sync proves that they did. Every chunk is hashed on
both sides: in the trainer's live tensors, and in the engine's tensors after they were written. The engine recomputes every tensor that
it derived from the weights (`rollout_sglang.derived_tensors`) and answers a canary (`megatron_rl.diagnosis.canary`). On CPUs it already
samples meanwhile, but returns no completion before both have passed. If an engine is lost, sync and sampling are repeated with the same
bits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.metrics import STEP_SECONDS, declare
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.signals import check_stop
from megatron_rl.rollout.engine import Engine, Roots, ServedReport
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.checks import check_live_engine, check_transport
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.proof import ByteProof
from megatron_rl.sync.schedule import Schedule
from megatron_rl.sync.transfer import Transferred, WeightTransfer

_SECONDS = "sync (seconds)"
_METRICS = (
    declare("sync/bytes", "bytes moved from trainer to engine", "bytes", "bytes moved"),
    declare("sync/blocks", "blocks of quantized weights moved", "count"),
    declare("sync/tensors", "tensors moved", "count"),
    declare("sync/proved", "tensors whose hashes were equal on both sides", "count"),
    declare("sync/engine_bytes", "bytes of the engines' weights, by their live shapes", "bytes"),
    declare("sync/proved_bytes", "bytes of the engines' weights whose hashes were equal on both sides, or which are zero padding", "bytes"),
    declare("sync/proof_age", "syncs since all bytes were last hashed as the engines serve them; 0 with sync.proof = reread", "count"),
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
T = TypeVar("T")


class Canary(Protocol):
    """Compares log-probs of a few fixed prompts between the engines and the trainer."""

    def ask(self, engines: Engine) -> None:
        """Send the prompts to every engine, without waiting. Rank 0 only."""

    @property
    def tokens(self) -> int:
        """Number of tokens that one engine is asked for."""

    def check(self, engines: Rank0[Engine], version: int, named_tensors: dict[str, torch.Tensor]) -> float:
        """Return the largest difference; raise RunError if it is too large. `named_tensors`: this rank's live tensors. Collective."""


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


class WeightSync:
    """Runs syncs over a plan. Every trainer rank constructs one; all methods are collective."""

    def __init__(
        self,
        plan: SyncPlan,
        engine: Rank0[Engine],
        read_named_tensors: Callable[[], dict[str, torch.Tensor]],
        settings: SyncConfig,
        canary: Canary | None = None,
        notify: Callable[[str], None] = lambda _: None,
        check_loaded: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        """`read_named_tensors` returns this rank's live tensors after the last optimizer step, as
        `mcore.weights.load_weights.collect_named_tensors` does. The first sync calls `check_loaded` with its own. Raises UserError for a
        transport that cannot work on these machines, and RunError for a plan that leaves out a byte of the engines' weights."""
        self.plan, self._engine, self._read_named_tensors, self._settings = plan, engine, read_named_tensors, settings
        self._canary, self._notify, self._check_loaded = canary, notify, check_loaded
        check_transport(settings)
        schedule = Schedule(plan)
        self._transfer, self._proof = WeightTransfer(plan, schedule, engine, settings, notify), ByteProof(plan, schedule, engine)
        self._sizes = schedule.sizes
        self._counts = {
            "blocks": schedule.scales,
            "tensors": sum(size.tensors for size in self._sizes),
            "engine_bytes": sum(size.nbytes for size in self._sizes),
        }
        self._defers_proof = settings.proof == "reread" and not self._transfer.keeps_base and not torch.cuda.is_available()
        self._proof_age: int | None = None  # syncs since the engines' bytes were last reread, or None if they never were

    def close(self) -> None:
        """Close the connection to the engine. The next sync sends and rereads everything."""
        self._transfer.close()
        self._proof_age = None  # the next engine may be another one

    def run(self, version: int, hashing: bool = True, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Move the trainer's weights into the engine as policy version `version`, and prove them before the engine returns completions.
        `meanwhile` is called once the engine samples. `hashing=False` skips the proof, only to measure what it costs. Raise RunError if a
        byte differs or the engine failed; it then returns no completions anymore. Raise EngineLostError if an engine or the connection was
        lost; the same sync may be run again after `close`."""
        start, seconds = time.perf_counter(), defaultdict[str, float](float)
        named_tensors = self._read_named_tensors()
        if self._check_loaded is not None:
            self._check_loaded(named_tensors)
            self._check_loaded = None
        self._transfer.open()
        prove_first = hashing and not self._defers_proof
        self._proof_age = None if self._proof_age is None else self._proof_age + 1
        transferred, wrong_bases = self._transfer.run(named_tensors, version, hashing=prove_first), 0
        with _timed(seconds, "proof"):
            if prove_first:
                transferred, wrong_bases = self._prove_before_serving(named_tensors, version, transferred)
        with _timed(seconds, "served"):  # the engine samples, but holds completions back
            derived, keeps_copies = self._check_derived_tensors() if hashing else (0, False)
            canary = self._canary if hashing else None
            self._engine.run(lambda engine: self._serve(engine, canary, rereading=hashing and not prove_first))
            meanwhile()
        with _timed(seconds, "proof"):
            if hashing and not prove_first:
                self._compare_with_reread(named_tensors, self._proof.hash_chunks(named_tensors))
        with _timed(seconds, "canary"):
            difference = canary.check(self._engine, version, named_tensors) if canary else 0.0
        with _timed(seconds, "served"):
            derived += self._check_copies() if keeps_copies else 0  # they exist once the canary has been computed
        self._transfer.mark_proved(transferred)
        self._engine.run(lambda engine: engine.resume())
        return SyncReport(
            **self._counts,
            bytes=transferred.nbytes,
            wrong_bases=wrong_bases,
            changed_share=transferred.changed_share,
            proof_age=self._proof_age or 0,
            proved=self._counts["tensors"] if hashing else 0,
            proved_bytes=self._counts["engine_bytes"] if hashing else 0,
            seconds=time.perf_counter() - start,
            proof_seconds=seconds["proof"] + transferred.hash_seconds,
            served_seconds=seconds["served"],
            canary_seconds=seconds["canary"],
            derived=derived,
            canary=difference,
        )

    def ask_canary(self, version: int) -> int:
        """Let the engines, which serve `version`, answer the canary once more. Return the number of compared tokens, or 0 without a canary.
        Raise as `run` does. The trainer must hold the weights of `version`."""
        canary = self._canary
        if canary is None:
            return 0
        self._engine.run(canary.ask)
        canary.check(self._engine, version, self._read_named_tensors())
        return canary.tokens

    def prove(self) -> int:
        """Compare all bytes on both sides as they are now, and return the number of engine tensors. Raise RunError as `run` does."""
        self._proof.compare_transfers(self._read_named_tensors())
        return self._counts["tensors"]

    def _prove_before_serving(
        self, named_tensors: dict[str, torch.Tensor], version: int, transferred: Transferred
    ) -> tuple[Transferred, int]:
        """Compare the digests of a transfer. If deltas were sent to an engine with another base, send everything and compare again. Return
        the last transfer, and 1 if the base was wrong."""
        wrong_bases = 0
        try:
            self._proof.compare_digests(named_tensors, transferred.sent, transferred.arrived)
        except RunError as error:
            frozen = self._transfer.find_changed_frozen(transferred.sent)
            if transferred.nbytes == self._transfer.total_bytes or isinstance(error, EngineLostError) or frozen:
                raise
            self._notify(f"an engine did not hold the weights of the last proved sync, so all weights are sent: {error}")
            transferred, wrong_bases = self._transfer.run(named_tensors, version, hashing=True), 1
            self._proof.compare_digests(named_tensors, transferred.sent, transferred.arrived)
        if frozen := self._transfer.find_changed_frozen(transferred.sent):
            raise RunError(f"the sync is not proved: {frozen} has changed in the trainer, although training does not change it")
        if self._settings.proof == "reread" or self._proof_age is None:  # "streamed" rereads once: `end_sync` never changes
            self._engine.run(lambda engine: engine.start_rereading())
            self._compare_with_reread(named_tensors, transferred.sent)
        return transferred, wrong_bases

    def _compare_with_reread(self, named_tensors: dict[str, torch.Tensor], sent: list[str]) -> None:
        """Compare `sent`, digests of this rank's chunks, with those that the engine has computed of its live weights since `end_sync`."""
        self._proof.compare_digests(named_tensors, sent, self._engine.run(lambda engine: engine.finish_rereading(), Roots))
        self._proof_age = 0

    def _check_derived_tensors(self) -> tuple[int, bool]:
        """Return the number of tensors that the engine derived from the weights, and whether it will derive copies when it computes. Raise
        RunError if one of them is stale, or if the chunks of the sync are not all live weights of a rank."""
        reports = self._engine.run(lambda engine: engine.account_for_tensors(), list[ServedReport])
        if len(reports) != len(self._sizes):
            raise RunError(
                f"the sync is not proved: {len(reports)} engine ranks account for their tensors, the plan has {len(self._sizes)}"
            )
        _refuse_wrong(reports)
        for rank, report in enumerate(reports):
            if (report.tensors, report.nbytes) != self._sizes[rank]:
                found, planned = f"{report.tensors} weights of {report.nbytes} bytes", "{} of {}".format(*self._sizes[rank])
                raise RunError(f"the sync is not proved: engine rank {rank} accounts for {found}, the plan for {planned}")
        return sum(report.derived for report in reports), any(report.keeps_copies for report in reports)

    def _check_copies(self) -> int:
        """Return the number of copies of weights that were recomputed. Raise RunError if one of them differs."""
        reports = self._engine.run(lambda engine: engine.check_copies(), list[ServedReport])
        _refuse_wrong(reports)
        return sum(report.derived for report in reports)

    @staticmethod
    def _serve(engine: Engine, canary: Canary | None, rereading: bool) -> None:
        """Let the engine sample. Start rereading before, and ask the canary while the next requests are being made."""
        if rereading:
            engine.start_rereading()
        engine.admit()
        if canary is not None:
            canary.ask(engine)


def _refuse_wrong(reports: list[ServedReport]) -> None:
    """Raise RunError if an engine rank must not serve."""
    for rank, report in enumerate(reports):
        if report.wrong:
            raise RunError(f"the sync is not proved: engine rank {rank}: {report.wrong}")


@dataclass(frozen=True)
class SyncReport:
    """Result of one sync. A sync that is not proved raises an error instead."""

    bytes: int  # bytes sent; with `sync.delta` fewer than the weights have
    blocks: int  # scales moved: one per block or row of a quantized weight
    tensors: int  # engine tensors written, including scales
    engine_bytes: int  # bytes of the engine tensors, padding included
    proved: int  # engine tensors whose bytes had equal digests on both sides
    proved_bytes: int  # bytes of these tensors
    proof_age: int  # syncs since these bytes were last hashed after the engine had ended its own update
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
        sizes = self.tensors, self.proved, self.engine_bytes, self.proved_bytes
        counts = map(float, (self.bytes, self.blocks, *sizes, self.proof_age))
        rest = float(self.derived), self.canary, self.recovery_seconds, float(self.restarts), float(self.wrong_bases)
        metrics = dict(zip(_METRICS, (*counts, self.seconds - sum(proofs), *proofs, *rest), strict=True))
        return metrics if self.changed_share is None else metrics | {_CHANGED_SHARE: self.changed_share}


class RecoveringWeightSync:
    """A `WeightSync` that is repeated after the loss of an engine. Every trainer rank constructs one; all methods are collective."""

    def __init__(self, sync: WeightSync, engines: Rank0[EnginePool], notify: Callable[[str], None]) -> None:
        self._sync, self._engines, self._notify = sync, engines, notify
        self._restarts, self._recovery_seconds = 0, 0.0

    def run(self, version: int, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Run `WeightSync.run`. The report counts the engines lost since the last report. Raise RunError if no restart is left."""
        report = self._sync_with_recovery(version, None, meanwhile)
        report = replace(report, restarts=self._restarts, recovery_seconds=self._recovery_seconds)
        self._restarts, self._recovery_seconds = 0, 0.0
        return report

    def ask_canary(self, version: int) -> int:
        """See `WeightSync.ask_canary`. Engines that are lost meanwhile are replaced."""
        return self.run_with_recovery(version, lambda: self._sync.ask_canary(version))

    def run_with_recovery(self, version: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which every rank calls; repeat it if engines, which hold `version`, are lost meanwhile."""
        while True:
            try:
                return work()
            except EngineLostError as error:
                self._sync_with_recovery(version, error)

    def _sync_with_recovery(self, version: int, loss: EngineLostError | None, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        lost_at: float | None = None
        while True:
            try:
                if loss is not None:
                    check_stop()  # a cluster sends its signal to engines as well
                    hang_watchdog.enter_phase("restarting engines")
                    lost_at = lost_at or time.perf_counter()
                    self._replace_lost(loss)
                report = self._sync.run(version, meanwhile=meanwhile)
            except EngineLostError as error:
                loss = error
                continue
            if lost_at is not None:
                seconds = time.perf_counter() - lost_at
                self._recovery_seconds += seconds
                self._notify(f"engines serve policy version {version} again, proved, {seconds:.1f} s after the loss")
            return report

    def _replace_lost(self, loss: EngineLostError) -> None:
        self._sync.close()
        self._restarts += self._engines.run(lambda engines: engines.wait_for_successors(loss), int)
        self._engines.run(lambda engines: check_live_engine(self._sync.plan, engines))
