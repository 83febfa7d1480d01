"""Policies of a few random layers for tests/gpu, and the BF16 model that Megatron builds on a GPU to compare them with."""

from functools import partial
from pathlib import Path

import torch

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import TrainConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.base.names import get_model_chunks
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.model import build_model
from megatron_rl.precision.contract import PrecisionContract
from parallel.formats import FORMATS
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

_MODELS = Path(__file__).parents[2] / "configs" / "models"


def _make_small(**widths):
    return make_hf_config(ArchitectureConfig.model_validate(widths | {"num_hidden_layers": 1}), 0, "bf16")


ARCHITECTURES = {
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


def stack_layers(size, layers, **changes):
    """Return the config.json of the model with `layers` layers."""
    return ARCHITECTURES[size] | {"num_hidden_layers": layers} | changes


def count_layers_that_fit(architecture, memory_gib, bytes_per_value, tokens):
    """Return how many layers, from 1 to all, fit if each weight takes `bytes_per_value` and one model at a time computes with `tokens`.

    Activations kept for the backward pass are counted with two bytes, plus half as much for small ones. A quarter of the memory is left for
    CUDA contexts, KV caches and temporary buffers of an optimizer step.
    """
    model = ModelGeometry.from_hf_config(architecture)
    widths = model.attention[0].moved_heads + 3 * model.ffn
    bytes_per_layer = model.hidden * widths * bytes_per_value + 3 * (4 * model.hidden + widths) * tokens
    embeddings = (1 if model.tied else 2) * model.vocab * model.hidden * bytes_per_value
    return max(1, min(int((memory_gib * 2**30 * 3 / 4 - embeddings) / bytes_per_layer), model.layers))


def make_model(architecture, precision):
    """Return a model with random weights, the same for the same widths and precision.mode. Megatron must be started."""
    hf_config = architecture | {"torch_dtype": FORMATS[precision.high].dtype}
    (chunk,) = get_model_chunks(build_model(hf_config, Layout(), PrecisionContract.from_config(precision)))
    device = next(chunk.parameters()).device

    def draw(shape, number):
        if len(shape) == 1:
            return torch.ones(shape, device=device)
        return torch.empty(shape, device=device).normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(number))

    quantized = {id(layer.weight): layer for layer in find_quantized_layers(chunk).values()}
    for number, parameter in enumerate(chunk.parameters()):
        layer = quantized.get(id(parameter))
        if layer is None:
            parameter.data.copy_(draw(parameter.shape, number))
        else:
            layer.quantize(draw(parameter.shape, number).to(parameter.device))
            layer.start_master(partial(draw, parameter.shape, number))
    return chunk


def make_actor(architecture, precision):
    return to_actor(make_model(architecture, precision))


def to_actor(model, tokens=8192):
    """Return an actor of the model, with micro-batches of `tokens`."""
    return Actor(model, TrainConfig(learning_rate=1e-6, clip_grad=0.0, micro_batch_tokens=tokens), temperature=1.0)


def make_samples(tokens, length):
    """Return samples of `length` random tokens, half of each a response; `tokens` in all."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(max(tokens // length, 1))]
    ids = [torch.randint(0, 250, (length,), generator=generator).tolist() for generator in generators]
    return [TrainingSample(tokens[: length // 2], tokens[length // 2 :]) for tokens in ids]


def sum_negative_logprobs(logprobs, batch):
    return -(logprobs * batch.mask).sum(), {}
