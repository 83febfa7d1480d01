"""Engines without SGLang, which start in seconds: a process with SGLang's HTTP interface around this project's own code for weights.

The trainer's side is the real one (client, restarts, sync, transports, proof), with random tensors instead of a model. The tokens of a
response are a function of seed, position and every byte of the weights, so wrong weights are noticed. `python -m support.fake_engine` is
the engine; the functions below `--- the trainer's side` run in the ranks of a `World`.
"""

import json
import os
import secrets
import sys
import threading
import zlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0, run_on_rank0
from megatron_rl.distributed.launch_store import join_ranks
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import RecoveringWeightSync, WeightSync
from megatron_rl.types import SamplingParams
from megatron_rl.workers.process import die_with_parent
from parallel.attention import SoftmaxAttention
from parallel.formats import FP8
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_engine_shards
from parallel.transport.process_group import register_shared_gloo
from rollout_sglang import rank_handler
from rollout_sglang.answers import MEDIA_TYPE, pack_answers
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import LaunchedServer
from rollout_sglang.process import API_KEY_VARIABLE, EngineProcess, EngineProcesses
from support.engine_faults import strike_at_call, strike_while
from support.engine_faults import sync_through as strike_in_sync
from support.processes import free_port

MODEL = ModelGeometry("qwen3", (SoftmaxAttention(8, 4, 128, qk_norm=True),) * 4, hidden=512, ffn=1536, vocab=4096, tied=True)
CONTRACT = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified"))
_TOKEN_SECONDS = 0.02
_ANSWERS = list[tuple[list[int], int]]


def make_random_tensors(shards, seed):
    """Return BF16 tensors, and FP8 weights with scales for the quantized roles."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for shard in shards:
        value = torch.empty(shard.shape, dtype=torch.bfloat16).normal_(generator=generator)
        if CONTRACT.format_of(shard.role).quantized:
            tensors[shard.name], tensors[FP8.scale_name(shard.name)] = quantize_weight(value, "pow2")
        else:
            tensors[shard.name] = value
    return tensors


class TensorsAsModel(torch.nn.Module):
    """A module whose parameters have SGLang's names, which contain dots."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *_, **__):
        return iter(self.tensors.items())


class LightEngine:
    """The state and the requests of a scheduler process."""

    def __init__(self):
        self.version = "0"
        self.model = TensorsAsModel(make_random_tensors(build_engine_shards(MODEL, 1)[0], seed=0))
        checker = SimpleNamespace(_placement={"tp_rank": 0, "tp_size": 1})
        cache = SimpleNamespace(size=8, available_size=lambda: 8)
        pool = SimpleNamespace(k_buffer=[torch.zeros(8)])
        self._runner = SimpleNamespace(
            model=self.model, _weight_checker=checker, token_to_kv_pool_allocator=cache, token_to_kv_pool=pool, req_to_token_pool=None
        )
        self._one_at_a_time = threading.Lock()

    def answer(self, path, body):
        if path == "/generate":
            return self.generate(body["input_ids"], body["sampling_params"])
        if path == "/weights_checker":
            with self._one_at_a_time:
                return {"ranks": [self.rank(json.loads(body["action"].removeprefix(rank_handler.PREFIX)), body["action"])]}
        if path == "/flip":
            next(iter(self.model.tensors.values())).data.view(torch.uint8).view(-1)[-1] ^= 1
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {}

    def rank(self, request, action):
        answer = rank_handler.handle(lambda *_: None, self._runner, action)
        formats = {"checksums": {"layer": "fp8 pow2"}} if request["verb"] == "activation_formats" else {}
        return {**answer, **formats, "parallelism_info": [answer["parallelism_info"]]}

    def generate(self, prompts, parameters):
        version, tensors = self.version, rank_handler.live_tensors(self.model)
        weights = sum(zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()) for tensor in tensors.values())
        threading.Event().wait(_TOKEN_SECONDS * parameters[0]["max_new_tokens"])

        def draw(request):
            ids = (weights ^ (request["sampling_seed"] * 7919 + position * 104729) for position in range(request["max_new_tokens"]))
            return [(-1.0, number % 251) for number in ids]

        about = {"finish_reason": {"type": "length"}, "weight_version": version, "cached_tokens": 0}
        return pack_answers([{"meta_info": {**about, "output_token_logprobs": draw(request)}} for request in parameters])


def serve(host, port):
    engine, key = LightEngine(), os.environ.pop(API_KEY_VARIABLE)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.respond(200, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
            if self.headers["Authorization"] != f"Bearer {key}":
                return self.respond(401, {})
            return self.respond(200, engine.answer(self.path, body))

        def respond(self, status, answer):
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", MEDIA_TYPE if isinstance(answer, bytes) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    ThreadingHTTPServer((host, port), Handler).serve_forever()


# --- the trainer's side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LightStart:
    """A replacement for `rollout_sglang.launch_args.EngineLaunchSpec`."""

    config: Config
    folder: Path
    number: int
    empty: bool = True

    def start_process(self):
        port, key = free_port(), secrets.token_hex(24)
        environment = {API_KEY_VARIABLE: key, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        log = self.folder / f"engine{self.number}.log"
        process = EngineProcesses([EngineProcess(["127.0.0.1", str(port)], environment, log, "support.fake_engine")])
        return LaunchedServer(process, f"http://127.0.0.1:{port}", key)


_run = SimpleNamespace()
"""What `start` has created in this process."""


def start(folder, engines, sync, health_timeout):
    """Start tensor-parallel trainer ranks, as many as the world has, and engines below rank 0, synced as version 1."""
    torch.set_num_threads(1)
    join_ranks(register_shared_gloo(), timedelta(minutes=30))
    layout, messages = Layout(tp=dist.get_world_size()), []
    settings = SyncConfig.model_validate({"bucket_mb": 1, "timeout": 60.0, "delta": "auto", **sync}, strict=False)
    config = Config.model_validate({"model": {"path": folder}, "rollout": {"engines": engines, "health_timeout": health_timeout}})
    pool = Rank0(lambda: EnginePool(config, lambda number, version: SGLangEngine(LightStart(config, folder, number)), messages.append))
    plan = SyncPlan.make(MODEL, layout, EngineLayout(engines=engines), CONTRACT, settings.chunk_bytes)
    shards = build_trainer_shards(MODEL, layout, format_of=CONTRACT.format_of)[dist.get_rank()]
    _run.engines, _run.messages, _run.named_tensors, _run.shards = pool, messages, make_random_tensors(shards, 0), shards
    weights = WeightSync(plan, pool, lambda: _run.named_tensors, settings, notify=messages.append)
    _run.recovering_sync = RecoveringWeightSync(weights, pool, messages.append)
    _run.recovering_sync.run(1)


def change(seed):
    """Replace the weights, as after an optimizer step."""
    _run.named_tensors = make_random_tensors(_run.shards, seed)


def change_a_little(count):
    """Change `count` bytes of every tensor, as after a small optimizer step."""
    for tensor in _run.named_tensors.values():
        tensor.view(torch.uint8).view(-1)[:count] ^= 1


def flip_a_byte(engine):
    """Change an engine's live weights without telling the trainer."""
    _run.engines.run(lambda engines: engines.replicas[engine].engine._post("/flip", {}))


def sync_through(version, faults):
    return strike_in_sync(_run.engines, _run.recovering_sync, version, faults)


def sync_struck(version, call, fault):
    """Release the engines' memory and run a sync, with a fault of engine 1 before it is asked `call` for the first time. Return the
    report and how often the fault happened. Collective."""

    def work():
        _run.engines.run(lambda engines: engines.release_memory())
        return asdict(_run.recovering_sync.run(version))

    return strike_at_call(work, _run.engines, 1, call, fault)


def sample_during_proof(version, wrong=False):
    """Run a sync while a thread asks for responses during its proof. Return whether it had them before the proof ended, and the
    responses. With `wrong`, the trainer does not hold what it has sent."""
    finish = SGLangEngine.finish_rereading
    asking, had = threading.Thread(target=lambda: _answered.append(_answers(_run.engines.value, 4, 5))), []

    def begin():
        asking.start()
        if wrong:
            next(tensor for name, tensor in _run.named_tensors.items() if "linear" in name).view(torch.uint8)[0, 0] ^= 1

    def finish_late(engine):
        threading.Event().wait(20 * _TOKEN_SECONDS)  # the engine has sampled everything by now
        had.append(bool(_answered))
        return finish(engine)

    _answered.clear()
    with mock.patch.object(SGLangEngine, "finish_rereading", finish_late):
        _run.recovering_sync.run(version, begin)
    asking.join()
    return any(had), _answered[0]


_answered = []


def take_answers():
    """Return the responses to the request of `sample_during_proof`, or nothing if it still waits."""
    for _ in range(100):
        if _answered:
            break
        threading.Event().wait(_TOKEN_SECONDS)
    return _answered[0] if _answered else []


def answers(count, tokens, engine=None):
    """Return (tokens, policy version) of `count` completions by all engines, or by one; the same on every rank."""
    return _run.engines.run(lambda engines: _answers(engines, count, tokens, engine), _ANSWERS)


def _answers(engines, count, tokens, engine=None):
    source = engines if engine is None else engines.replicas[engine].engine
    generations = source.generate([[1]] * count, [SamplingParams(1.0, tokens, seed) for seed in range(count)])
    return [(generation.output_ids_T.tolist(), generation.policy_version) for generation in generations]


def answers_through(version, faults, count, tokens):
    """Return `answers` with faults; see `support.engine_faults.strike_while`. Ranks other than 0 return only the result."""
    if dist.get_rank():
        return _run.recovering_sync.run_with_recovery(version, lambda: run_on_rank0(lambda: None, _ANSWERS))
    engines = _run.engines.value
    return strike_while(lambda: _answers(engines, count, tokens), _ANSWERS, engines, _run.recovering_sync, version, faults)


def take_messages():
    """Return the messages to the user since the last call."""
    messages, _run.messages[:] = list(_run.messages), []
    return messages


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(sys.argv[3], int(sys.argv[4]))
