"""Weight sync: the trainer's weights reach the live engine byte for byte, and every sync proves that they did.

A sync goes through the phases of `Phase`. Every chunk is hashed on both sides: in the trainer's live tensors, and in the engine's tensors
after they were written. The engine recomputes every tensor that it derived from the weights (`rollout_sglang.derived_tensors`) and answers
a canary (`megatron_rl.training.canary`). On CPUs the engine already samples while weights are hashed and the canary is checked, but it
returns no completion before both have passed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.proof import ByteProof
from megatron_rl.sync.report import SyncReport
from megatron_rl.sync.transfer import Transferred, WeightTransfer


class Canary(Protocol):
    """Compares log-probs of a few fixed prompts between the engines and the trainer."""

    def ask(self, engines: Engine) -> None:
        """Send the prompts to every engine, without waiting. Rank 0 only."""

    def check(self, engines: Rank0[Engine], version: int, named_tensors: dict[str, torch.Tensor]) -> float:
        """Return the largest difference; raise RunError if it is too large. `named_tensors`: this rank's live tensors. Collective."""


class Phase(Enum):
    """The phases of a sync, in order. A deferred proof is a second PROVE phase between SERVE and CANARY."""

    PREPARE = auto()  # read the trainer's live tensors and connect to the engine
    TRANSFER = auto()  # write them into the engine's live tensors
    PROVE = auto()  # compare the digests of both sides
    SERVE = auto()  # check the engine's derived tensors, then let the engine sample while it holds completions back
    CANARY = auto()  # compare log-probs of a few prompts
    COMMIT = auto()  # let the engine return completions


class PhaseClock:
    """Adds up the seconds spent in each phase."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = defaultdict(float)
        self._phase, self._start = Phase.PREPARE, time.perf_counter()

    def enter(self, phase: Phase) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._start
        self._phase, self._start = phase, now

    def stop(self) -> Mapping[Phase, float]:
        self.enter(self._phase)
        return self._seconds


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
    ) -> None:
        """`read_named_tensors` returns this rank's live tensors after the last optimizer step, as
        `mcore.weights.load_weights.collect_named_tensors` does. Raises UserError for a transport that cannot work on these machines."""
        self.plan, self._engine, self._read_named_tensors, self._settings = plan, engine, read_named_tensors, settings
        self._canary, self._notify = canary, notify
        self._transfer, self._proof = WeightTransfer(plan, engine, settings, notify), ByteProof(plan, engine)
        self._counts = {
            "blocks": sum(transfer.target_rect.rows * transfer.target_rect.cols for transfer in plan.transfers if transfer.of_scales),
            "tensors": len({(transfer.target_rank, transfer.target) for transfer in plan.transfers}),
        }
        self._defers_proof = settings.proof == "reread" and not self._transfer.keeps_base and not torch.cuda.is_available()
        self._has_reread = False

    def close(self) -> None:
        """Close the connection to the engine. The next sync sends everything."""
        self._transfer.close()

    def run(self, version: int, hashing: bool = True, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Move the trainer's weights into the engine as policy version `version`, and prove them before the engine returns completions.

        Args:
            hashing: False skips the proof, only to measure what it costs.
            meanwhile: called once the engine samples, to give it work during a deferred proof.

        Raises:
            RunError: a byte differs (the message names parameter, rank and first block) or the engine failed. The engine then returns no
                completions anymore.
            EngineLostError: an engine or the connection was lost. The same sync may be run again after `close`.
        """
        clock = PhaseClock()
        named_tensors = self._read_named_tensors()
        self._transfer.open()

        clock.enter(Phase.TRANSFER)
        prove_first = hashing and not self._defers_proof
        transferred, wrong_bases = self._transfer.run(named_tensors, version, hashing=prove_first), 0

        clock.enter(Phase.PROVE)
        if prove_first:
            transferred, wrong_bases = self._prove_before_serving(named_tensors, version, transferred)

        clock.enter(Phase.SERVE)
        derived = self._check_derived_tensors() if hashing else 0
        canary = self._canary if hashing else None
        self._engine.run(lambda engine: self._serve(engine, canary, rereading=hashing and not prove_first))
        meanwhile()

        clock.enter(Phase.PROVE)
        if hashing and not prove_first:
            self._compare_with_reread(named_tensors, self._proof.hash_chunks(named_tensors))

        clock.enter(Phase.CANARY)
        difference = canary.check(self._engine, version, named_tensors) if canary else 0.0

        clock.enter(Phase.COMMIT)
        self._transfer.mark_proved(transferred)
        self._engine.run(lambda engine: engine.resume())
        seconds = clock.stop()
        return SyncReport(
            **self._counts,
            bytes=transferred.nbytes,
            wrong_bases=wrong_bases,
            changed_share=transferred.changed_share,
            proved=self._counts["tensors"] if hashing else 0,
            seconds=sum(seconds.values()),
            proof_seconds=seconds[Phase.PROVE] + transferred.hash_seconds,
            served_seconds=seconds[Phase.SERVE],
            canary_seconds=seconds[Phase.CANARY],
            derived=derived,
            canary=difference,
        )

    def prove(self) -> int:
        """Compare all bytes on both sides as they are now, and return the number of engine tensors. Raise RunError as `run` does."""
        self._proof.compare_transfers(self._read_named_tensors())
        return self._counts["tensors"]

    def _prove_before_serving(
        self, named_tensors: dict[str, torch.Tensor], version: int, transferred: Transferred
    ) -> tuple[Transferred, int]:
        """Compare the digests of a transfer. If deltas were sent to an engine with another base, send everything and compare again.

        Returns the last transfer, and 1 if the base was wrong, else 0.
        """
        wrong_bases = 0
        try:
            self._proof.compare_digests(named_tensors, transferred.sent, transferred.arrived)
        except RunError as error:
            if transferred.nbytes == self._transfer.total_bytes or isinstance(error, EngineLostError):
                raise
            self._notify(f"an engine did not hold the weights of the last proved sync, so all weights are sent: {error}")
            transferred, wrong_bases = self._transfer.run(named_tensors, version, hashing=True), 1
            self._proof.compare_digests(named_tensors, transferred.sent, transferred.arrived)
        if self._settings.proof == "reread" or not self._has_reread:  # "streamed" rereads once: `end_sync` never changes
            self._engine.run(lambda engine: engine.start_rereading())
            self._compare_with_reread(named_tensors, transferred.sent)
        return transferred, wrong_bases

    def _compare_with_reread(self, named_tensors: dict[str, torch.Tensor], sent: dict[int, str]) -> None:
        """Compare `sent` with the digests that the engine has computed of its live weights since `end_sync`."""
        self._proof.compare_digests(named_tensors, sent, self._engine.run(lambda engine: engine.finish_rereading()))
        self._has_reread = True

    def _check_derived_tensors(self) -> int:
        """Return the number of tensors that the engine derived from the weights. Raise RunError if one of them is stale."""
        reports = self._engine.run(lambda engine: engine.account_for_tensors())
        for rank, report in enumerate(reports):
            if report.wrong:
                raise RunError(f"the sync is not proved: engine rank {rank}: {report.wrong}")
        return sum(report.derived for report in reports)

    @staticmethod
    def _serve(engine: Engine, canary: Canary | None, rereading: bool) -> None:
        """Let the engine sample. Start rereading before, and ask the canary while the next requests are being made."""
        if rereading:
            engine.start_rereading()
        engine.admit()
        if canary is not None:
            canary.ask(engine)
