"""The engine's quantizer on a GPU: the contract's bytes in every layout, and SGLang's own kernel, whose formula has a name in the tests."""

import pytest
import torch
from support import fp8_reference as library_scales
from support.fp8_reference import engine_layouts, same_bits, uneven

from megatron_rl.precision.fp8 import quantize_1x128
from rollout_sglang.hooks import gpu_activation_quant

pytestmark = pytest.mark.gpu

SIZES = ((1, 128), (3, 384), (130, 128), (1000, 2048))


@pytest.fixture(params=["pow2", "fp32"])
def scale_format(request, monkeypatch):
    monkeypatch.setenv(gpu_activation_quant.SCALE_FORMAT_VARIABLE, request.param)
    gpu_activation_quant.get_scale_format.cache_clear()
    yield request.param
    gpu_activation_quant.get_scale_format.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_every_layout_holds_the_references_bytes(scale_format, compiled):
    quantize = torch.compile(gpu_activation_quant.quantize, dynamic=True) if compiled else gpu_activation_quant.quantize
    for tokens, width in SIZES:
        x = uneven(tokens, width, torch.bfloat16, "cuda")
        for data, scale in engine_layouts(x):
            quantize(x, data, scale)
            assert same_bits((data, scale), quantize_1x128(x, scale_format))


def test_a_captured_graph_quantizes_anew(scale_format):
    """As an engine decodes: the launch is recorded once, and replayed on other values."""
    x = uneven(64, 512, torch.bfloat16, "cuda")
    data, scale = engine_layouts(x)[0]
    gpu_activation_quant.quantize(x, data, scale)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_activation_quant.quantize(x, data, scale)
    x.mul_(-3)
    graph.replay()
    assert same_bits((data, scale), quantize_1x128(x, scale_format))


def test_sglangs_own_kernel_has_the_named_formula():
    """FP32: the scale, bit by bit. Powers of two: scale and bytes are the contract's."""
    sglang = pytest.importorskip("sglang.kernels.ops.quantization.fp8_kernel")
    x = uneven(1000, 2048, torch.bfloat16, "cuda")
    if hasattr(sglang._run_per_token_group_quant_8bit_kernel, "__wrapped__"):
        pytest.skip("SGLang's kernel was replaced in this process")
    amax = x.float().abs().unflatten(1, (-1, 128)).amax(2).cpu().numpy()
    _, scale = sglang.sglang_per_token_group_quant_fp8(x, 128)
    assert torch.equal(scale.cpu(), torch.from_numpy(library_scales.sglang_cuda_fp32(amax)[0]))
    assert same_bits(sglang.sglang_per_token_group_quant_fp8(x, 128, scale_ue8m0=True), quantize_1x128(x, "pow2"))
