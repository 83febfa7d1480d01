"""Whole transformer layers with every back end: log-probs and gradients against `emulated`, then their speed against BF16."""

from __future__ import annotations

import pytest
import torch
from support.policies import ACTOR_BYTES, LAYERS_OF_8B, compare_with_emulated, count_layers_that_fit, stack_layers, time_policies
from support.timing import run_in_child

from megatron_rl.precision.backends import requirements

FURTHEST = 0.1
"""Sums in another order make single activations round to the neighboring E4M3 value, 2^-4 of themselves away, so results differ a little.
More than FP8 itself costs, and less than the 1 and more of a wrong scale or layout."""


@pytest.fixture
def child_backends(device: str) -> list[str]:
    """Back ends of a child, where there are no stand-ins: on a CPU `emulated` alone."""
    if device == "cpu":
        return ["emulated"]
    return [name for name in ("deep_gemm", "transformer_engine") if not requirements.find_missing(name)]


def test_log_probs_and_gradients_are_close_to_emulated(device, child_backends, subtests, record_property):
    size, tokens = ("small", 2048) if device == "cuda" else ("tiny", 64)
    distances = run_in_child(compare_with_emulated, child_backends, size, tokens)
    assert {scale_format for scale_format, _ in distances} == {"pow2", "fp32"} or not child_backends
    for (scale_format, backend), of_backend in distances.items():
        with subtests.test(backend=backend, scale_format=scale_format):
            assert isinstance(of_backend, dict), of_backend
            worst = max(of_backend, key=of_backend.__getitem__)
            record_property(f"{backend}, {scale_format}: relative L2 of {worst}, the worst of {len(of_backend)}", of_backend[worst])
            assert of_backend[worst] <= (FURTHEST if device == "cuda" else 0), worst  # `emulated` against itself: the same bits


@pytest.mark.parametrize("size", ["8B", "32B"])
def test_speed_of_a_layer(device, child_backends, figures, size):
    layer, tokens = (size, 8192) if device == "cuda" else ("tiny", 64)
    seconds = figures.measure(run_in_child, (time_policies, stack_layers(layer, 1), child_backends, tokens, 5 if device == "cuda" else 1))
    assert len(seconds) == 2 * (1 + len(child_backends))
    for phase in ("forward", "step"):
        of_phase = {case: value for (part, case), value in seconds.items() if part == phase}
        figures.add_seconds(f"{size} layer {phase}", of_phase, tokens=tokens)


def test_speed_of_a_stack_of_layers(device, child_backends, figures):
    """As many layers of an 8B model as fit, in BF16 and FP8 at once: a reference's forward pass, and an actor's whole update."""
    tokens, layers, repeat = 64, 2, 1
    if device == "cuda":
        memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        tokens, layers, repeat = 8192, count_layers_that_fit("8B", memory_gib, 2 * ACTOR_BYTES, 8192, LAYERS_OF_8B), 4
    architecture = stack_layers("8B" if device == "cuda" else "tiny", layers)
    seconds = figures.measure(run_in_child, (time_policies, architecture, child_backends[:1], tokens, repeat))
    for phase, target in {"forward": "reference forward", "step": "actor update"}.items():
        of_phase = {case: value for (part, case), value in seconds.items() if part == phase}
        assert of_phase["bf16"] > 0
        figures.add_seconds(f"{layers} layers of 8B, {phase}", of_phase, target, tokens=tokens)


def test_layers_that_fit():
    """8B: 218 million values a layer; 36 bytes of each for two actors are 7.3 GiB, what one keeps for the backward pass about two more."""
    counts = {gib: count_layers_that_fit("8B", gib, 2 * ACTOR_BYTES, 8192, LAYERS_OF_8B) for gib in (0.0, 79.0, 139.8, 10000.0)}
    assert counts == {0.0: 1, 79.0: 6, 139.8: 11, 10000.0: 32}
