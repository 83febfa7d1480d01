"""A trainer with several real engines below it, and what may go wrong with them; run as the one rank of a `World`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.rollout.engine_pool import EnginePool, start_engines
from megatron_rl.sync.engine_check import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.model_geometry import ModelGeometry
from support.engine_faults import Faults, family_of, strike_while
from support.engine_faults import sync_through as strike_in_sync
from support.trainer_engine import Served

_BUCKET = 64 << 10
Said = tuple[list[int], list[float], int]
"""Tokens, log-probs and policy version of one completion."""


class Several(Served):
    """See `Served`; `engine` is an `EnginePool`."""

    engines: EnginePool
    recovering_sync: RecoveringWeightSync
    said: list[str]

    def bring_up(self, count: int, health_timeout: float) -> None:
        rollout = {"engines": count, "health_timeout": health_timeout, "start_timeout": 500.0}
        self.config = Config.model_validate({**self.config.model_dump(), "rollout": {**self.config.rollout.model_dump(), **rollout}})
        self.said = []
        self.engines = start_engines(self.config, self.save(self.folder / "engine_model"), self.folder, self.said.append)
        contract, geometry = self.trainer.contract, ModelGeometry.from_hf_config(self.trainer.hf_config)
        plan = SyncPlan.make(geometry, self.trainer.layout, (1, 1), contract, _BUCKET, count)
        sync = WeightSync(plan, self.engines, self.trainer.collect_named_tensors, SyncConfig(timeout=60.0))
        check_live_engine(plan, self.engines)
        self.engines.read_graph()
        sync.prove()
        self.recovering_sync = RecoveringWeightSync(sync, self.engines, self.said.append)


_now: list[Several] = []


def start(checkpoint: Path, folder: Path, precision: dict[str, Any], count: int, health_timeout: float) -> None:
    """Brings up trainer and engines."""
    several = Several(checkpoint, folder, precision)
    several.bring_up(count, health_timeout)
    _now[:] = [several]


def train(batch: list[TrainingSample]) -> None:
    """One optimizer step."""
    _now[0].trainer.actor.update(batch, PolicyLoss(AlgorithmConfig()))


def sync(version: int) -> dict[str, Any]:
    return asdict(_now[0].recovering_sync.run(version))


def said() -> list[str]:
    """What was told the user since the last time."""
    lines, _now[0].said[:] = list(_now[0].said), []
    return lines


def generate(prompts: list[list[int]], tokens: int, alone: int | None = None) -> list[Said]:
    """All prompts, each with a seed of its own, to all engines or to one of them."""
    samplings = [SamplingParams(1.0, tokens, seed) for seed in range(len(prompts))]
    engines = _now[0].engines
    asked = engines if alone is None else engines._replicas[alone].engine
    return [(one.output_ids_T, one.logprobs_T, one.policy_version) for one in asked.generate(prompts, samplings)]


def generate_through(faults: Faults, version: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """`generate` with faults; see `support.engine_faults.strike_while`."""
    several = _now[0]
    return strike_while(lambda: generate(prompts, tokens), several.engines, several.recovering_sync, version, faults)


def sync_through(faults: Faults, version: int) -> dict[str, Any]:
    """`sync` with faults; see `support.engine_faults.sync_through`."""
    return strike_in_sync(_now[0].engines, _now[0].recovering_sync, version, faults)


def without_key() -> dict[str, list[int]]:
    """Every endpoint that an engine is asked at, and some that nobody asks at: its answers without a key, and with a wrong one."""
    engine = _now[0].engines._replicas[0].engine
    wrong = {"Authorization": f"Bearer {'0' * 48}"}
    found = {}
    for path in ENDPOINTS:
        answers = [httpx.post(engine._http.base_url.join(path), json={}, headers=headers) for headers in ({}, wrong)]
        found[path] = [answer.status_code for answer in answers]
    return found


ENDPOINTS = (
    "/generate", "/weights_checker", "/abort_request", "/flush_cache", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version", "/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter", "/server_info",
)  # fmt: skip


def exposed() -> dict[str, Any]:
    """Addresses that the engines' processes listen on, modes of their Unix sockets, and where a key may be read."""
    addresses, modes, readable = set(), set(), []
    for place in _now[0].engines._replicas:
        key = place.engine._http.headers["authorization"].removeprefix("Bearer ")
        assert len(key) == 48
        for process in family_of(_now[0].engines, place.number):
            if any(key in word for word in process.cmdline()):
                readable.append(f"command line of {process.pid}")
            addresses |= {entry.laddr.ip for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
            for entry in process.net_connections("unix"):
                if entry.laddr and Path(entry.laddr).exists():
                    modes.add(Path(entry.laddr).stat().st_mode & 0o077)
        readable += [str(file) for file in _now[0].folder.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    return {"addresses": addresses, "modes": modes, "readable": readable}
