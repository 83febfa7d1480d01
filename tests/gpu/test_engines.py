"""Live engines: how fast they decode in BF16, FP8, FP8 with an FP8 cache, and INT8, and whole RL steps in `fp8_unified` against BF16.

All layers of an 8B model decode; an RL step has as many layers as fit with both precisions' actors, references and engines on one device.
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
    LAYERS_OF_8B,
    REFERENCE_BYTES,
    VOCABULARY_OF_8B,
    count_layers_that_fit,
    stack_layers,
)
from support.rl_steps import PHASES, StepSize, measure_decoding, measure_rl_steps, start_engines
from support.timing import run_in_child

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.precision.backends import requirements

PRECISIONS = {
    "bf16": PrecisionConfig(mode="bf16", reduction="fast"),
    "fp8": PrecisionConfig(mode="fp8_unified", reduction="fast"),
    "fp8_kv": PrecisionConfig(mode="fp8_unified", reduction="fast", kv="e4m3_per_layer"),
    "int8": PrecisionConfig(mode="int8_rollout"),
}
ROLLOUT = {"max_running_requests": 256, "max_total_tokens": 40960, "start_timeout": 200.0, "request_timeout": 90.0}
BATCH_SIZES = (1, 16, 64, 256)


class FakeEngine:
    """Answers every prompt with as many tokens as asked for."""

    url = api_key = ""

    def generate(self, prompts, sampling):
        return [SimpleNamespace(output_ids_T=[1] * sampling.max_new_tokens) for _ in prompts]


def read_cache_gib(engine) -> float:
    """What SGLang says that its KV cache takes."""
    if not engine.url:
        return 0.0
    answer = httpx.get(f"{engine.url}/server_info", headers={"Authorization": f"Bearer {engine.api_key}"}, timeout=30)
    return answer.json()["internal_states"][0]["memory_usage"]["kvcache"]


@contextmanager
def start_decoders(device, folder):
    """Start an engine of each precision."""
    if device == "cpu":
        yield {name: FakeEngine() for name in PRECISIONS}
        return
    architecture = stack_layers("8B", LAYERS_OF_8B, vocab_size=VOCABULARY_OF_8B)
    rollout = ROLLOUT | {"enable_prefix_caching": False}  # every turn reads its prompts
    with start_engines(folder, architecture, PRECISIONS, rollout, BATCH_SIZES) as engines:
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines


@pytest.fixture
def decoders(device, tmp_path):
    with start_decoders(device, tmp_path) as engines:
        yield engines


def test_speed_of_decoding(decoders, figures, subtests):
    rates: dict[tuple[int, str], float] = {}

    def measure() -> None:
        """Take the median of two turns after one to warm up, for each batch size; engines take turns."""
        for size in BATCH_SIZES:
            turns = [{name: measure_decoding(engine, size, tokens=96) for name, engine in decoders.items()} for _ in range(3)]
            rates.update({(size, name): statistics.median(turn[name] for turn in turns[1:]) for name in decoders})

    figures.measure(measure)
    for (size, name), rate in rates.items():
        assert rate > 0
        ratio = rate / rates[size, "bf16"]
        target = {"target": "rollout", "reached": ratio} if name == "fp8" else {}
        figures.add(f"8B decoding {size} at once, {name}", **target, tokens_per_second=rate, of_bf16=ratio)
    for name, engine in decoders.items():
        figures.add(f"8B KV cache of {ROLLOUT['max_total_tokens']} tokens, {name}", gib=read_cache_gib(engine))


@pytest.mark.long
def test_speed_of_rl_steps(device, figures, tmp_path):
    if device == "cuda":
        backend = next((name for name in ("deep_gemm", "transformer_engine") if not requirements.find_missing(name)), "emulated")
        precisions = {"bf16": PRECISIONS["bf16"], "fp8": PrecisionConfig.model_validate({"backend": backend, "reduction": "fast"})}
        bytes_per_value = sum(ACTOR_BYTES + REFERENCE_BYTES[name] + ENGINE_BYTES[name] for name in precisions)
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        layers = count_layers_that_fit("8B", memory_gib, bytes_per_value, 8192, LAYERS_OF_8B)
        settings = SyncConfig(transport="cuda_ipc", proof="streamed", timeout=30.0)
        rollout = ROLLOUT | {"max_running_requests": 64, "max_total_tokens": 32768}
        arguments = (stack_layers("8B", layers), precisions, settings, rollout, StepSize(64, 64, 192, repeat=3))
    else:
        layers, precisions, settings = 1, {"fp8": PrecisionConfig()}, SyncConfig(transport="shared_memory", proof="streamed", timeout=600.0)
        rollout = {"max_running_requests": 8, "max_total_tokens": 2048, "start_timeout": 900.0, "request_timeout": 600.0}
        tiny = ARCHITECTURES["tiny"].model_copy(update={"hidden_size": 256})
        arguments = (tiny, precisions, settings, rollout, StepSize(4, 8, 12, repeat=1))
    proved, seconds, distances = figures.measure(run_in_child, (measure_rl_steps, tmp_path, *arguments))
    assert all(proved[name] > 0 for name in precisions)
    for phase in PHASES:
        of_phase = {name: seconds[phase, name] for name in precisions}
        assert min(of_phase.values()) > 0
        target = "" if phase in ("actor forward", "sync") else phase  # a sync's figure is a copy's speed, not BF16's
        figures.add_seconds(f"RL step of {layers} layers: {phase}", of_phase, target)
    for name, distance in distances.items():
        figures.add(f"engine against trainer, {name}", mean_logprob_difference=distance)
    if device == "cpu":
        assert distances == {"fp8": 0.0}  # one policy, to the bit
