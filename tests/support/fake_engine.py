"""Engines without SGLang, which start in seconds: a process with the same HTTP face around the project's own code for an engine's weights.

The trainer's side is the real one (client, restarts, sync, transports, proof), over random tensors instead of a model. An answer's tokens
are a function of seed, position and every byte of the weights, so wrong weights do not go unseen. `python -m support.fake_engine` is the
engine; the functions below `--- the trainer's side` run in the ranks of a `World`.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import zlib
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bench_sync import MODELS, EngineModel, contract, make_empty_tensors, make_random_tensors

from megatron_rl.config import Config
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import is_rank0, run_on_rank0
from megatron_rl.rollout.engine_placement import EnginePlacement
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.sglang_shards import build_engine_shards
from rollout_sglang import rank_handler
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import _free_port
from rollout_sglang.process import API_KEY_VARIABLE, EngineProcess
from rollout_sglang.server import die_with_parent
from support.engine_faults import Faults, family_of, strike_while
from support.engine_faults import sync_through as strike_in_sync

MODEL = MODELS["tiny"]
_TOKEN_SECONDS = 0.02


class LightEngine:
    """What a scheduler process holds and does."""

    def __init__(self) -> None:
        self.version = "0"
        self.model = EngineModel(make_empty_tensors(build_engine_shards(MODEL, 1)[0], contract(True)))
        placement = {"tp_rank": 0, "tp_size": 1}
        self._checker = SimpleNamespace(_placement=placement, _get_model=lambda: self.model)
        self._one_at_a_time = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/generate":
            return self.generate(body["input_ids"], body["sampling_params"])
        if path == "/weights_checker":
            with self._one_at_a_time:
                return {"ranks": [self.rank(json.loads(body["action"].removeprefix(rank_handler.PREFIX)), body["action"])]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {}

    def rank(self, request: dict[str, Any], action: str) -> dict[str, Any]:
        answer = rank_handler.handle(lambda *_: None, self._checker, action)
        formats = {"checksums": {"layer": "pow2"}} if request["verb"] == "scale_formats" else {}
        return {**answer, **formats, "parallelism_info": [answer["parallelism_info"]]}

    def generate(self, prompts: list[list[int]], parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
        version, held = self.version, rank_handler.live_tensors(self.model)
        weights = sum(zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()) for tensor in held.values())
        threading.Event().wait(_TOKEN_SECONDS * parameters[0]["max_new_tokens"])
        return [
            {
                "meta_info": {
                    "finish_reason": {"type": "length"},
                    "weight_version": version,
                    "output_token_logprobs": [
                        (-1.0, (weights ^ (one["sampling_seed"] * 7919 + place * 104729)) % 251) for place in range(one["max_new_tokens"])
                    ],
                }
            }
            for one in parameters
        ]


def serve(host: str, port: int) -> None:
    engine, key = LightEngine(), os.environ.pop(API_KEY_VARIABLE)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.say(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
            if self.headers["Authorization"] != f"Bearer {key}":
                return self.say(401, {})
            return self.say(200, engine.answer(self.path, body))

        def say(self, status: int, answer: Any) -> None:
            told = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer((host, port), Handler).serve_forever()


# --- the trainer's side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LightStart:
    """In place of `rollout_sglang.launch_args.EngineLaunchSpec`."""

    config: Config
    folder: Path
    number: int

    def start_process(self) -> tuple[EngineProcess, str, str]:
        port, key = _free_port(EnginePlacement()), secrets.token_hex(24)
        environment = {API_KEY_VARIABLE: key, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        log = self.folder / f"engine{self.number}.log"
        return EngineProcess(["127.0.0.1", str(port)], environment, log, "support.fake_engine"), f"http://127.0.0.1:{port}", key


@dataclass
class Run:
    engines: EnginePool | None
    recovering_sync: RecoveringWeightSync
    said: list[str]
    named_tensors: dict[str, torch.Tensor]
    shards: Any


_now: list[Run] = []


def start(folder: Path, engines: int, sync: dict[str, Any], health_timeout: float) -> None:
    """Trainer ranks (as many as the world has, tensor parallel), and engines below rank 0, synced as version 1."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout, said = Layout(tp=dist.get_world_size()), list[str]()
    settings = SyncConfig.model_validate({"bucket_mb": 1, "timeout": 60.0, **sync}, strict=False)
    config = Config.model_validate({"model": {"path": folder}, "rollout": {"engines": engines, "health_timeout": health_timeout}})
    several = EnginePool(config, lambda number: SGLangEngine(LightStart(config, folder, number)), said.append) if is_rank0() else None
    plan = SyncPlan.make(MODEL, layout, (1, 1), contract(True), settings.chunk_bytes, engines)
    shards = build_trainer_shards(MODEL, layout, quantized=True)[dist.get_rank()]
    run = Run(several, None, said, make_random_tensors(shards, True, 0), shards)
    weights = WeightSync(plan, several, lambda: run.named_tensors, settings)
    run.recovering_sync = RecoveringWeightSync(weights, several, said.append)
    _now[:] = [run]
    run.recovering_sync.run(1)


def change(seed: int) -> None:
    """Other weights, as after an optimizer step."""
    _now[0].named_tensors = make_random_tensors(_now[0].shards, True, seed)


def sync_through(version: int, faults: Faults) -> dict[str, Any]:
    return strike_in_sync(_now[0].engines, _now[0].recovering_sync, version, faults)


def always_lose(version: int) -> None:
    """A sync that kills engine 0 as often as it is begun. Raises what it raises."""
    run = _now[0]
    begin = EnginePool.start_receiving

    def begin_and_kill(engines: EnginePool, hashing: bool) -> None:
        begin(engines, hashing)
        family_of(engines, 0)[0].kill()

    EnginePool.start_receiving = begin_and_kill
    try:
        run.recovering_sync.run(version)
    finally:
        EnginePool.start_receiving = begin


def answers(count: int, tokens: int, alone: int | None = None) -> Any:
    """(tokens, policy version) of so many completions, of all engines or one of them; the same on every rank."""
    return run_on_rank0(lambda: _answers(count, tokens, alone))


def _answers(count: int, tokens: int, alone: int | None = None) -> list[tuple[list[int], int]]:
    engines = _now[0].engines
    asked = engines if alone is None else engines._replicas[alone].engine
    found = asked.generate([[1]] * count, [SamplingParams(1.0, tokens, seed) for seed in range(count)])
    return [(one.output_ids_T, one.policy_version) for one in found]


def answers_through(version: int, faults: Faults, count: int, tokens: int) -> Any:
    """`answers` with faults; see `support.engine_faults.strike_while`. On other ranks than 0 the result alone."""
    run = _now[0]
    if run.engines is None:
        return run.recovering_sync.run_with_recovery(version, lambda: None)
    return strike_while(lambda: _answers(count, tokens), run.engines, run.recovering_sync, version, faults)


def said() -> list[str]:
    """What the user was told since the last time."""
    lines, _now[0].said[:] = list(_now[0].said), []
    return lines


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(sys.argv[3], int(sys.argv[4]))
