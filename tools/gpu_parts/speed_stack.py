"""Part `speed_stack`: as many layers of an 8B model as fit, FP8 against BF16: the forward pass that a reference makes, and an actor's
whole update (forward, backward, optimizer step, weights quantised).

Both actors are on the device at once and take turns, so that what slows one slows the other.
"""

from __future__ import annotations

from gpu_parts.backends import usable
from gpu_parts.found import Machine, find
from gpu_parts.rows import Rows, run_part
from gpu_parts.sizes import ACTOR, LAYERS_OF_8B, SIZES, layers_that_fit, stack
from gpu_parts.speed_layer import measure
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

TARGETS = {"forward": "reference forward", "step": "actor update"}
_TOKENS = 8192


def part(rows: Rows) -> None:
    machine = find()
    start_megatron(Layout(), seed=0)
    try:
        layers = layers_here(machine)
        rows.add("layers", f"{layers} of {LAYERS_OF_8B} fit on {machine.memory_gib} GiB, once in BF16 and once in FP8")
        measure(rows, f"{layers} layers of 8B,", stack("8B", layers), usable(machine, rows)[:1], _TOKENS, repeat=4, targets=TARGETS)
    finally:
        stop_megatron()


def layers_here(machine: Machine) -> int:
    return layers_that_fit(SIZES["8B"], machine.memory_gib or 0.0, 2 * ACTOR, _TOKENS, LAYERS_OF_8B)


if __name__ == "__main__":
    run_part(part)
