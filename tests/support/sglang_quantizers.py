"""SGLang's own GPU code for block FP8 with this project's hooks, run up to its matrix products: `python -m support.sglang_quantizers`.

The reference quantizer replaces Triton's kernel, and functions that keep their operands replace the products. This tests that each path of
SGLang reaches our quantizer, and with which layouts. It needs its own process, because hooks change SGLang permanently.
"""

import itertools
import os
from types import SimpleNamespace

import torch

from megatron_rl.precision.fp8 import quantize_1x128
from rollout_sglang.hooks import gpu_activation_quant, registry
from rollout_sglang.platform import stub_modules
from support import fake_gpu_libraries as fake_kernels
from support.fp8_reference import uneven

SIZES = ((5, 384), (130, 256), (3, 128), (1, 512))


class Setting:
    """pytest's monkeypatch without undo."""

    setattr = staticmethod(setattr)

    @staticmethod
    def setitem(mapping, key, value):
        mapping[key] = value


def check(x, data, scale):
    """Check for the contract's bytes and scales; padded rows are zeros."""
    wanted, scales = quantize_1x128(x, gpu_activation_quant.get_scale_format())
    assert torch.equal(data[: len(x)].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale[: len(x)], scales)
    assert not data[len(x) :].view(torch.uint8).any() and not scale[len(x) :].any()


def check_quantizers(kernels, groups):
    """Check SGLang's entry points to its quantizer in every requested layout."""
    column, aligned = {"column_major_scales": True}, {"column_major_scales": True, "scale_tma_aligned": True}
    for tokens, width in SIZES:
        x = uneven(tokens, width, torch.bfloat16)
        for options in ({}, column, aligned, {"scale_ue8m0": True}):
            data, scale = kernels.sglang_per_token_group_quant_fp8(x, 128, **options)
            check(x, data, scale)
            assert options == {} or scale.stride(0) == (1 if options.get("column_major_scales") else width // 128)
        check(x, *kernels.sglang_per_token_group_quant_fp8_row_padded(x, 128))
        check(x, *groups.per_token_group_quant(x, sorted_token_ids=torch.zeros(tokens), num_valid_tokens=1))
        assert groups.per_token_group_quant(x, column_major_scales=True)[1].stride() == (1, -(-tokens // 4) * 4)
        assert kernels.sglang_per_token_group_quant_fp8(x[:0], 128)[0].shape == (0, width)


def check_dense(linears, kernels):
    """Check the functions that `activations.read_linear_scale_format` accepts. The last two fall back to Triton's for unsuitable shapes."""
    operands = []

    def product(x, weight, scale, *_, **__):
        operands.append((x, scale))
        return torch.zeros(len(x), max(weight.shape), dtype=torch.bfloat16)

    linears.per_token_group_quant_fp8 = kernels.sglang_per_token_group_quant_fp8  # as SGLang binds it where it sees CUDA
    linears.w8a8_block_fp8_matmul_triton = linears.w8a8_block_fp8_matmul_deepgemm = product
    linears.fp8_blockwise_scaled_mm = lambda x, weight, scale, _, out_dtype: product(x, weight, scale)
    linears.get_platform = lambda: SimpleNamespace(is_sm90=True, is_sm100=False)
    names, widths = gpu_activation_quant.DENSE_FUNCTIONS, (640, 600)  # 600 suits Triton alone
    for name, (tokens, width), features in itertools.product(names, SIZES, widths):
        x, before = uneven(tokens, width, torch.bfloat16), len(operands)
        weight, scale = torch.zeros(features, width, dtype=torch.float8_e4m3fn), torch.ones(5, width // 128)
        formats = ({},) if name.startswith("cutlass") else ({}, {"act_scale_ue8m0": True})
        for told in formats:
            y = getattr(linears, name)(x, weight, [128, 128], scale, **told)
            assert y.shape == (tokens, max(features, width))
        assert len(operands) == before + len(formats)
        for operand in operands[before:]:
            check(x, *operand)


def check_layout(linears, method):
    """Check that scales of a dense layer have DeepGEMM's layout, tokens innermost, even if the checkpoint says ue8m0."""
    kept = []

    def product(x, weight, scale, *_, **__):
        kept.append(scale)
        return torch.zeros(len(x), len(weight), dtype=torch.bfloat16)

    linears.w8a8_block_fp8_matmul_deepgemm, linears.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = product, True
    weight, scale = torch.zeros(640, 384, dtype=torch.float8_e4m3fn), torch.ones(5, 3)
    for told in (False, True):
        linear = method.dispatch_w8a8_block_fp8_linear([128, 128], act_scale_ue8m0=told)
        linear(uneven(5, 384, torch.bfloat16), weight, [128, 128], scale)
        assert kept[-1].stride() == (1, 8), kept[-1].stride()


def check_experts(experts):
    """Check both layers of experts in Triton."""
    kept = []

    class Kernel:
        def __getitem__(self, _):
            return lambda *arguments, **__: kept.append((arguments[0], arguments[6]))

    experts.fused_moe_kernel, experts._is_cuda = Kernel(), True
    experts.triton = SimpleNamespace(cdiv=lambda size, block: -(-size // block))
    experts.should_enable_swap_ab = lambda *_: False
    ids = torch.zeros(16, dtype=torch.int32)
    for tokens, width in SIZES:
        x, weight = uneven(tokens, width, torch.bfloat16), torch.zeros(2, 256, width, dtype=torch.float8_e4m3fn)
        chosen = torch.zeros(tokens, 1, dtype=torch.int32)
        scale, y = torch.ones(2, 2, width // 128), torch.zeros(tokens, 1, 256, dtype=torch.bfloat16)
        sizes = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128}
        places = (chosen.float(), chosen, ids, ids, ids, False, 1, sizes, "bf16", True, False, False, False, False)
        experts.invoke_fused_moe_kernel(x, weight, None, y, None, scale, None, *places, block_shape=[128, 128])
        check(x, *kept[-1])
    assert len(kept) == len(SIZES)


def main():
    stub_modules.install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function, kind in registry.list_gpu_hooks():
        HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()
    assert {target for target, _, _ in registry.list_gpu_hooks()} == HookRegistry._patched
    from sglang.kernels.ops.moe import fused_moe_triton_kernels
    from sglang.kernels.ops.quantization import fp8_kernel, per_token_group_quant
    from sglang.srt.layers.quantization import fp8, fp8_utils

    fake_kernels.install(Setting())
    for scale_format in ("pow2", "fp32"):
        os.environ[gpu_activation_quant.SCALE_FORMAT_VARIABLE] = scale_format
        gpu_activation_quant.get_scale_format.cache_clear()
        if scale_format == "pow2":
            check_quantizers(fp8_kernel, per_token_group_quant)
            check_dense(fp8_utils, fp8_kernel)
            check_layout(fp8_utils, fp8)
        check_experts(fused_moe_triton_kernels)


if __name__ == "__main__":
    main()
