"""What an FP8 linear layer keeps for the backward pass, and the accumulation of weight gradients. Kernels are faked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.kernels.linear import make_backend
from megatron_rl.mcore.base import weight_gradient
from megatron_rl.mcore.base.weight_gradient import WeightGradient, multiply
from megatron_rl.mcore.layers.linear.quantized_matmul import Product, QuantizedMatmul
from megatron_rl.mcore.platform.products import add_gradients_in_place
from megatron_rl.precision.fp8 import append_zeros, quantize_weight
from parallel.formats import FP8

pytestmark = pytest.mark.usefixtures("fake_libraries")

T, N, K = 160, 256, 384
_PADDED = 256  # T in whole blocks


def find_saved(name: str, x: torch.Tensor, learns: bool) -> list[torch.Tensor]:
    """Return the tensors saved for the backward pass, without the weight."""
    backend, weight = make_backend(name, FP8.with_scales("pow2")), torch.nn.Parameter(torch.randn(N, K), requires_grad=learns)
    operand = backend.prepare(quantize_weight(weight.detach(), "pow2"), None)
    layer = SimpleNamespace(backend=backend, operand=operand, result_order=None)
    result: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: result.append(tensor) or tensor, lambda tensor: tensor):
        y = QuantizedMatmul.apply(x, weight, Product(layer, None, False, None), None, None)
        assert y.shape == (T, N)
    return [tensor for tensor in result if tensor.data_ptr() != weight.data_ptr()]


@pytest.mark.parametrize("name, tokens", [("deep_gemm", _PADDED), ("transformer_engine", T)])
def test_only_quantized_columns_are_kept_and_nothing_if_the_weight_is_frozen(name, tokens):
    data, scale = find_saved(name, torch.randn(T, K).bfloat16().requires_grad_(), learns=True)
    assert data.element_size() == 1 and data.numel() == K * tokens
    assert scale.dtype == torch.float32 and scale.numel() == K * _PADDED // 128
    assert find_saved(name, torch.randn(T, K).bfloat16().requires_grad_(), learns=False) == []


def test_the_reference_keeps_the_input_itself_and_padding_copies_only_if_zeros_are_missing():
    x = torch.randn(T, K).bfloat16().requires_grad_()
    (saved,) = find_saved("emulated", x, learns=True)
    assert saved.data_ptr() == x.data_ptr()
    x = torch.randn(T, K)
    assert append_zeros(x, -2, 0) is x and append_zeros(x[:150], -2, 10).shape == (160, K)


@pytest.mark.parametrize("name", ["deep_gemm", "transformer_engine"])
def test_rows_that_blocks_hold_in_another_order_keep_their_places(name):
    """As of q, k and v with heads of 64, of which a block holds two: GPU libraries multiply blocks, not a weight's rows."""
    backend, format = make_backend(name, FP8.with_scales("pow2")), "pow2"
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    blocks, x, dy = quantize_weight(torch.randn(N, K), format), torch.randn(T, K).bfloat16(), torch.randn(T, N).bfloat16()

    def run(result_order, dy):
        weight: Any = torch.nn.Parameter(torch.zeros(N, K))
        weight.main_grad, own = torch.ones(N, K), x.clone().requires_grad_()
        layer = SimpleNamespace(backend=backend, operand=backend.prepare(blocks, None), result_order=result_order)
        y = QuantizedMatmul.apply(own, weight, Product(layer, None, False, None), None, None)
        y.backward(dy)
        return y.detach(), own.grad, weight.main_grad

    plain, reordered = run(None, dy[:, order].contiguous()), run((order, order.argsort()), dy)
    assert torch.equal(reordered[0][:, order], plain[0]) and torch.equal(reordered[1], plain[1])
    assert torch.equal(reordered[2][order], plain[2]) and not torch.equal(reordered[2], plain[2])


def test_a_chunk_allocates_no_matrix_of_the_weights_size(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *tensors, **options: calls.append((tensors, options)))
    with FakeTensorMode():
        weight: Any = torch.nn.Parameter(torch.empty(512, 64, dtype=torch.bfloat16, device="cuda"))
        weight.main_grad = torch.empty(512, 64, device="cuda")
        dy, x = (torch.empty(8, width, dtype=torch.bfloat16, device="cuda") for width in (512, 64))
        WeightGradient(weight).add(dy, x)
        assert WeightGradient(weight).finish() is None and weight.grad_added_to_main_grad
        # the gradient that DDP's hook drops must need no memory
        assert weight.grad.shape == weight.shape and weight.grad.untyped_storage().nbytes() == 2
    (((into, left, right), options),) = calls
    assert into is weight.main_grad is options["out"] and options["out_dtype"] is torch.float32
    assert left.shape == (512, 8) and right is x


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_megatrons_products_add_their_gradients_in_place_on_a_gpu(monkeypatch, micro_batches):
    """Autograd gets no gradient, and the hook of Megatron's DDP runs once for all micro-batches of a pass."""
    kernels, total = SimpleNamespace(), torch.ones(6, 4)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    add_gradients_in_place()
    weight: Any = torch.nn.Parameter(torch.randn(6, 4).bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad, hooks = total.clone(), False, []
    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulation.register_hook(lambda *_: hooks.append(weight.grad_added_to_main_grad))
    options = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": object()}
    monkeypatch.setattr(weight_gradient, "on_gpu", lambda _: True)
    sums, rows = [], [torch.randn(3, 1, 4).bfloat16().requires_grad_() for _ in range(micro_batches)]
    for x in rows:
        sums.append(multiply(linear_with_grad_accumulation_and_async_allreduce, x, weight, **options).square().sum())
    torch.stack(sums).sum().backward()
    for x in reversed(rows):
        y = torch.nn.functional.linear(x.detach(), weight.detach()).flatten(0, 1)
        total += (2 * y).t() @ x.detach().flatten(0, 1)
        assert torch.equal(x.grad, ((2 * y) @ weight.detach()).view_as(x))
    torch.testing.assert_close(weight.main_grad, total)
    assert hooks == [True] and weight.grad.untyped_storage().nbytes() == 2
    with torch.no_grad():
        multiply(linear_with_grad_accumulation_and_async_allreduce, rows[0], weight, **options)


class TwoProducts(torch.autograd.Function):
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
    (TwoProducts.apply(x, weight) + TwoProducts.apply(x, weight)).sum().backward()
    (of_weight,) = dropped
    assert of_weight.shape == weight.shape and weight.main_grad.eq(6).all()
