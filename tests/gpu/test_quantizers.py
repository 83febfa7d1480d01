"""Every library's quantizer against the project's reference, bit by bit: E4M3 bytes and FP32 scales, in both scale formats.

test_backends.py has this project's kernel and what back ends quantize. The reference has Transformer Engine's formula. SGLang and DeepGEMM
round FP32 scales in another order, and DeepGEMM's helpers clamp a block's largest value at 1e-4: there the report counts the values that
differ, and only a shape that differs is a fault.
"""

import pytest
import torch
from support import fake_gpu_libraries
from support.fp8_reference import quantize_128x1, uneven

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.fp8 import quantize_1x128, quantize_weight, round_trip_1x128, round_trip_128x1
from parallel.formats import FP8

REFERENCES = {"1x128": quantize_1x128, "128x1": quantize_128x1, "128x128": quantize_weight}


def ordinary(tokens, width):
    """Return bf16 normal values times 2^-6 to 2^6 by token, so that no two blocks share a scale by chance."""
    generator = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=generator)
    return (values * torch.exp2(torch.randint(-6, 7, (tokens, 1), generator=generator).float())).bfloat16()


def extreme(tokens, width):
    """Return bf16 values with blocks of zeros, below 1e-4 and of large values, and with exact ties between two E4M3 values."""
    values = uneven(tokens, width, torch.bfloat16)
    values[: tokens // 8] = 0.0
    return values


VALUES = {"ordinary": ordinary, "extreme": extreme}


def must_agree(library, scale_format, values):
    """Return whether a difference is a fault, not a known property of the library."""
    if library == "deep_gemm":
        return scale_format == "pow2" and values == "ordinary"
    return library != "sglang" or scale_format == "pow2"


def transformer_engine_weight(x, scale_format):
    backend = make_backend("transformer_engine", FP8.with_scales(scale_format))
    metadata = backend.weight_quantizer(x).get_metadata()  # the project itself quantizes weights by the reference only
    return metadata["rowwise_data"], metadata["rowwise_scale_inv"][:, : -(-x.shape[1] // 128)]


def sglang_rows(x, scale_format):
    """SGLang's own kernel: in this process the engine's plug-in is not loaded."""
    kernel = pytest.importorskip("sglang.kernels.ops.quantization.fp8_kernel")
    return kernel.sglang_per_token_group_quant_fp8(x, 128, scale_ue8m0=scale_format == "pow2")


def deep_gemm_rows(x, scale_format):
    return pytest.importorskip("deep_gemm.utils.math").per_token_cast_to_fp8(x, use_ue8m0=scale_format == "pow2")


def deep_gemm_weight(x, scale_format):
    return pytest.importorskip("deep_gemm.utils.math").per_block_cast_to_fp8(x, use_ue8m0=scale_format == "pow2")


QUANTIZERS = {
    **{("reference on the device", granularity): function for granularity, function in REFERENCES.items()},
    ("transformer_engine", "128x128"): transformer_engine_weight,
    ("sglang", "1x128"): sglang_rows,
    ("deep_gemm", "1x128"): deep_gemm_rows,
    ("deep_gemm", "128x128"): deep_gemm_weight,
}
WITHOUT_STAND_INS = (("transformer_engine", "128x128"), ("sglang", "1x128"), ("deep_gemm", "1x128"), ("deep_gemm", "128x128"))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("values", VALUES)
def test_bytes_and_scales_are_the_references(device, backends, scale_format, values, subtests, record_property):
    x = VALUES[values](1024, 2048) if device == "cuda" else VALUES[values](128, 256)
    for (library, granularity), quantize in QUANTIZERS.items():
        absent = library in ("transformer_engine", "deep_gemm") and library not in backends
        if absent or (device == "cpu" and (library, granularity) in WITHOUT_STAND_INS):
            continue
        with subtests.test(library=library, granularity=granularity):
            data, scale = (tensor.cpu() for tensor in quantize(x.to(device), scale_format))
            expected_data, expected_scale = REFERENCES[granularity](x, scale_format)
            different_bytes = count_differences(data.view(torch.uint8), expected_data.view(torch.uint8))
            different_scales = count_differences(scale, expected_scale)
            message = f"{different_bytes} bytes and {different_scales} scales of {x.numel()} values differ"
            record_property(f"{library} {granularity}, {scale_format}, {values} values", message)
            if must_agree(library, scale_format, values):
                assert different_bytes == different_scales == 0, message


def count_differences(values, expected):
    assert values.shape == expected.shape and values.dtype == expected.dtype
    return int((values.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("round_trip", [round_trip_1x128, round_trip_128x1])
def test_activations_round_to_the_same_values_on_the_device(device, scale_format, round_trip):
    x = extreme(384, 640).float()
    assert torch.equal(round_trip(x, scale_format), round_trip(x.to(device), scale_format).cpu())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])  # the stand-ins are one kernel after the other
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_that_quantizes_has_the_bits_of_one_kernel_after_the_other(device, scale_format, adds):
    from megatron_rl.kernels.norm.triton import quantize_norm
    from megatron_rl.kernels.quantize.triton import quantize_activation

    x, residual, weight = ordinary(1000, 4096).to(device), extreme(1000, 4096).to(device), ordinary(1, 4096)[0].to(device)
    total, statistic, *found = quantize_norm(x, residual if adds else None, weight, 1e-6, scale_format, columns=True)
    assert torch.equal(total, x + residual if adds else x)
    assert torch.allclose(statistic, torch.rsqrt(total.float().square().mean(-1) + 1e-6), rtol=1e-5)
    normed = (total.float() * statistic[:, None] * weight.float()).bfloat16()
    for pair, wanted in zip(found, quantize_activation(normed, scale_format, rows=True, columns=True), strict=True):
        assert not any(count_differences(*each) for each in zip(pair, wanted, strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])  # the stand-ins are one kernel after the other
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_what_goes_to_experts_has_the_bits_of_one_kernel_after_the_other(device, scale_format):
    from megatron_rl.kernels.experts.reference import collect, scatter_tokens, sum_tokens, weigh
    from megatron_rl.kernels.experts.triton import pack, quantize_weighed, spread_packed
    from megatron_rl.kernels.quantize.triton import quantize_activation

    groups, weights = TokenGroups.from_counts(torch.tensor([[300, 0, 3], [41, 0, 400]]), device), torch.rand(744, device=device)
    x, outputs = extreme(744, 2048).to(device), ordinary(groups.rows, 2048).to(device)
    weighed = weigh(x, weights)
    *found, of_weights = quantize_weighed(x, outputs, weights, groups, scale_format, columns=True)
    rows, _ = quantize_activation(fake_gpu_libraries.spread(weighed, groups), scale_format, rows=True, columns=False)
    for pair, wanted in zip(found, quantize_activation(weighed, scale_format, rows=True, columns=True, groups=groups), strict=True):
        assert not any(count_differences(*each) for each in zip(pair, wanted, strict=True))
    assert not any(count_differences(*each) for each in zip(found[0], rows, strict=True))
    assert torch.allclose(of_weights, (x.float() * outputs[groups.places]).sum(-1), rtol=1e-3, atol=1e-3 * float(of_weights.abs().max()))
    assert torch.equal(collect(outputs, groups.places, weights), weigh(outputs[groups.places], weights))
    order = torch.randperm(744 * 8, device=device).view(744, 8)
    scattered, packed = scatter_tokens(x, order), pack(x, order, scale_format)
    assert all(torch.equal(scattered[places], x) for places in order.unbind(1)) and torch.equal(packed[order[:, 0]], packed[order[:, 7]])
    rows, _ = quantize_activation(x, scale_format, rows=True, columns=False, groups=groups)
    for a, b in zip(spread_packed(packed[order[:, 3]], groups), rows, strict=True):
        assert not count_differences(a[groups.places], b[groups.places])
    assert torch.allclose(sum_tokens(scattered, order).float(), 8 * x.float(), rtol=2**-7)


def test_extreme_values_are_what_quantizers_stumble_over():
    largest = extreme(1024, 2048).float().abs().unflatten(1, (-1, 128)).amax(2)
    assert (largest == 0).any() and ((largest > 0) & (largest < 1e-4)).any() and (largest > 1e4).any() and largest.isfinite().all()
    assert ordinary(1024, 2048).float().abs().unflatten(1, (-1, 128)).amax(2).min() > 1e-4
