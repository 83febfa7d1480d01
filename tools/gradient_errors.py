"""Errors of FP8 gradients that the contract does not have, against FP32, on a trained model's own activations and gradients.

    PYTHONPATH=. .venv/bin/python tools/gradient_errors.py [MODEL]        # by default the quickstart's model

A policy-gradient step with advantages of both signs runs in FP32 once. Each gradient is then computed again from the same inputs and
gradients of results, quantized with power-of-two scales. Printed is the relative L2 error over all layers, each layer's at most.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from examples.arithmetic.task import Arithmetic, write_demonstration
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight, round_trip_1x128, round_trip_128x1

ROOT = Path(__file__).resolve().parents[1]
SCALES, PROBLEMS = "pow2", 96
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # of a tensor and its reference


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x `[T, K]` quantized in blocks of 128 x 128."""
    return dequantize_weight(quantize_weight(x, SCALES))


def by_token(x: torch.Tensor) -> torch.Tensor:
    return round_trip_1x128(x, SCALES)


def by_column(x: torch.Tensor) -> torch.Tensor:
    return round_trip_128x1(x, SCALES)


def record(model: nn.Module, ids: torch.Tensor) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """Return (inputs `[T, K]` by name of linear layer, gradients of results `[T, N]`) of one step."""
    inputs, gradients = dict[str, list[torch.Tensor]](), dict[str, list[torch.Tensor]]()

    def keep(into: dict[str, list[torch.Tensor]], name: str, place: int, _: Any, *tensors: Any) -> None:
        into.setdefault(name, []).append(tensors[place][0].detach().flatten(0, -2))

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(partial(keep, inputs, name, 0))
            layer.register_full_backward_hook(partial(keep, gradients, name, 1))
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    advantages = torch.randn(len(ids), 1, 1, generator=torch.Generator().manual_seed(0))
    (-(advantages * logprobs).mean()).backward()
    return inputs, gradients


def find_error(pairs: Pairs) -> tuple[float, float]:
    """Return the relative error of all tensors together, and the largest of one."""
    squares = torch.tensor([[float((found - wanted).square().sum()), float(wanted.square().sum())] for found, wanted in pairs])
    return float((squares[:, 0].sum() / squares[:, 1].sum()).sqrt()), float((squares[:, 0] / squares[:, 1]).sqrt().max())


def differentiate_swiglu(gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate.requires_grad_(), up.requires_grad_()
    of_gate, of_up = torch.autograd.grad(F.silu(gate) * up, (gate, up), gradient)
    return of_gate, of_up


def compare(folder: str) -> dict[str, Pairs]:
    """Return the gradients of each recipe with those in FP32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    problems, rng = map(Arithmetic(0).train_problem, range(PROBLEMS)), random.Random(0)
    tokens = torch.tensor(tokenizer("".join(each.prompt + write_demonstration(each, rng, 0.5) for each in problems)).input_ids)
    inputs, gradients = record(model, tokens[: len(tokens) // 128 * 128].view(-1, 128))
    found = dict[str, Pairs]()
    add: Callable[..., None] = lambda recipe, *pairs: found.setdefault(recipe, []).extend(pairs)  # noqa: E731
    weights = {name: layer.weight.detach() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    for name, (x,) in inputs.items():
        (dy,), weight = gradients[name], weights[name]
        of_weight, of_x = dy.t() @ x, dy @ weight
        if name == "lm_head":
            rounded = dy.bfloat16().float()
            add("head: WGrad, BF16", (rounded.t() @ x.bfloat16().float(), of_weight))
            add("head: WGrad, FP8", (by_column(rounded).t() @ by_column(x), of_weight))
            add("head: DGrad, BF16", (rounded @ weight, of_x))
            add("head: DGrad, FP8", (by_token(rounded) @ in_blocks(weight), of_x))
            continue
        add("WGrad, as now", (by_column(dy).t() @ by_column(x), of_weight))
        add("WGrad, x in 128x128", (by_column(dy).t() @ in_blocks(x), of_weight))
        if name.endswith("gate_proj"):
            up, down = (name.replace("gate", other) for other in ("up", "down"))
            both, of_product = (x @ weight.t(), x @ weights[up].t()), gradients[down][0] @ weights[down]
            for recipe, kept in (("as now", both), ("gate and up kept in E4M3", (by_token(both[0]), by_token(both[1])))):
                for of, exact in zip(differentiate_swiglu(*kept, of_product), (dy, gradients[up][0]), strict=True):
                    add(f"WGrad of gate and up, {recipe}", (by_column(of).t() @ by_column(x), exact.t() @ x))
    return found


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "examples" / "arithmetic" / "models" / "quickstart")
    print("| gradient | relative error | of a layer at most |\n|---|---|---|")
    for recipe, pairs in compare(chosen).items():
        print(f"| {recipe} | " + " | ".join(f"{100 * error:.2f} %" for error in find_error(pairs)) + " |")
