"""The contract's activation quantizer replaces SGLang's everywhere in the installed release, or the layer is refused."""

import ast
import functools
import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries as fake_kernels
from support.fp8_reference import engine_layouts, uneven
from support.processes import ROOT, one_thread_environment

from megatron_rl.precision.fp8 import quantize_1x128
from rollout_sglang.hooks import gpu_activation_quant, registry

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


def assert_quantized(data, scale, x, scale_format):
    wanted, scales = quantize_1x128(x, scale_format)
    assert torch.equal(data.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scale, scales)


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((SGLANG / file).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def quantizers_called_by(file: str, name: str) -> set[str]:
    calls = (node.func for node in ast.walk(functions_of(file)[name]) if isinstance(node, ast.Call))
    called = {getattr(function, "id", getattr(function, "attr", "")) for function in calls}
    return {name for name in called if "quant" in name and not name.startswith(("dequant", "create_"))}


@pytest.mark.parametrize("target, function, kind", registry.list_gpu_hooks(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_replacements_take_the_same_arguments(target, function, kind):
    module, _, name = target.removeprefix("sglang.").rpartition(".")
    theirs = functions_of(module.replace(".", "/") + ".py")[name].args
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


def test_every_layout_holds_the_references_bytes(scale_format):
    for tokens, width in ((5, 384), (130, 128)):
        x = uneven(tokens, width, torch.bfloat16)
        for data, scale in engine_layouts(x):
            options = {"scale_ue8m0": False, "fuse_silu_and_mul": False, "masked_m": None}
            gpu_activation_quant.run_group_quantizer(x, data, scale, 128, 1e-10, -448.0, 448.0, **options)
            assert_quantized(data, scale, x, scale_format)
        assert_quantized(*gpu_activation_quant.quantize_groups(x), x, scale_format)
        data, scale = gpu_activation_quant.quantize_groups(x, column_major_scales=True)
        assert_quantized(data, scale, x, scale_format)
        assert scale.stride() == (1, -(-tokens // 4) * 4)
    assert_quantized(*gpu_activation_quant.quantize_tokens(x), x, scale_format)


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


def test_sglangs_own_gpu_code_comes_to_the_contracts_quantizer():
    """Runs SGLang's dense layers and experts up to their products, with the hooks applied as in an engine."""
    environment = {**one_thread_environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "support.sglang_quantizers"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
