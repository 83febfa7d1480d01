"""Live engines: how fast they decode in BF16, FP8, FP8 with an FP8 cache, and INT8, and whole RL steps in `fp8_unified` against BF16.

All layers of a model decode, of 32B where the GPU has room; an RL step has as many layers as fit with both precisions' actors, references
and engines on one device.
A model of few layers spends more of a step on what FP8 does not speed up.
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import httpx
import pytest
import torch
from policies import ACTOR_BYTES, ARCHITECTURES, ENGINE_BYTES, REFERENCE_BYTES, count_layers_that_fit, make_actor, make_model, stack_layers
from timing import run_in_child, time_call

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.kernels.linear import requirements
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.base.names import freeze
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.formats import FORMATS
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

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


PHASES = ("rollout", "reference forward", "actor forward", "actor update", "sync", "whole step")


@contextmanager
def start_engines(folder, architecture, precisions, rollout, batch_sizes):
    """Context manager that starts an engine for each precision, on weights that SGLang makes up, and stops all at the end. The engines are
    not ready yet.

    CUDA graphs are captured only for decoding `batch_sizes` sequences; each takes seconds.
    """
    arguments = ("--load-format", "dummy")
    if torch.cuda.is_available():
        arguments += ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *map(str, batch_sizes))
    with ExitStack() as stack:
        engines = {}
        for name, precision in precisions.items():
            model = write_empty_checkpoint(folder / name, architecture, precision)
            sections = {"model": {"path": model}, "precision": precision, "rollout": dict(rollout)}
            config = Config.model_validate({**sections, "placement": {"kind": "disaggregated"}})  # these give no memory back
            engines[name] = SGLangEngine(EngineLaunchSpec(config, model, model, arguments=arguments))
            stack.callback(engines[name].stop)
        yield engines


def write_empty_checkpoint(folder, architecture, precision):
    """Write a checkpoint's folder without weights; return it."""
    make_byte_tokenizer(folder)
    config = architecture | {"torch_dtype": FORMATS[precision.high].dtype, "eos_token_id": load_tokenizer(folder).eos_token_id}
    write_all_but_weights(folder, describe_weights(config, PrecisionContract.from_config(precision)), None)
    return folder


def make_prompts(count, length):
    return [[(7 * index + position) % 250 for position in range(length)] for index in range(count)]


def measure_decoding(engine, batch_size, tokens, prompt_tokens=32):
    """Return the tokens per second that an engine decodes with log-probs, after prompts of `prompt_tokens`: a request minus a request
    for a single token. Sequences end early only at the end token."""

    def generate(count):
        start = time.perf_counter()
        answers = engine.generate(make_prompts(batch_size, prompt_tokens), SamplingParams(temperature=1.0, max_new_tokens=count))
        return sum(len(answer.output_ids_T) for answer in answers), time.perf_counter() - start

    (few, prefill), (many, whole) = generate(1), generate(tokens)
    return (many - few) / max(whole - prefill, 1e-9)


@dataclass(frozen=True)
class StepSize:
    prompts: int
    prompt_tokens: int
    new_tokens: int
    repeat: int


class RlRun:
    """An actor, a reference and a sync of one precision, with their engine."""

    def __init__(self, architecture, precision, engine, settings):
        contract = PrecisionContract.from_config(precision)
        self.actor, self.engine, self.version = make_actor(architecture, precision), engine, 0
        self.reference = Policy(freeze(make_model(architecture, precision)), 1.0, self.actor.micro_batch_tokens)
        shards, geometry = build_rank_shards(architecture, Layout()), ModelGeometry.from_hf_config(architecture)
        plan = SyncPlan.make(geometry, Layout(), (1, 1), contract, settings.chunk_bytes)
        self.sync = WeightSync(plan, Rank0(lambda: engine), lambda: collect_named_tensors(self.actor.model, shards, contract), settings)

    def update_engine(self):
        """Sync the actor's weights as the next version; return the tensors proved."""
        self.version += 1
        return self.sync.run(self.version).proved

    def step(self, prompts, new_tokens):
        """Run one RL step with made-up rewards; return the seconds by phase and the mean |log-prob of engine - of trainer|."""
        start = time.perf_counter()
        answers = self.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=new_tokens))
        seconds = {"rollout": time.perf_counter() - start}
        samples = [
            TrainingSample(prompt, answer.output_ids_T, advantage=(-1.0) ** number, rollout_logprobs=torch.from_numpy(answer.logprobs_T))
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

        def score_reference():
            for sample, logprobs in zip(samples, self.reference.compute_logprobs(samples)[0], strict=True):
                sample.reference_logprobs = logprobs

        def score_actor():
            for sample, logprobs in zip(samples, self.actor.compute_logprobs(samples)[0], strict=True):
                sample.old_logprobs = logprobs

        seconds["reference forward"] = time_call(score_reference)
        seconds["actor forward"] = time_call(score_actor)
        seconds["actor update"] = time_call(lambda: self.actor.update(samples, PolicyLoss(AlgorithmConfig(kl_coef=0.001))))
        seconds["sync"] = time_call(self.update_engine)
        differences = torch.cat([sample.old_logprobs - sample.rollout_logprobs for sample in samples])
        return seconds | {"whole step": sum(seconds.values())}, float(differences.abs().mean())


def measure_rl_steps(folder, architecture, precisions, settings, rollout, size):
    """Return by precision: the tensors proved in the first sync; the median seconds of ("phase", precision); the mean |log-prob of engine
    - of trainer|. The precisions take turns, after one step to warm up; the trainers are built while the engines start."""
    prompts = make_prompts(size.prompts, size.prompt_tokens)
    seconds = {}
    distances = {}
    with start_engines(folder, architecture, precisions, rollout, (size.prompts,)) as engines:
        start_megatron(Layout(), seed=0)
        try:
            runs = {name: RlRun(architecture, precisions[name], engine, settings) for name, engine in engines.items()}
            for engine in engines.values():
                engine.wait_until_ready()
            proved = {name: run.update_engine() for name, run in runs.items()}
            for turn in range(1 + size.repeat):
                for name, run in runs.items():
                    phases, distances[name] = run.step(prompts, size.new_tokens)
                    if turn:
                        for phase, value in phases.items():
                            seconds.setdefault((phase, name), []).append(value)
            for run in runs.values():
                run.sync.close()
        finally:
            stop_megatron()
    return proved, {case: statistics.median(values) for case, values in seconds.items()}, distances


def find_size():
    """Return the size whose engines fit on this GPU side by side."""
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < ROOM_FOR_32B * 2**30:
        return "8B"
    return "32B"


class FakeEngine:
    """Answers every prompt with as many tokens as asked for."""

    server = SimpleNamespace(url="")

    def generate(self, prompts, sampling, abort=None):
        return [SimpleNamespace(output_ids_T=[1] * sampling.max_new_tokens) for _ in prompts]


def read_cache_gib(engine):
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
    rates = {}

    def measure():
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
