"""SwiGLU in one pass: the product rounded once, its gradients, and the kernels' results in Triton's interpreter."""

from __future__ import annotations

import importlib.machinery

import pytest
import torch
import torch.nn.functional as F
from support.processes import call_in_fresh_process

from megatron_rl.kernels.swiglu.reference import differentiate_reference, multiply_reference, swiglu

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")


def by_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def test_it_is_rounded_once_and_keeps_its_input_alone():
    x = draw(torch.bfloat16, 33, 1, 96).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = swiglu(x)
    exact = by_torch(x.detach().double())
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-30).all()
    assert ((by_torch(x.detach()).double() - exact).abs() > exact.abs() * 2**-8 * 1.001).any(), "torch's two operators round twice"
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    assert swiglu(torch.tensor([-200.0, 200.0, 1.0, 1.0])).tolist() == [0.0, 200.0]


def test_gradients_are_autograds():
    x = draw(torch.float32, 7, 64).requires_grad_()
    dy = draw(torch.float32, 7, 32)
    (wanted,) = torch.autograd.grad(by_torch(x), x, dy)
    (found,) = torch.autograd.grad(swiglu(x), x, dy)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def compare_with_the_reference() -> None:
    from megatron_rl.kernels.swiglu.triton import differentiate, multiply

    for width in (96, 1024, 1100):
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = draw(dtype, 3, 1, 2 * width), draw(dtype, 3, 1, width)
            bound = {"rtol": 1e-5 if dtype is torch.float32 else 2**-7, "atol": 1e-4}
            assert torch.allclose(multiply(x).float(), multiply_reference(x).float(), **bound)
            assert torch.allclose(differentiate(x, dy).float(), differentiate_reference(x, dy).float(), **bound)
    assert multiply(torch.empty(0, 64)).shape == (0, 32)


@needs_triton
def test_the_kernels_results_are_the_references():
    """But for the last bit: the interpreter, chosen when Triton is first imported, truncates to BF16."""
    call_in_fresh_process(compare_with_the_reference, TRITON_INTERPRET="1")
