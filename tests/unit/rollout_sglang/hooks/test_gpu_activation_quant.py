"""The contract's activation quantizer replaces SGLang's everywhere in the installed release, or the layer is refused."""

import ast
import functools
import inspect
import itertools
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries as fake_kernels
from support.fp8_reference import uneven
from support.processes import call_in_fresh_process

from megatron_rl.precision.fp8 import quantize_1x128
from rollout_sglang.hooks import gpu_activation_quant, registry
from rollout_sglang.platform import stub_modules

SGLANG = Path(find_spec("sglang").origin).parent
LINEARS, EXPERTS = "srt/layers/quantization/fp8_utils.py", "kernels/ops/moe/fused_moe_triton_kernels.py"
KERNELS = "kernels/ops/quantization/"
RUN_GROUPS, GROUPS = "_run_per_token_group_quant_8bit_kernel", "sglang_per_token_group_quant_fp8"


@pytest.fixture(params=["pow2", "fp32"])
def scale_format(request, monkeypatch):
    """Use the reference quantizer instead of Triton's kernel."""
    fake_kernels.install(monkeypatch)
    monkeypatch.setenv(gpu_activation_quant.SCALE_FORMAT_VARIABLE, request.param)
    gpu_activation_quant.get_scale_format.cache_clear()
    yield request.param
    gpu_activation_quant.get_scale_format.cache_clear()


def assert_quantized(x, data, scale, scale_format, padded=False):
    wanted, scales = quantize_1x128(x, scale_format)
    if padded:
        assert not data[len(x) :].view(torch.uint8).any() and not scale[len(x) :].any()
        data, scale = data[: len(x)], scale[: len(x)]
    assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scale, scales)


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((SGLANG / file).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def find_function(target: str) -> ast.FunctionDef:
    """Return the function `sglang.module.function` or `sglang.module.class.function`."""
    *module, owner, name = target.removeprefix("sglang.").split(".")
    if (SGLANG / "/".join([*module, f"{owner}.py"])).exists():
        return functions_of("/".join([*module, f"{owner}.py"]))[name]
    tree = ast.parse((SGLANG / ("/".join(module) + ".py")).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    return next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)


def quantizers_called_by(file: str, name: str) -> set[str]:
    calls = (node.func for node in ast.walk(functions_of(file)[name]) if isinstance(node, ast.Call))
    called = {getattr(function, "id", getattr(function, "attr", "")) for function in calls}
    return {name for name in called if "quant" in name and not name.startswith(("dequant", "create_"))}


@pytest.mark.parametrize("target, function, kind", registry.list_gpu_hooks(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_replacements_take_the_same_arguments(target, function, kind):
    theirs = find_function(target).args
    ours = list(inspect.signature(function).parameters.values())
    if kind == "AROUND":
        assert ours.pop(0).name == "original"
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == [argument.arg for argument in theirs.args]
    assert [p.name for p in ours if p.kind is p.KEYWORD_ONLY] == [argument.arg for argument in theirs.kwonlyargs]
    assert sum(p.default is not p.empty for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD) == len(theirs.defaults)


@pytest.mark.parametrize("file, name, quantizers", [
    (LINEARS, "triton_w8a8_block_fp8_linear", {GROUPS, "per_token_group_quant_fp8"}),
    (LINEARS, "deepgemm_w8a8_block_fp8_linear_with_fallback", {GROUPS}),
    (LINEARS, "cutlass_w8a8_block_fp8_linear_with_fallback", {GROUPS + "_row_padded"}),
    (KERNELS + "fp8_kernel.py", GROUPS, {RUN_GROUPS, "sglang_per_token_quant_fp8", "_per_token_group_quant_8bit_raw"}),
    (KERNELS + "fp8_kernel.py", GROUPS + "_row_padded", {RUN_GROUPS, GROUPS}),
    ("srt/layers/moe/moe_runner/triton_utils/fused_moe.py", "_fused_moe_kernel_sequence", {"per_token_group_quant"}),
])  # fmt: skip
def test_a_release_that_quantizes_elsewhere_is_noticed(file, name, quantizers):
    """`_per_token_group_quant_8bit_raw` is called only for dtypes other than E4M3, or if SGLang sees no CUDA."""
    assert quantizers_called_by(file, name) == quantizers
    experts = quantizers_called_by(EXPERTS, "invoke_fused_moe_kernel")
    assert {name for name in experts if "group_quant_fp8" in name} == {GROUPS, "per_token_group_quant_fp8"}
    assert "per_token_group_quant_fp8 = sglang_per_token_group_quant_fp8" in (SGLANG / KERNELS / "fp8_kernel.py").read_text()


def test_the_installed_kernels_have_the_formulas_of_the_named_references():
    """`support.fp8_reference`, line by line."""
    source = (SGLANG / "kernels/jit/csrc/gemm/per_token_group_quant.cuh").read_text()
    helpers = (SGLANG / "kernels/jit/include/sgl_kernel/deepseek_v4/fp8_utils.cuh").read_text()
    for line in ("1e-10f)", "kMaxValueInv = 1.f / kMaxValue", "raw_scale = amax * kMaxValueInv", "quant_scale = kMaxValue / amax"):
        assert line in source
    assert "return exp + (mant != 0);" in helpers and "(127 + 127 - exp) << 23" in helpers
    assert '"--use_fast_math"' in (SGLANG / KERNELS / "per_token_group_quant.py").read_text()
    triton = (SGLANG / KERNELS / "fp8_kernel.py").read_text()
    assert "y_s = _absmax / bit8_max\n    y_s_inv = 1.0 / y_s" in triton


def test_quantization_outside_the_contract_is_refused(scale_format):
    x = uneven(4, 256, torch.bfloat16)
    for options in ({"group_size": 64}, {"out_dtype": torch.int8}, {"output_s": torch.zeros(4, 1, dtype=torch.int32), "output_q": x}):
        with pytest.raises(NotImplementedError, match="outside the precision contract"):
            gpu_activation_quant.quantize_groups(x, **options)
    with pytest.raises(NotImplementedError, match="SwiGLU and quantization in one kernel"):
        gpu_activation_quant.quantize_groups(x, fuse_silu_and_mul=True)
    with pytest.raises(NotImplementedError, match="outside the precision contract"):
        gpu_activation_quant.quantize_tokens(x)  # a scale for 256 features
    if scale_format == "fp32":
        with pytest.raises(NotImplementedError, match="asks for power-of-two scales, but precision.scale_format is fp32"):
            gpu_activation_quant.quantize_groups(x, scale_ue8m0=True)


def test_an_engine_that_was_not_told_the_format_quantizes_nothing(monkeypatch):
    monkeypatch.delenv(gpu_activation_quant.SCALE_FORMAT_VARIABLE, raising=False)
    gpu_activation_quant.get_scale_format.cache_clear()
    with pytest.raises(RuntimeError, match="MEGATRON_RL_SCALE_FORMAT is None"):
        gpu_activation_quant.quantize_groups(torch.zeros(4, 128))


def linear_method(name: str, module: str = "sglang.srt.layers.quantization.fp8_utils", **changes: object) -> SimpleNamespace:
    def function() -> None: ...

    function.__name__, function.__module__ = name, module
    settings = {"use_marlin": False, "use_mxfp8": False, "block_fp8_as_mxfp8": False, **changes}
    return SimpleNamespace(w8a8_block_fp8_linear=functools.partial(function, act_scale_ue8m0=True), **settings)


def layer_scale(dtype: torch.dtype = torch.float32, again: bool = False) -> torch.Tensor:
    """Scales as a layer holds them."""
    scale = torch.ones(1, 1, dtype=dtype)
    scale.format_ue8m0 = again
    return scale


TRITON = "triton_w8a8_block_fp8_linear"


@pytest.mark.parametrize("method, scale, words", [
    (linear_method("fp8_blockscale_gemm_sm90"), layer_scale(), "fp8_blockscale_gemm_sm90's"),
    (linear_method(TRITON, module="elsewhere"), layer_scale(), "triton_w8a8_block_fp8_linear's"),
    (linear_method(TRITON, use_marlin=True), layer_scale(), "Marlin's or MXFP8's"),
    (linear_method(TRITON, block_fp8_as_mxfp8=True), layer_scale(), "Marlin's or MXFP8's"),
    (linear_method(TRITON), layer_scale(torch.int32), "packed ue8m0"),
    (linear_method(TRITON), layer_scale(again=True), "packed ue8m0"),
])  # fmt: skip
def test_a_live_layer_with_another_quantizer_says_so(monkeypatch, scale_format, method, scale, words):
    """`check_live_engine` refuses everything other than pow2 and fp32, with these words."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert words in gpu_activation_quant.read_linear_scale_format(method, SimpleNamespace(weight_scale_inv=scale))


def test_a_live_layer_with_the_contracts_quantizer_says_its_format(monkeypatch, scale_format):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layer = SimpleNamespace(weight_scale_inv=layer_scale())
    for name in gpu_activation_quant.DENSE_FUNCTIONS:
        assert gpu_activation_quant.read_linear_scale_format(linear_method(name), layer) == scale_format
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gpu_activation_quant.read_linear_scale_format(linear_method(TRITON), layer) == "an AMD GPU's"


@pytest.mark.parametrize("runner, words", [("triton", ""), *((name, f"the expert runner {name}'s") for name in ("deep_gemm", None))])
def test_live_experts_are_read_by_their_runner(monkeypatch, scale_format, runner, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = None if runner is None else SimpleNamespace(value=runner, is_triton=lambda: runner == "triton")
    method = SimpleNamespace(get_moe_runner_backend=lambda _: backend)
    layer = SimpleNamespace(w13_weight_scale_inv=layer_scale(), w2_weight_scale_inv=layer_scale())
    assert gpu_activation_quant.read_expert_scale_format(method, layer) == (words or scale_format)
    layer.w2_weight_scale_inv = layer_scale(torch.int32)
    packed = "packed ue8m0 (its weights were requantized)"
    assert gpu_activation_quant.read_expert_scale_format(method, layer) == (words or packed)


SIZES = ((5, 384), (130, 256), (3, 128), (1, 512))


def check_quantizers(kernels, groups, scale_format):
    """Check SGLang's entry points to its quantizer in every requested layout."""
    layouts = [{}, {"column_major_scales": True}, {"column_major_scales": True, "scale_tma_aligned": True}]
    layouts += [{"scale_ue8m0": True}] if scale_format == "pow2" else []
    for tokens, width in SIZES:
        x = uneven(tokens, width, torch.bfloat16)
        for options in layouts:
            data, scale = kernels.sglang_per_token_group_quant_fp8(x, 128, **options)
            assert_quantized(x, data, scale, scale_format)
            assert options == {} or scale.stride(0) == (1 if options.get("column_major_scales") else width // 128)
        assert_quantized(x, *kernels.sglang_per_token_group_quant_fp8_row_padded(x, 128), scale_format, padded=True)
        assert_quantized(x, *groups.per_token_group_quant(x, sorted_token_ids=torch.zeros(tokens), num_valid_tokens=1), scale_format)
        assert groups.per_token_group_quant(x, column_major_scales=True)[1].stride() == (1, -(-tokens // 4) * 4)
        if width == 128:
            assert_quantized(x, *kernels.sglang_per_token_quant_fp8(x), scale_format)
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
            assert_quantized(x, *operand, "pow2", padded=True)


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


def check_experts(experts, scale_format):
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
        assert_quantized(x, *kept[-1], scale_format)
    assert len(kept) == len(SIZES)


def check_gpu_code():
    """Run SGLang's own GPU code for block FP8 with the hooks, up to its matrix products.

    The reference quantizer replaces Triton's kernel, and functions that keep their operands replace the products. Hooks change SGLang
    permanently, so this needs a process of its own.
    """
    stub_modules.install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function, kind in registry.list_gpu_hooks():
        HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()
    assert {target for target, _, _ in registry.list_gpu_hooks()} == HookRegistry._patched
    from sglang.kernels.ops.moe import fused_moe_triton_kernels
    from sglang.kernels.ops.quantization import fp8_kernel, per_token_group_quant
    from sglang.srt.layers.quantization import fp8, fp8_utils

    fake_kernels.install(pytest.MonkeyPatch())
    for scale_format in ("pow2", "fp32"):
        os.environ[gpu_activation_quant.SCALE_FORMAT_VARIABLE] = scale_format
        gpu_activation_quant.get_scale_format.cache_clear()
        check_quantizers(fp8_kernel, per_token_group_quant, scale_format)
        if scale_format == "pow2":
            check_dense(fp8_utils, fp8_kernel)
            check_layout(fp8_utils, fp8)
        check_experts(fused_moe_triton_kernels, scale_format)


def test_sglangs_own_gpu_code_comes_to_the_contracts_quantizer():
    """On every path and in every layout, with the hooks applied as in an engine."""
    call_in_fresh_process(check_gpu_code, OMP_NUM_THREADS="1")
