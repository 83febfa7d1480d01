"""Walks trainer and engine through one sequence, and finds the first operator whose results differ.

The engine completes the prompt; the trainer computes the same tokens. Both record sketches of every operator's result
(`megatron_rl.precision.sketch`), which are compared in the order of computation, so all that was computed before the first difference is
equal. Only then are the values of that operator for that token transferred. Between layouts that do not promise equal bits, a difference
counts if it is `NOISE_MARGIN` times as large as what rounding does: the trainer repeats the pass with each result moved by up to one unit
in the last place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import Rank0, gather_bytes, gather_from_ranks, is_rank0
from megatron_rl.mcore.activation_hooks import ActivationRecorder, record_activations
from megatron_rl.mcore.actor import Policy
from megatron_rl.precision.sketch import (
    RecordedTensor,
    Recording,
    Sketch,
    Values,
    add_recordings,
    name_copy,
    pack_recording,
    unpack_recording,
)
from megatron_rl.rollout.engine import RecordingEngine
from megatron_rl.types import SamplingParams

NOISE_MARGIN = 3.0
LOGPROBS = "logprobs"
_MANTISSA = {"bf16": 8, "fp16": 11, "fp32": 24}


@dataclass(frozen=True)
class Compared:
    """One operator's results for the tokens that both sides recorded."""

    op: str
    dtypes: tuple[str, str]  # of trainer and engine
    tokens: list[int]  # positions that both recorded
    differing: list[int]  # those of them that differ
    distance: float  # largest |trainer - engine| / |trainer| over tokens, estimated
    floor: float  # the same for the trainer with noise; 0 where equal bits are promised
    rank: int = 0  # of the engine, if it has a copy of rank 0's result that differs


@dataclass(frozen=True)
class Walk:
    """What a walk through one sequence found."""

    ids: list[int]
    prompt_tokens: int
    compared: list[Compared]
    left_out: list[str]  # operators that one side did not record, or with another width
    uncomputed: int  # tokens of the prompt that the engine took from its prefix cache

    @property
    def first(self) -> Compared | None:
        return next((each for each in self.compared if each.differing), None)


def ask_engine(engine: RecordingEngine, prompt: np.ndarray, sampling: SamplingParams) -> tuple[list[int], list[float], Recording]:
    """Let the engine complete a prompt while it records. Return the sequence's tokens, the log-probs of the completion, and the recording.
    The engine keeps on recording, so that values can be read."""
    engine.start_recording()
    ((generation,),) = engine.answer_canary([prompt], sampling)  # type: ignore[attr-defined]
    ids = [*prompt.tolist(), *generation.output_ids_T.tolist()]
    return ids, generation.logprobs_T.tolist(), engine.read_recording(ids, len(prompt))


def record_trainer(policy: Policy, ids: Sequence[int], prompt_tokens: int, noise: bool = False) -> tuple[Recording, ActivationRecorder]:
    """Return the whole trainer's recording of a sequence, and this rank's recorder. Every replica computes it. Collective."""
    sample = TrainingSample(torch.tensor(ids[:prompt_tokens]), torch.tensor(ids[prompt_tokens:]))
    with record_activations(policy, noise) as recorder:
        (logprobs,), _ = policy.compute_logprobs([sample])
    parts = gather_bytes(pack_recording(recorder.rows.select(torch.arange(len(ids) - 1))))
    recording = add_recordings([unpack_recording(part) for part in parts])
    recording = dict(sorted(recording.items(), key=lambda item: _stage(item[0])))  # stable: within a layer in the order of computation
    return recording | {LOGPROBS: _sketch_logprobs(logprobs.tolist(), len(ids))}, recorder


def _stage(op: str) -> float:
    return int(op.split(".")[1]) if op.startswith("layers.") else -1.0 if op == "embedding" else float("inf")


def _sketch_logprobs(logprobs: Sequence[float], length: int) -> RecordedTensor:
    sketch, own = Sketch.zeros(length - 1), Sketch.of(torch.tensor(logprobs)[:, None], torch.zeros(1, dtype=torch.long))
    for whole, part in zip(sketch, own, strict=True):
        whole[-len(logprobs) :] = part
    return RecordedTensor("fp32", sketch)


def compare(trainer: Recording, engine: Recording, noisy: Recording | None) -> tuple[list[Compared], list[str]]:
    """Return the operators that both recorded in the trainer's order, and the names of the others. `noisy`: the trainer's recording with
    noise, or None to compare bits."""
    copies = defaultdict[str, list[tuple[int, RecordedTensor]]](list)
    for name, tensor in engine.items():
        op, _, rank = name.partition("@")
        copies[op].append((int(rank or 0), tensor))
    compared, left_out = list[Compared](), [op for op in copies if op not in trainer]
    for op, own in trainer.items():
        results = [_compare_tensor(op, own, other, None if noisy is None else noisy[op], rank) for rank, other in copies[op]]
        whole = [result for result in results if result is not None]
        compared += [result for result in whole if result.rank == 0 or result.differing]
        left_out += [] if whole else [op]
    return compared, left_out


def _compare_tensor(op: str, own: RecordedTensor, other: RecordedTensor, noisy: RecordedTensor | None, rank: int) -> Compared | None:
    """Return None if no token was recorded on both sides with the same number of columns."""
    (digests, counts), (other_digests, other_counts) = (tensor.sketch.exact.unbind(1) for tensor in (own, other))
    both = (counts > 0) & (counts == other_counts)
    if not both.any():
        return None
    distances = measure_distances(own.sketch, other.sketch)
    floor = 0.0 if noisy is None else float(measure_distances(own.sketch, noisy.sketch)[both].max())
    differs = digests != other_digests if noisy is None else ~(distances <= NOISE_MARGIN * floor)
    tokens, differing = (each.nonzero().flatten().tolist() for each in (both, both & differs))
    return Compared(op, (own.dtype, other.dtype), tokens, differing, float(distances[both].max()), floor, rank)


def measure_distances(one: Sketch, other: Sketch) -> torch.Tensor:
    """Return estimates of |x - y| / |x| per token."""
    squared = (one.moments[:, 1:] - other.moments[:, 1:]).square().mean(-1)
    return (squared / one.moments[:, 0].clamp_min(1e-60)).sqrt()


def walk(
    policy: Policy, engine: Rank0[RecordingEngine], prompt: np.ndarray, sampling: SamplingParams, exact: bool
) -> tuple[Rank0[Walk], ActivationRecorder]:
    """Walk both sides through one prompt and its completion. Collective."""
    asked = Rank0(lambda: ask_engine(engine.value, prompt, sampling))
    ids = asked.run(lambda asked: asked[0], list[int])
    own, recorder = record_trainer(policy, ids, len(prompt))
    noisy = None if exact else record_trainer(policy, ids, len(prompt), noise=True)[0]

    def finish() -> Walk:
        _, logprobs, recording = asked.value
        other = recording | {LOGPROBS: _sketch_logprobs(logprobs, len(ids))}
        compared, left_out = compare(own, other, noisy)
        counts = recording["embedding"].sketch.exact[: len(prompt), 1] if "embedding" in recording else torch.empty(0)
        uncomputed = int((counts == 0).sum())
        return Walk(ids, len(prompt), compared, left_out, uncomputed)

    return Rank0(finish), recorder


@dataclass(frozen=True)
class Element:
    """How a token's values differ."""

    columns: int  # of the whole tensor
    differing: int
    column: int  # the first that differs
    trainer: float
    engine: float
    largest: float  # largest difference of a column
    ulps: float  # the same in units in the last place of the row's largest magnitude, in the coarser dtype


def read_element(found: Rank0[Walk], recorder: ActivationRecorder, engine: Rank0[RecordingEngine]) -> Element | None:
    """Return the first element that differs on rank 0; None if a side did not keep the values. Collective."""
    place = found.run(lambda walk: None if walk.first is None else (walk.first.op, walk.first.differing[0]), tuple[str, int] | None)
    if place is None or place[0] == LOGPROBS:
        return None
    parts = gather_from_ranks(recorder.rows.get_values(*place), Values)
    if not is_rank0():
        return None
    first = found.value.first
    assert first is not None
    own, other = _join(parts), _join(engine.value.read_recorded_values(name_copy(first.op, first.rank), place[1]))
    columns = sorted(own.keys() & other.keys())
    differing = [column for column in columns if own[column] != other[column]]
    if not differing:
        return None
    largest = max(abs(own[column] - other[column]) for column in differing)
    digits = min(_MANTISSA.get(dtype, 24) for dtype in first.dtypes)
    unit = max(abs(value) for value in own.values()) * 2.0 ** (1 - digits)
    return Element(len(columns), len(differing), differing[0], own[differing[0]], other[differing[0]], largest, largest / max(unit, 1e-300))


def _join(parts: Sequence[Values]) -> dict[int, float]:
    return {column: value for part in parts for column, value in zip(part.columns, part.values, strict=True)}
