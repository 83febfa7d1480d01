"""On Blackwell, SGLang's own functions move bytes of our weights, and the hooks keep them."""

import inspect
import os
import pkgutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries as fake_kernels
from support.fp8_reference import uneven, unpack_scales
from support.processes import call_in_fresh_process

from megatron_rl.precision.fp8 import dequantize_weight, quantize_1x128, quantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from rollout_sglang import derived_tensors
from rollout_sglang.hooks import blackwell, gpu_activation_quant, registry
from rollout_sglang.platform import stub_modules

ROWS, COLUMNS = 320, 640  # a partial block, and groups that do not fill their last word


def make_weight() -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks whose largest value rounds down to 224, and a block of tiny numbers, among others."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = weight[:128, :128].clamp(-1, 1)
    weight[5, 7] = 228.0 / 64  # 228 rounds to 224, which fits half the scale
    weight[128:256, 256:384] *= 1e-7
    return quantize_weight(weight, "pow2")


def as_object(target: str) -> str:
    """Return a hook's target as pkgutil's resolve_name takes it."""
    name = next(name for name in ("fp8_utils", "fp8_activation", "dual_gemm") if f".{name}." in target)
    module, _, rest = target.partition(f".{name}.")
    return f"{module}.{name}:{rest}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def import_as_on_blackwell():
    """Return SGLang's fp8_utils as on SM100, with the layout functions of a `deep_gemm` that SGLang's own torch code needs."""
    stub_modules.install()
    os.environ[gpu_activation_quant.SCALE_FORMAT_VARIABLE] = "pow2"
    from sglang.srt.layers.quantization import fp8_utils

    library, utils, layout = (ModuleType(name) for name in ("deep_gemm", "deep_gemm.utils", "deep_gemm.utils.layout"))
    utils.align = lambda size, multiple: -(-size // multiple) * multiple
    utils.get_tma_aligned_size = lambda size, itemsize: utils.align(size, 16 // itemsize)
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    library.utils, utils.layout = utils, layout
    sys.modules |= {module.__name__: module for module in (library, utils, layout)}
    fp8_utils.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = fp8_utils.deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = True
    return fp8_utils


def load(fp8_utils, data: torch.Tensor, scale: torch.Tensor) -> torch.nn.Module:
    """Return a layer that SGLang's own function has processed after loading."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(data.clone(), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale.clone(), requires_grad=False)
    fp8_utils.requant_block_scale_ue8m0_for_deepgemm(
        layer.weight, layer.weight_scale_inv, [128, 128], True, output_dtype=torch.bfloat16, weight_shape=layer.weight.shape
    )
    return layer


def move_bytes():
    fp8_utils = import_as_on_blackwell()
    data, scale = make_weight()
    layer = load(fp8_utils, data, scale)
    assert layer.weight_scale_inv.dtype == torch.int32, "no sync can fill them"
    scales = unpack_scales(layer.weight_scale_inv, COLUMNS // 128)[::128]
    moved = (layer.weight.view(torch.uint8) != data.view(torch.uint8)).view(ROWS, -1, 128).any(-1)
    moved = torch.stack([rows.any(0) for rows in moved.split(128)])
    assert moved[0, 0] and scales[0, 0] == scale[0, 0] / 2, "half the scale"
    assert moved[1, 2] and scales[1, 2] > scale[1, 2], "clamped at 1e-4"
    assert torch.equal(moved, scales != scale) and not moved.all()
    before, after = (dequantize_weight(QuantizedWeight(*pair)) for pair in ((data, scale), (layer.weight.data, scales)))
    assert torch.equal(before[:128], after[:128]), "values stay"
    assert not torch.equal(before[128:256, 256:384], after[128:256, 256:384]), "tiny numbers do not"


@pytest.mark.long
def test_without_the_hook_sglang_moves_bytes():
    call_in_fresh_process(move_bytes, OMP_NUM_THREADS="1")


def keep_all_bytes():
    fp8_utils = import_as_on_blackwell()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    transform = fp8_utils.transform_scale_ue8m0
    products = []
    hooks = [*registry.list_gpu_hooks(), *registry.list_blackwell_hooks()]
    for target, function, kind in registry.list_blackwell_hooks():
        theirs, ours = (list(inspect.signature(each).parameters) for each in (pkgutil.resolve_name(as_object(target)), function))
        assert theirs == ours[kind == "AROUND" :]

    def product(x, weight, *rest):
        products.append((x, weight, *rest))
        return torch.zeros(len(x), len(weight), dtype=torch.bfloat16)

    fp8_utils.w8a8_block_fp8_matmul_deepgemm = product
    for target, function, kind in hooks:
        HookRegistry.register(target, function, HookType[kind])
    HookRegistry.apply_hooks()
    assert {target for target, _, _ in hooks} == HookRegistry._patched and fp8_utils.w8a8_block_fp8_matmul_deepgemm is not product
    library = {name: module for name, module in sys.modules.items() if name.startswith("deep_gemm")}
    fake_kernels.install(pytest.MonkeyPatch())
    sys.modules |= library
    from sglang.kernels.ops.quantization import fp8_kernel

    fp8_utils.per_token_group_quant_fp8 = fp8_utils.sglang_per_token_group_quant_fp8 = fp8_kernel.sglang_per_token_group_quant_fp8
    fp8_utils.get_platform = lambda: SimpleNamespace(is_sm90=False, is_sm100=True)
    data, scale = make_weight()
    layer = load(fp8_utils, data, scale)
    assert same(layer.weight, data) and same(layer.weight_scale_inv, scale)
    assert not getattr(layer.weight_scale_inv, "format_ue8m0", False)
    packed = layer.weight_scale_inv.packed_ue8m0
    theirs = transform(scale, mn=ROWS)
    assert packed.stride() == theirs.stride() and same(packed, theirs), "DeepGEMM's layout"

    model = torch.nn.ModuleDict({"up": layer})
    served, proved = derived_tensors.ServedTensors(model), {name: tensor.data for name, tensor in model.named_parameters()}
    assert served.check(model, proved)["derived"] == 1 and not derived_tensors.find_unknown(model, proved.values())
    layer.weight_scale_inv.data.mul_(4)  # a sync
    with pytest.raises(ValueError, match=r"weight_scale_inv.packed_ue8m0 is stale"):
        served.check(model, proved)
    derived_tensors.refresh(model)
    assert served.check(model, proved)["derived"] == 1 and same(packed, transform(scale * 4, mn=ROWS))
    layer.weight_scale_inv.data[1, 1] = 3.0
    with pytest.raises(ValueError, match="no UE8M0 form"):
        derived_tensors.refresh(model)
    layer.weight_scale_inv.data.copy_(scale)

    for tokens in (1, 5, 8):
        x = uneven(tokens, COLUMNS, torch.bfloat16)
        fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback(x, layer.weight, [128, 128], layer.weight_scale_inv)
        a, b, a_scale, b_scale, *_ = products.pop()
        wanted, scales = quantize_1x128(x, "pow2")
        assert b is layer.weight and b_scale is packed and same(a, wanted)
        assert a_scale.dtype == torch.int32 and a_scale.stride(0) == 1 and a_scale.stride(1) % 4 == 0
        assert torch.equal(unpack_scales(a_scale, COLUMNS // 128), scales)
    experts = torch.nn.Parameter(data[None], requires_grad=False)
    with pytest.raises(NotImplementedError, match="the expert runner deep_gemm quantizes the activations"):
        fp8_utils.requant_block_scale_ue8m0_for_deepgemm(experts, scale[None], [128, 128], True, grouped_moe=True)
    assert not fp8_utils.requant_block_scale_ue8m0_for_deepgemm(experts, scale[None], [128, 128], False, grouped_moe=True)
    from sglang.srt import server_args
    from sglang.srt.layers.quantization import unquant

    names = {"attention_backend", "moe_runner_backend", "fp8_gemm_runner_backend"}
    choices = {name: set(getattr(server_args, f"{name.upper()}_CHOICES")) for name in names}
    return choices | {"bf16_gemm_backend": {each.value for each in unquant.Bf16GemmBackend}}


def choose_bf16_products():
    """SGLang's default on SM100 multiplies some numbers of tokens by another kernel."""
    import_as_on_blackwell()
    from sglang.srt.layers.quantization import unquant

    unquant.get_platform = lambda: SimpleNamespace(is_sm100=True)
    unquant.should_enable_bf16_splitk_gemm = lambda _: False
    name = "sglang.kernels.ops.gemm.cutedsl_bf16_gemm"
    sys.modules[name] = ModuleType(name)
    sys.modules[name].cutedsl_bf16_gemm = sys.modules[name].use_cutedsl_bf16_gemm = lambda *_: True
    execution = SimpleNamespace(kernel=SimpleNamespace(), deterministic=SimpleNamespace(enable_deterministic_inference=False))
    unquant.get_exec = lambda: execution
    for chosen, by_tokens in ((blackwell.SERVER_OPTIONS["bf16-gemm-backend"], False), ("auto", True)):
        execution.kernel.bf16_gemm_backend = chosen
        unquant.initialize_bf16_gemm_config()
        assert unquant.get_bf16_gemm_backend().is_cutedsl() is (unquant._use_cutedsl_bf16_gemm is not None) is by_tokens


@pytest.mark.long
def test_unquantized_products_do_not_depend_on_the_number_of_tokens():
    call_in_fresh_process(choose_bf16_products, OMP_NUM_THREADS="1")


@pytest.mark.long
def test_with_the_hooks_bytes_stay_and_deepgemm_reads_derived_scales():
    """Accepted and refused kernels are values of SGLang's arguments."""
    choices = call_in_fresh_process(keep_all_bytes, OMP_NUM_THREADS="1")
    for argument, refused in blackwell.REFUSED.items():
        assert refused.keys() <= choices[argument], refused.keys() - choices[argument]
    for argument, chosen in blackwell.SERVER_OPTIONS.items():
        name = argument.replace("-", "_").replace("fp8_gemm_backend", "fp8_gemm_runner_backend")
        assert chosen in choices[name] and chosen not in blackwell.REFUSED.get(name, {})


def test_hooks_exist_only_on_blackwell(monkeypatch):
    ours = registry.list_blackwell_hooks()
    for capability, wanted in (((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert all((hook in registry.list_gpu_hooks()) is wanted for hook in ours)
