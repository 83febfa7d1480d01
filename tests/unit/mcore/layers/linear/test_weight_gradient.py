"""Weight gradients are accumulated in Megatron's buffer, on a GPU by the product itself (with fake tensors)."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.mcore.layers.linear.weight_gradient import WeightGradient


def test_a_chunk_allocates_no_matrix_of_the_weights_size(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *tensors, **options: calls.append((tensors, options)))
    with FakeTensorMode():
        weight: Any = torch.nn.Parameter(torch.empty(512, 64, dtype=torch.bfloat16, device="cuda"))
        weight.main_grad = torch.empty(512, 64, device="cuda")
        dy, x = (torch.empty(8, width, dtype=torch.bfloat16, device="cuda") for width in (512, 64))
        WeightGradient(weight).add(dy, x)
        assert WeightGradient(weight).finish() is None and weight.grad_added_to_main_grad
        assert weight.grad.shape == weight.shape and weight.grad.untyped_storage().nbytes() == 2, (
            "the gradient that DDP's hook drops must need no memory"
        )
    (((into, left, right), options),) = calls
    assert into is weight.main_grad is options["out"] and options["out_dtype"] is torch.float32
    assert left.shape == (512, 8) and right is x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = WeightGradient(weight)
        gradient.add(dy, x)
        return None, gradient.finish()


def test_the_hook_runs_once_though_autograd_gets_no_gradient():
    """Uses a hook like Megatron's DDP on a weight that two operators of a pass share."""
    weight: Any = torch.nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))
    weight.main_grad, dropped = torch.zeros(2, 4), []
    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulation.register_hook(lambda *_: dropped.append(weight.grad))
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    (Product.apply(x, weight) + Product.apply(x, weight)).sum().backward()
    (of_weight,) = dropped
    assert of_weight.shape == weight.shape and weight.main_grad.eq(6).all()
