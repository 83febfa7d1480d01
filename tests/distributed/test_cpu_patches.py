"""Each patch that lets Megatron run on a CPU is needed: without it, a step fails, computes other bits, compiles, or copies needlessly."""

import importlib
import operator
import re

import pytest
import torch
from support.families import parse_layout
from support.models import random_sequences
from support.processes import World
from support.trainer import train_grpo
from torch._dynamo.utils import counters

from megatron_rl.mcore.platform import cpu

OWNERS = {
    "torch": "torch",
    "cuda": "torch:cuda",
    "Tensor": "torch:Tensor",
    "random": "megatron.core.tensor_parallel.random",
    "mappings": "megatron.core.tensor_parallel.mappings",
    "buffers": "megatron.core.distributed.param_and_grad_buffer",
    "router": "megatron.core.transformer.moe.router:TopKRouter",
    "frozen": "megatron.core.tensor_parallel.layers:LinearWithFrozenWeight",
    "linear": "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication",
}
"""The modules and classes whose attributes are patched."""
BY_PRODUCT = {"frozen.forward", "linear.forward"}
"""Patches of products, whose bits depend on the CPU: see tests/unit/mcore/platform/test_cpu.py."""
RUNS = {
    "dense": ("", "qwen3", {}, {}),
    "recomputed": ("", "qwen3", {}, {"recompute": "full"}),
    "tied": ("pp2", "qwen3", {"tie_word_embeddings": True}, {}),
    "experts": ("tp2", "qwen3_moe", {}, {}),
    "biased experts": ("", "glm4_moe", {}, {}),
    "cut experts": ("tp2 dp2 ep2 etp2", "qwen3_moe", {}, {}),
    "four cuts": ("tp4", "qwen3_moe", {}, {}),
}
"""Layout, architecture, its changes, and settings of `train` of the smallest runs that reach what is patched."""
PATCHES = {
    "cuda.current_device": "dense",
    "cuda.current_stream": "dense",
    "cuda.get_rng_state": "dense",
    "torch.tensor": "dense",
    "torch.zeros": "dense",
    "Tensor.type": "dense",
    "buffers.dist_all_gather_func": "dense",
    "buffers.dist_reduce_scatter_func": "dense",
    "random._get_cuda_rng_state": "recomputed",
    "random._set_cuda_rng_state": "recomputed",
    "Tensor.cuda": "tied",
    "cuda.Stream": "experts",
    "router._apply_expert_bias": "biased experts",
    "mappings._gather_along_first_dim": "cut experts",
    "mappings._reduce_scatter_along_first_dim": "four cuts",
}


def read_owners():
    parts = {name: path.partition(":") for name, path in OWNERS.items()}
    modules = {name: (importlib.import_module(module), attribute) for name, (module, _, attribute) in parts.items()}
    return {name: operator.attrgetter(attribute)(module) if attribute else module for name, (module, attribute) in modules.items()}


def learn(folder, layout, train, missing):
    """Install the patches but one and take a step. Return the names of all patched attributes and what the step did: its metrics, calls
    that wait for CUDA, compiled graphs, and collectives of lone replicas."""
    owners, lone = read_owners(), []

    def count(collective):
        return lambda *args, group, **options: (lone.append(group.size() == 1), collective(*args, group=group, **options))[1]

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(owners["buffers"], name, count(getattr(owners["buffers"], name)))
    before = {name: dict(vars(owner)) for name, owner in owners.items()}
    cpu.install()
    patched = {
        f"{name}.{key}" for name, owner in owners.items() for key, value in vars(owner).items() if before[name].get(key) is not value
    }
    if missing:
        name, key = missing.split(".")
        setattr(owners[name], key, before[name][key]) if key in before[name] else delattr(owners[name], key)
    queued = len(torch.cuda._queued_calls)
    steps = train_grpo(folder, {"mode": "bf16", "high": "bf16"}, train, [random_sequences(4, seed=1)], layout)["steps"]
    return patched, (str(steps), len(torch.cuda._queued_calls) - queued, counters["stats"]["unique_graphs"], sum(lone))


@pytest.fixture(scope="module")
def run(model_folder, tmp_path_factory):
    """`run(name, missing)`: what rank 0 returns from `learn` in fresh processes."""

    def start(name, missing=None):
        cut, architecture, changes, train = RUNS[name]
        layout = parse_layout(cut) if cut else None
        with World(layout.world_size if layout else 1, tmp_path_factory.mktemp("world")) as world:
            return world.call(learn, model_folder(architecture, num_hidden_layers=2, **changes), layout, train, missing)[0]

    return start


@pytest.fixture(scope="module")
def complete(run):
    """`complete(name)`: the run with all patches, once."""
    results = {}
    return lambda name: results[name] if name in results else results.setdefault(name, run(name))


def test_every_patch_is_tried(complete):
    assert complete("dense")[0] == PATCHES.keys() | BY_PRODUCT


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("patch", PATCHES)
def test_no_patch_is_needless(patch, complete, run):
    _, expected = complete(PATCHES[patch])
    assert expected[1:3] == (0, 0)
    try:
        _, done = run(PATCHES[patch], patch)
    except AssertionError as failure:  # it shows what a rank raised
        done = str(failure)
    assert done != expected
    assert not isinstance(done, str) or re.search("CUDA|torch.cuda|invalid tensor size", done), done
