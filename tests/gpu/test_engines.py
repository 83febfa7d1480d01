"""Live engines: how fast they decode in BF16, FP8, FP8 with an FP8 cache, and INT8, and whole RL steps in `fp8_unified` against BF16.

All layers of a model decode, of 32B where the GPU has room; an RL step has as many layers as fit with both precisions' actors, references
and engines on one device.
A model of few layers spends more of a step on what FP8 does not speed up.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import torch
from support.policies import (
    ACTOR_BYTES,
    ARCHITECTURES,
    ENGINE_BYTES,
    REFERENCE_BYTES,
    count_layers_that_fit,
    stack_layers,
)
from support.rl_steps import PHASES, StepSize, measure_decoding, measure_rl_steps, start_engines
from support.timing import run_in_child

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.kernels.linear import requirements

PRECISIONS = {
    "bf16": PrecisionConfig(mode="bf16", reduction="fast"),
    "fp8": PrecisionConfig(mode="fp8_unified", reduction="fast"),
    "fp8_kv": PrecisionConfig(mode="fp8_unified", reduction="fast", kv="e4m3_per_layer"),
    "int8": PrecisionConfig(mode="int8_rollout"),
}
ROLLOUT = {"max_running_requests": 256, "max_total_tokens": 40960, "start_timeout": 200.0, "request_timeout": 90.0}
BATCH_SIZES = (1, 8, 16, 64, 256)
CASES = {"1 sequence": (1, 32), "16 sequences": (16, 32), "64 sequences": (64, 32), "256 sequences": (256, 32), "8 of 4,096": (8, 4096)}
"""Sequences, and tokens of a prompt: of what is in the cache when decoding begins."""
ROOM_FOR_32B = 120
"""GiB of a GPU that holds 32B engines in BF16 and FP8 at once. Jet-RL's speed of rollouts is of that size."""


def find_size() -> str:
    """Return the size whose engines fit on this GPU side by side."""
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < ROOM_FOR_32B * 2**30:
        return "8B"
    return "32B"


class FakeEngine:
    """Answers every prompt with as many tokens as asked for."""

    server = SimpleNamespace(url="")

    def generate(self, prompts, sampling, abort=None):
        return [SimpleNamespace(output_ids_T=[1] * sampling.max_new_tokens) for _ in prompts]


def read_cache_gib(engine) -> float:
    """What SGLang says that its KV cache takes."""
    if not engine.server.url:
        return 0.0
    answer = httpx.get(f"{engine.server.url}/server_info", headers={"Authorization": f"Bearer {engine.server.api_key}"}, timeout=30)
    return answer.json()["internal_states"][0]["memory_usage"]["kvcache"]


@contextmanager
def start_decoders(device, folder):
    """Start an engine of each precision."""
    if device == "cpu":
        yield {name: FakeEngine() for name in PRECISIONS}
        return
    size = find_size()
    precisions = PRECISIONS if size == "8B" else {name: PRECISIONS[name] for name in ("bf16", "fp8")}
    rollout = ROLLOUT | {"enable_prefix_caching": False}  # every turn reads its prompts
    with start_engines(folder, ARCHITECTURES[size], precisions, rollout, BATCH_SIZES) as engines:
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines


@pytest.fixture
def decoders(device, tmp_path):
    with start_decoders(device, tmp_path) as engines:
        yield engines


def test_speed_of_decoding(decoders, figures, subtests):
    rates: dict[tuple[str, str], float] = {}

    def measure() -> None:
        """Take the median of two turns after one to warm up, for each case; engines take turns."""
        for case, (count, prompt) in CASES.items():
            turns = [{name: measure_decoding(engine, count, 96, prompt) for name, engine in decoders.items()} for _ in range(3)]
            rates.update({(case, name): statistics.median(turn[name] for turn in turns[1:]) for name in decoders})

    figures.measure(measure)
    size = find_size()
    for (case, name), rate in rates.items():
        assert rate > 0
        ratio = rate / rates[case, "bf16"]
        target = {"target": f"rollout of {size}", "reached": ratio} if name == "fp8" else {}
        figures.add(f"{size} decoding {case}, {name}", **target, tokens_per_second=rate, of_bf16=ratio)
    for name, engine in decoders.items():
        figures.add(f"{size} KV cache of {ROLLOUT['max_total_tokens']} tokens, {name}", gib=read_cache_gib(engine))


@pytest.mark.long
def test_speed_of_rl_steps(device, figures, tmp_path):
    if device == "cuda":
        backend = next((name for name in ("deep_gemm", "transformer_engine") if not requirements.find_missing(name)), "emulated")
        precisions = {"bf16": PRECISIONS["bf16"], "fp8": PrecisionConfig.model_validate({"backend": backend, "reduction": "fast"})}
        bytes_per_value = sum(ACTOR_BYTES + REFERENCE_BYTES[name] + ENGINE_BYTES[name] for name in precisions)
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        tied = {"tie_word_embeddings": True}  # the vocabulary's products are the whole model's; two such matrices in all would not fit
        layers = count_layers_that_fit(ARCHITECTURES["8B"] | tied, memory_gib, bytes_per_value, 8192)
        settings = SyncConfig(transport="cuda_ipc", proof="streamed", timeout=30.0)
        rollout = ROLLOUT | {"max_running_requests": 64, "max_total_tokens": 64 * 1152}
        arguments = (stack_layers("8B", layers, **tied), precisions, settings, rollout, StepSize(64, 64, 1024, repeat=2))
    else:
        layers, precisions, settings = 1, {"fp8": PrecisionConfig()}, SyncConfig(transport="shared_memory", proof="streamed", timeout=600.0)
        rollout = {"max_running_requests": 8, "max_total_tokens": 2048, "start_timeout": 900.0, "request_timeout": 600.0}
        tiny = stack_layers("tiny", 1, hidden_size=256)
        arguments = (tiny, precisions, settings, rollout, StepSize(4, 8, 12, repeat=1))
    proved, seconds, distances = figures.measure(run_in_child, (measure_rl_steps, tmp_path, *arguments))
    assert all(proved[name] > 0 for name in precisions)
    for phase in PHASES:
        of_phase = {name: seconds[phase, name] for name in precisions}
        assert min(of_phase.values()) > 0
        figures.add_seconds(f"RL step of {layers} layers: {phase}", of_phase)  # too few layers to compare with a published speed
    for name, distance in distances.items():
        figures.add(f"engine against trainer, {name}", mean_logprob_difference=distance)
    if device == "cpu":
        assert distances == {"fp8": 0.0}  # one policy, to the bit
