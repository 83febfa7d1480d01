"""Policies of a few random layers for tests/gpu, and the BF16 model that Megatron builds on a GPU to compare them with."""

from __future__ import annotations

import gc
import statistics
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore import model
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.layers.linear.quantized_linear import fill_weights
from megatron_rl.mcore.layers.spec import build_decoder_spec
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.precision.contract import PrecisionContract
from parallel.formats import FORMATS
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from support.timing import time_in_turns

CASE = "bf16, Megatron with Transformer Engine"
FUSIONS = {
    "apply_rope_fusion": True,
    "use_te_activation_func": True,
    "gradient_accumulation_fusion": True,  # Transformer Engine's own; Megatron's layers would want apex for it
}


def transformer_engine_layers(config: TransformerConfig) -> Any:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, use_te_activation_func=True)


def build_baseline(
    hf_config: dict[str, Any], layers_of: Callable[[Any], Any] = transformer_engine_layers, fusions: dict[str, bool] = FUSIONS
) -> GPTModel:
    """Return a dense model on one rank without weights. Megatron must be started; the defaults need a GPU."""
    contract, plain = PrecisionContract.from_config(PrecisionConfig(mode="bf16", reduction="fast")), model.build_transformer_config
    with (
        patch.object(layers, "_grad_accum_fusion_available", True),  # asked by the output layer, whose own forward pass is not used
        patch.object(model, "build_transformer_config", lambda *arguments: replace(plain(*arguments), **fusions)),
        patch.object(model, "build_decoder_spec", lambda config, **_: layers_of(config)),
    ):
        built: Any = model.build_model(hf_config, Layout(), contract)
    return built


def copy_weights(baseline: GPTModel, source: GPTModel) -> None:
    """Give a baseline the weights of the project's BF16 model. Norms, which have other names in Transformer Engine's layers, become one,
    as in `make_model`."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in baseline.named_parameters():
            if parameter.dim() == 1 and name not in weights:
                parameter.fill_(1.0)
            else:
                parameter.copy_(weights[name])


_MODELS = Path(__file__).parents[2] / "configs" / "models"


def _make_small(**widths: int) -> dict[str, Any]:
    return make_hf_config(ArchitectureConfig.model_validate(widths | {"num_hidden_layers": 1}), 0, "bf16")


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "tiny": _make_small(hidden_size=128, intermediate_size=256),
    "small": _make_small(hidden_size=1024, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4),
    "8B": read_config(_MODELS / "Qwen3-8B"),
    "32B": read_config(_MODELS / "Qwen2.5-32B"),
}
"""The config.json of each; the large ones are the published models', vocabulary included. DeepGEMM compiles a kernel for every shape, in
seconds each: `small` has few shapes, and the others are those of test_speed_linears.py."""

ACTOR_BYTES = 18
"""Bytes that an actor of one replica holds per value, in BF16 as in FP8: see `megatron_rl.planner.memory`, with the FP8 bytes twice."""
REFERENCE_BYTES = {"bf16": 2, "fp8": 2}
ENGINE_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def stack_layers(size: str, layers: int, **changes: object) -> dict[str, Any]:
    """Return the config.json of the model with `layers` layers."""
    return ARCHITECTURES[size] | {"num_hidden_layers": layers} | changes


def count_layers_that_fit(architecture: dict[str, Any], memory_gib: float, bytes_per_value: int, tokens: int) -> int:
    """Return how many layers, from 1 to all, fit if each weight takes `bytes_per_value` and one model at a time computes with `tokens`.

    Activations kept for the backward pass are counted with two bytes, plus half as much for small ones. A quarter of the memory is left for
    CUDA contexts, KV caches and temporary buffers of an optimizer step.
    """
    model = ModelGeometry.from_hf_config(architecture)
    widths = model.head_dim * (2 * model.heads + 2 * model.kv_heads) + 3 * model.ffn
    bytes_per_layer = model.hidden * widths * bytes_per_value + 3 * (4 * model.hidden + widths) * tokens
    embeddings = (1 if model.tied else 2) * model.vocab * model.hidden * bytes_per_value
    return max(1, min(int((memory_gib * 2**30 * 3 / 4 - embeddings) / bytes_per_layer), model.layers))


def make_model(architecture: dict[str, Any], precision: PrecisionConfig) -> torch.nn.Module:
    """Return a model with random weights, the same for the same widths and precision.mode. Megatron must be started."""
    hf_config = architecture | {"torch_dtype": FORMATS[precision.high].dtype}
    (chunk,) = get_model_chunks(build_model(hf_config, Layout(), PrecisionContract.from_config(precision)))
    device = next(chunk.parameters()).device

    def draw(shape: torch.Size, number: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        return torch.empty(shape, device=device).normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(number))

    fill_weights(chunk, draw)
    return chunk


def make_actor(architecture: dict[str, Any], precision: PrecisionConfig) -> Actor:
    return to_actor(make_model(architecture, precision))


def to_actor(model: torch.nn.Module, tokens: int = 8192) -> Actor:
    """Return an actor of the model, with micro-batches of `tokens`."""
    return Actor(model, TrainConfig(learning_rate=1e-6, clip_grad=0.0, micro_batch_tokens=tokens), temperature=1.0)


def make_samples(tokens: int, length: int) -> list[TrainingSample]:
    """Return samples of `length` random tokens, half of each a response; `tokens` in all."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(max(tokens // length, 1))]
    ids = [torch.randint(0, 250, (length,), generator=generator).tolist() for generator in generators]
    return [TrainingSample(tokens[: length // 2], tokens[length // 2 :]) for tokens in ids]


def sum_negative_logprobs(logprobs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * batch.mask).sum(), {}


def compare_with_emulated(backends: list[str], size: str, tokens: int) -> dict[tuple[str, str], dict[str, float] | str]:
    """Return for (scale format, back end) the relative L2 distance to `emulated` of log-probs and of every gradient, or a traceback."""

    def compute(backend: str, scale_format: str) -> dict[str, torch.Tensor]:
        actor = make_actor(ARCHITECTURES[size], PrecisionConfig.model_validate({"backend": backend, "scale_format": scale_format}))
        samples = make_samples(tokens, length=min(tokens, 256))
        logprobs = torch.cat(actor.compute_logprobs(samples)[0])
        actor.update(samples, sum_negative_logprobs)
        gradients = {name: parameter.main_grad.float().clone() for name, parameter in actor.chunks[0].named_parameters()}
        return {"log-probs": logprobs} | gradients

    def compare(backend: str, scale_format: str, expected: dict[str, torch.Tensor]) -> dict[str, float] | str:
        try:
            values = compute(backend, scale_format)
        except Exception:
            return traceback.format_exc()
        return {name: relative_l2(values[name], value) for name, value in expected.items()}

    start_megatron(Layout(), seed=0)
    try:
        distances = {}
        for scale_format in ("pow2", "fp32"):
            expected = compute("emulated", scale_format)
            assert all(value.isfinite().all() for value in expected.values())
            distances |= {(scale_format, backend): compare(backend, scale_format, expected) for backend in backends}
        return distances
    finally:
        stop_megatron()


def relative_l2(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`: 0 if both are zero, inf if only `expected` is."""
    norm, distance = float(expected.double().norm()), float((values.double() - expected.double()).norm())
    return distance / norm if norm else (float("inf") if distance else 0.0)


def compare_with_baseline(architecture: dict[str, Any], on_gpu: bool) -> float:
    """Return the relative L2 distance of the BF16 baseline's log-probs from the project's, with the same weights. On a CPU, which has no
    Transformer Engine, the baseline has the project's layers."""
    start_megatron(Layout(), seed=0)
    try:
        model = make_model(architecture, PrecisionConfig(mode="bf16", reduction="fast"))
        plain = {} if on_gpu else {"layers_of": lambda config: build_decoder_spec(config, quantized=False), "fusions": {}}
        baseline = build_baseline(architecture, **plain)
        copy_weights(baseline, model)
        samples = make_samples(512, length=128)
        expected, found = (torch.cat(to_actor(each).compute_logprobs(samples)[0]) for each in (model, baseline))
        return relative_l2(found, expected)
    finally:
        stop_megatron()


@dataclass(frozen=True)
class PolicyTiming:
    """Parameters of `time_policies`: the depths of the models, and the lengths of samples in micro-batches of `tokens`."""

    size: str
    depths: tuple[int, int]
    lengths: tuple[int, ...]
    tokens: int
    turns: int


def time_policies(timing: PolicyTiming, backends: list[str], baseline: bool) -> dict[tuple[str, int, str], float]:
    """Return the median seconds of ("forward" or "step", length, "bf16" or back end) for the model with all its layers: the log-probs'
    forward pass; forward, backward, optimizer step and quantizing the weights, of one micro-batch. `baseline` adds Megatron's own BF16.

    All layers cost the same: two depths give the cost of a layer, and of what is there once. The models take turns, one at a time on the
    device, which has no room for all.
    """
    seconds: dict[tuple[str, int, str, int], list[float]] = defaultdict(list)
    cases = {"bf16": PrecisionConfig(mode="bf16", reduction="fast")}
    cases |= {backend: PrecisionConfig.model_validate({"backend": backend, "reduction": "fast"}) for backend in backends}
    start_megatron(Layout(), seed=0)
    try:
        for depth in timing.depths * timing.turns:
            architecture = stack_layers(timing.size, depth)
            for case in (*cases, *([CASE] if baseline else [])):
                model = make_model(architecture, cases[case]) if case in cases else fill_randomly(build_baseline(architecture))
                for (phase, length), value in _time_policy(to_actor(model, timing.tokens), timing).items():
                    seconds[phase, length, case, depth].append(value)
                del model
                _free()
    finally:
        stop_megatron()
    layers = ModelGeometry.from_hf_config(ARCHITECTURES[timing.size]).layers
    few, many = timing.depths
    whole = {}
    for phase, length, case in {key[:3]: None for key in seconds}:
        least, most = (statistics.median(seconds[phase, length, case, depth]) for depth in timing.depths)
        whole[phase, length, case] = most + (layers - many) * (most - least) / (many - few)
    return whole


def _time_policy(actor: Actor, timing: PolicyTiming) -> dict[tuple[str, int], float]:
    """Return the seconds of ("forward" or "step", length), each after a first call that compiles and allocates."""
    found = {}
    for length in timing.lengths:
        samples = make_samples(timing.tokens, length)
        phases = {"forward": lambda s=samples: actor.compute_logprobs(s), "step": lambda s=samples: actor.update(s, sum_negative_logprobs)}
        found |= {(phase, length): value for phase, value in time_in_turns(phases, repeat=1).items()}
    return found


def fill_randomly(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02)
    return model


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
