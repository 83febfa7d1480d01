"""Norms and SwiGLU quantize their result for the FP8 layer behind them, and for no other. Kernels are the references."""

from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries
from support.fp8_reference import same_bits, uneven

from megatron_rl.precision.fp8 import quantize_1x128
from rollout_sglang.hooks import blackwell, gpu_activation_quant, gpu_kernels, quantized_rows, rank_kernels, tree_reduction

WIDTH, FFN = 256, 384


def deep_gemm(*_, **__): ...


deep_gemm.__name__ = rank_kernels.FP8_FUNCTION


def make_linear(rows, columns, function=deep_gemm, dtype=torch.bfloat16):
    weight, method = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), SimpleNamespace(w8a8_block_fp8_linear=function)
    return SimpleNamespace(weight=weight, quant_method=method, orig_dtype=dtype, weight_scale_inv=None)


def make_norm():
    flags = dict.fromkeys(("fp32_residual", "cast_x_before_out_mul", "override_orig_dtype", "variance_size_override"))
    return SimpleNamespace(weight=torch.linspace(-1, 2, WIDTH).bfloat16(), variance_epsilon=1e-6, **flags)


def make_layer(qkv, gate_up, down):
    attention, mlp = SimpleNamespace(qkv_proj=qkv), SimpleNamespace(gate_up_proj=gate_up, act_fn=SimpleNamespace(), down_proj=down)
    return SimpleNamespace(self_attn=attention, mlp=mlp, input_layernorm=make_norm(), post_attention_layernorm=make_norm())


@pytest.fixture(params=["pow2", "fp32"])
def scale_format(request, monkeypatch):
    fake_gpu_libraries.install(monkeypatch)
    monkeypatch.setattr(blackwell, "is_blackwell", lambda: False)
    monkeypatch.setattr(quantized_rows, "get_scale_format", lambda: request.param)
    return request.param


def load(*layers):
    runner = SimpleNamespace(model=SimpleNamespace(model=SimpleNamespace(layers=layers)))
    assert quantized_rows.load_model(lambda _: "loaded", runner) == "loaded"
    return layers


def test_a_dense_layers_operators_quantize_for_their_linear_layers(scale_format):
    (layer,) = load(make_layer(make_linear(512, WIDTH), make_linear(2 * FFN, WIDTH), make_linear(WIDTH, FFN)))
    x, residual = (uneven(5, WIDTH, torch.bfloat16) for _ in range(2))
    given = []
    receive = lambda method, linear, x, bias: given.append(x)  # noqa: E731
    normed, total = gpu_kernels.apply_rms_norm(None, layer.input_layernorm, x, residual)
    assert torch.equal(total, x + residual) and torch.equal(normed, gpu_kernels.apply_rms_norm(None, make_norm(), total))
    product = gpu_kernels.multiply_by_gate(layer.mlp.act_fn, gate_up := uneven(5, 2 * FFN, torch.bfloat16).clamp(-80, 80))
    assert torch.equal(product, gpu_kernels.multiply_by_gate(SimpleNamespace(), gate_up))
    for linear, result in ((layer.self_attn.qkv_proj, normed), (layer.mlp.down_proj, product)):
        quantized_rows.apply_linear(receive, linear.quant_method, linear, result)
        rows = given.pop()
        assert same_bits(rows, quantize_1x128(result, scale_format)) and rows[1].stride() == (1, 8)
        quantized_rows.apply_linear(receive, linear.quant_method, linear, result.view(-1, result.shape[1]))
        assert isinstance(given.pop(), torch.Tensor), "a view is quantized by the layer"
        quantized_rows.apply_linear(receive, None, make_linear(128, len(result), None), result)
        assert given.pop() is result
    assert not hasattr(gpu_kernels.apply_rms_norm(None, layer.input_layernorm, x[:0]), quantized_rows._ROWS)


def test_a_sum_by_the_tree_reads_the_rows(scale_format, monkeypatch):
    (layer,) = load(make_layer(make_linear(512, WIDTH), make_linear(2 * FFN, WIDTH), make_linear(WIDTH, FFN)))
    given = []
    monkeypatch.setattr(tree_reduction.tree, "multiply_blocks", lambda rows, blocks: given.append(rows))
    monkeypatch.setattr(gpu_activation_quant, "quantize_groups", lambda x, column_major_scales: given.append("quantized again"))
    product = gpu_kernels.multiply_by_gate(layer.mlp.act_fn, uneven(5, 2 * FFN, torch.bfloat16).clamp(-80, 80))
    tree_reduction.multiply_on_gpu(layer.mlp.down_proj, product)
    assert same_bits(given.pop(), quantize_1x128(product, scale_format)) and not given


def test_other_layers_quantize_themselves(scale_format, monkeypatch):
    """Experts, BF16, and shapes and scales that are not DeepGEMM's."""
    experts = make_layer(make_linear(512, WIDTH), None, None)
    experts.mlp = SimpleNamespace(experts=None)
    odd = make_layer(make_linear(100, WIDTH), make_linear(2 * FFN, WIDTH, lambda: None), make_linear(WIDTH, FFN, dtype=torch.float16))
    load(experts, odd, SimpleNamespace())
    monkeypatch.setattr(blackwell, "is_blackwell", lambda: True)
    (packed,) = load(make_layer(make_linear(512, WIDTH), make_linear(2 * FFN, WIDTH), make_linear(WIDTH, FFN)))
    x = uneven(5, WIDTH, torch.bfloat16)
    assert quantized_rows.quantizes(experts.input_layernorm, x) and not quantized_rows.quantizes(experts.input_layernorm, x.float())
    others = [experts.post_attention_layernorm]
    for layer in (odd, packed):
        others += [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.act_fn]
    assert not any(quantized_rows.quantizes(each, x) for each in others)
