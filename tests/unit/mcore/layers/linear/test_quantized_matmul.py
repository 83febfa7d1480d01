"""An FP8 linear layer keeps only WGrad's operand of its input for the backward pass. Kernels are faked."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.kernels.linear import make_backend
from megatron_rl.mcore.layers.linear.quantized_matmul import Product, QuantizedMatmul
from megatron_rl.precision.fp8 import append_zeros, quantize_weight
from parallel.formats import FP8

pytestmark = pytest.mark.usefixtures("fake_libraries")

T, N, K = 160, 256, 384
_PADDED = 256  # T in whole blocks


def find_saved(name: str, x: torch.Tensor, learns: bool) -> list[torch.Tensor]:
    """Return the tensors saved for the backward pass, without the weight."""
    backend, weight = make_backend(name, FP8.with_scales("pow2")), torch.nn.Parameter(torch.randn(N, K), requires_grad=learns)
    layer = SimpleNamespace(backend=backend, operand=backend.prepare(quantize_weight(weight.detach(), "pow2"), None))
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


def test_the_reference_keeps_the_input_itself():
    x = torch.randn(T, K).bfloat16().requires_grad_()
    (saved,) = find_saved("emulated", x, learns=True)
    assert saved.data_ptr() == x.data_ptr()


def test_padding_copies_only_where_zeros_are_missing():
    x = torch.randn(T, K)
    assert append_zeros(x, -2, 0) is x and append_zeros(x[:150], -2, 10).shape == (160, K)
