"""Finds the first operator, layer, token, and element at which the live trainer and a live engine differ, and the likely cause.

`megatron-rl locate` starts both for it; a run that stops because they differ writes `locate.json` before it ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.config import Config
from megatron_rl.diagnosis.canary import LONGEST, LONGEST_ON_CPU, find_emulated, make_prompts, promises_exactness
from megatron_rl.diagnosis.causes import Finding, describe_stale, diagnose, find_other_precision, find_wrong_bytes
from megatron_rl.diagnosis.graph_check import read_training_graph
from megatron_rl.diagnosis.walk import Element, Walk, read_element, walk
from megatron_rl.distributed import Rank0, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.activation_hooks import ActivationRecorder
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.precision.sketch import name_copy
from megatron_rl.rollout.engine import RecordingEngine
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.types import SamplingParams

DECODED = 4  # tokens of the completion: the first comes from prefill, the others from decoding
LONGEST_PROMPT = 2048
FIRST_TOKENS = 16  # tried until nothing of the prompt is cached
FILE = "locate.json"
Report = dict[str, Any]


class Locator:
    """Walks the policy and each engine of a pool. All methods are collective."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engines: Rank0[EnginePool],
        plan: SyncPlan,
        read_named_tensors: Callable[[], dict[str, torch.Tensor]],
        hf_config: dict[str, Any],
    ) -> None:
        self._config, self._policy, self._engines, self._plan = config, policy, engines, plan
        self._read_named_tensors, self._emulated = read_named_tensors, find_emulated(config, hf_config)
        self._exact = self._emulated is not None or promises_exactness(config, hf_config)
        tokens = min(DECODED, config.longest_sequence // 2)
        self._sampling = SamplingParams(config.rollout.temperature, tokens, config.train.seed)
        self._vocabulary = int(hf_config["vocab_size"])
        longest = min(config.longest_sequence - tokens, LONGEST if torch.cuda.is_available() else LONGEST_ON_CPU)
        self.prompt = make_prompts(1, hf_config["vocab_size"], longest, config.train.seed)[0]

    def run(self, prompt: Sequence[int] = ()) -> Rank0[Report]:
        """Return the report about the first engine that differs, or about the last one. `prompt`: rank 0's tokens to walk instead of random
        ones; those beyond `LONGEST_PROMPT` are not walked. Raise RunError if an engine fails or cannot record."""
        tokens = run_on_rank0(lambda: list(prompt), list[int])[:LONGEST_PROMPT]
        chosen = np.array(tokens, np.int32) if tokens else self.prompt
        count = self._engines.run(lambda pool: len(pool.replicas), int)
        for number in range(count):
            report = self._walk(number, chosen)
            if report.run(lambda report: report["operator"] is not None, bool) or number == count - 1:
                return report
        raise AssertionError("a pool has an engine")

    def _walk(self, number: int, prompt: np.ndarray) -> Rank0[Report]:
        engine = Rank0(lambda: _take(self._engines.value, number))
        found, recorder = self._compare(engine, prompt)
        element = read_element(found, recorder, engine)
        # what was cached hides its computation
        if found.run(lambda walk: walk.uncomputed > 0, bool) and (fresh := self._compare_uncached(engine, prompt)):
            found, element = fresh[0], read_element(*fresh, engine)
        stale = engine.run(lambda engine: engine.find_stale_tensors(), list[dict[str, str]])  # before digests, which drop float copies
        engine.run(lambda engine: engine.stop_recording())
        training = read_training_graph(self._policy.model)
        transfers = [each for each in self._plan.transfers if each.target_rank // self._config.rollout.tp == number]
        wrong = find_wrong_bytes(transfers, self._engines, self._read_named_tensors())

        def report() -> Report:
            rollout = engine.value.read_graph()  # type: ignore[attr-defined]
            other = find_other_precision(training.value, rollout) if self._emulated is None else []
            findings = [*wrong, *describe_stale(stale), *other]
            graphs = training.value, rollout[0]
            return make_report(number, found.value, element, graphs, findings, self._exact)

        return Rank0(report)

    def _compare_uncached(self, engine: Rank0[RecordingEngine], prompt: np.ndarray) -> tuple[Rank0[Walk], ActivationRecorder] | None:
        """Walk the prompt with another first token, with which nothing of it is cached. Return None if nothing differs then, or if each
        token tried began a cached sequence."""
        for _ in range(FIRST_TOKENS):
            first = run_on_rank0(lambda: draw_token(self._vocabulary), int)
            found, recorder = self._compare(engine, np.array([first, *prompt[1:]], np.int32))
            if found.run(lambda walk: walk.uncomputed == 0, bool):
                return (found, recorder) if found.run(lambda walk: walk.first is not None, bool) else None
        return None

    def _compare(self, engine: Rank0[RecordingEngine], prompt: np.ndarray) -> tuple[Rank0[Walk], ActivationRecorder]:
        """Walk once. If only the engine is quantized, the trainer emulates it where it can."""
        with nullcontext() if self._emulated is None else emulate_engine(self._policy.model, self._read_named_tensors(), self._emulated):
            return walk(self._policy, engine, prompt, self._sampling, self._exact)


def draw_token(vocabulary: int) -> int:
    """Return a random token. It is another one each time, because each walk leaves its tokens in the engine's prefix cache."""
    return int(np.random.default_rng().integers(vocabulary))


def _take(pool: EnginePool, number: int) -> RecordingEngine:
    replica = pool.replicas[number]
    if replica.lost is not None:
        raise RunError(f"engine {number} is lost, so it cannot be walked: {replica.lost}")
    if not isinstance(replica.engine, RecordingEngine):
        raise RunError("this engine cannot record what it computes (rollout.engine)")
    return replica.engine


def make_report(
    number: int, walk: Walk, element: Element | None, graphs: tuple[PrecisionGraph, PrecisionGraph], findings: list[Finding], exact: bool
) -> Report:
    """Return the report as plain data. `operator` is None if nothing differs."""
    diagnosis, first = diagnose(walk, element, graphs[0], findings), walk.first
    details = [{node.name: node.detail for node in graph.nodes} for graph in graphs]
    report: Report = {
        "operator": diagnosis and diagnosis.operator,
        "cause": diagnosis and diagnosis.cause,
        "why": diagnosis and diagnosis.text,
        "also": diagnosis.others if diagnosis else [],
        "kernels": [detail.get(diagnosis.operator, "") for detail in details] if diagnosis else [],
        "first": None,
        "engine": number,
        "bitwise": exact,
        "prompt_tokens": walk.prompt_tokens,
        "ids": walk.ids,
        "from_prefix_cache": walk.uncomputed,
        "not_compared": walk.left_out,
        "operators": {name_copy(each.op, each.rank): _describe(each) for each in walk.compared},
    }
    if first is not None:
        token = first.differing[0]
        phase = "prefill" if token < walk.prompt_tokens else "decoding"
        report["first"] = {
            "result": first.op,
            "engine_rank": first.rank,
            "token": token,
            "id": walk.ids[token],
            "phase": phase,
            "dtypes": first.dtypes,
            "element": element and asdict(element),
        }
    return report


def _describe(each: Any) -> dict[str, Any]:
    return {"tokens": len(each.tokens), "differing": len(each.differing), "distance": each.distance, "floor": each.floor}


def describe(report: Report) -> list[str]:
    """Return the report as lines of text."""
    compared, tokens = report["operators"], len(report["ids"]) - 1
    scope = f"{len(compared)} results of {report['prompt_tokens']} prompt tokens and {tokens - report['prompt_tokens'] + 1} decoded tokens"
    how = "bit by bit" if report["bitwise"] else "against the noise of rounding, because this layout does not promise equal bits"
    if report["operator"] is None:
        return [f"No operator differs: {scope} were compared {how}, and every weight and derived tensor."]
    lines = [f"{report['operator']} is the first operator that differs (engine {report['engine']}; {scope}, {how})."]
    if first := report["first"]:
        where = f"token {first['token']} ({first['phase']}, id {first['id']})"
        where += f" on engine rank {first['engine_rank']}" if first["engine_rank"] else ""
        lines.append(f"First different result: {first['result']}, {where}" + _describe_element(first, report["kernels"]))
    return [*lines, f"Likely cause: {report['cause']}: {report['why']}.", *(f"Also: {text}." for text in report["also"])]


def _describe_element(first: dict[str, Any], kernels: list[str]) -> str:
    sides = [f"{dtype} of {kernel or 'no module'}" for dtype, kernel in zip(first["dtypes"], kernels, strict=True)]
    if (element := first["element"]) is None:
        return f": {sides[0]} in the trainer, {sides[1]} in the engine."
    return (
        f", column {element['column']}: {element['trainer']:.9g} ({sides[0]}) in the trainer, {element['engine']:.9g} ({sides[1]}) in the "
        f"engine; {element['differing']} of {element['columns']} columns differ, by at most {element['largest']:.3g} "
        f"({element['ulps']:.3g} units in the last place)."
    )


def write_report(report: Rank0[Report], file: Path) -> list[str]:
    """Write the report as JSON, and return its lines. Collective."""

    def write(report: Report) -> list[str]:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return describe(report)

    return report.run(write, list[str])


def try_to_locate(locator: Locator, prompts: Sequence[Sequence[int]], folder: Path, notify: Callable[[str], None]) -> None:
    """Walk prompts until trainer and engine differ, and write `FILE` into the folder of a run that stops because they do. An empty prompt
    stands for the locator's own. An error here is only noted, so it never hides the run's own error. Collective."""
    try:
        for prompt in prompts:
            report = locator.run(prompt)
            lines = write_report(report, folder / FILE)
            if report.run(lambda report: report["operator"] is not None, bool):
                break
        for line in lines:
            notify(line)
    except Exception as failure:
        notify(f"the difference was not located: {failure}")
