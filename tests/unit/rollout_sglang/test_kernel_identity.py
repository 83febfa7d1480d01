"""Kernels of SGLang's live modules, with and without the hooks, as on a GPU and on a CPU."""

import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from support.processes import call_in_fresh_process

from megatron_rl.kernels.heads import reference as heads
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.kernels.split_attention import ORDER
from megatron_rl.kernels.split_attention import reference as split_attention
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.precision.graph.kernels import Kernel, identify, in_parts
from rollout_sglang.platform import stub_modules


class OtherBackend:
    def forward_extend(self):
        return 0

    def forward_decode(self):
        return 1


def patch(target, function, kind):
    """Patch as the registry of an engine does."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry._apply_target(target, [(HookType[kind], function, None)])


def a_live_module_is_named_by_its_hook_or_by_sglangs_method():
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.models import utils

    from rollout_sglang import kernel_identity
    from rollout_sglang.hooks import gpu_kernels

    torch.cuda.is_available = lambda: True
    module, activation = RMSNorm(8), SiluAndMul()
    module._forward_method, activation._forward_method = module.forward_cuda, activation.forward_cuda
    assert kernel_identity.identify_norm("norm", module).name == "sglang.srt.layers.layernorm.RMSNorm.forward_cuda"
    assert kernel_identity.identify_norm("attention.q_norm", module).name == "sglang.srt.models.utils.apply_qk_norm"
    patch("sglang.srt.layers.layernorm.RMSNorm.forward_cuda", gpu_kernels.apply_rms_norm, "AROUND")
    patch("sglang.srt.models.utils.apply_qk_norm", gpu_kernels.apply_head_norms, "AROUND")
    patch("sglang.srt.layers.activation.SiluAndMul.forward_cuda", gpu_kernels.multiply_by_gate, "REPLACE")
    assert kernel_identity.identify_norm("norm", module).name.startswith("sglang."), "the method was bound before"
    module._forward_method, activation._forward_method = module.forward_cuda, activation.forward_cuda
    assert kernel_identity.identify_norm("norm", module) == identify(norm.normalize, on_gpu=True)
    assert kernel_identity.identify_norm("attention.k_norm", module) == identify(heads.normalize_heads, on_gpu=True)
    assert kernel_identity.find_hook(utils.apply_qk_norm) is gpu_kernels.apply_head_norms
    assert kernel_identity.identify_live(kernel_identity.find_method(activation)) == identify(swiglu.multiply, on_gpu=True)
    activation.enter_torch_compile(num_tokens=1)
    assert kernel_identity.identify_live(kernel_identity.find_method(activation)).name.endswith("SiluAndMul.forward_native")


def attention_is_named_by_backend_and_splits():
    from rollout_sglang.hooks.split_attention import decode, extend
    from rollout_sglang.kernel_identity import identify_attention

    torch.cuda.is_available = lambda: True
    SplitBackend = type("SplitBackend", (), {"forward_extend": extend, "forward_decode": decode})

    flash, split = (identify_attention(SimpleNamespace(num_splits=number)) for number in (1, 0))
    assert flash.name == split.name == "sgl_kernel.flash_attn" and flash != split
    name = identify_attention(OtherBackend()).name
    assert identify_attention(SplitBackend()) == identify(split_attention.attend, ORDER, on_gpu=True)
    assert identify_attention(SplitBackend()).name == "kernels.split_attention.triton.attend"
    assert "OtherBackend.forward_decode and " in name and name.endswith("OtherBackend.forward_extend"), "two kernels are no common one"


def a_row_parallel_layer_is_named_by_its_parts_and_by_what_adds_them():
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.linear import RowParallelLinear

    from rollout_sglang.hooks import gpu_all_reduce, tree_reduction
    from rollout_sglang.kernel_identity import identify_row_parallel

    layer, product = RowParallelLinear.__new__(RowParallelLinear), Kernel("gemm", "1", "blocks")
    torch.nn.Module.__init__(layer)
    layer.tp_group = GroupCoordinator.__new__(GroupCoordinator)
    layer.tp_group.world_size = 2
    assert identify_row_parallel(layer, product) == product
    for parts, on_gpu, hook in (
        (4, False, ("sglang.srt.layers.linear.RowParallelLinear.forward", tree_reduction.run_row_parallel)),
        (2, True, ("sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce", gpu_all_reduce.all_reduce)),
    ):
        torch.cuda.is_available = lambda on_gpu=on_gpu: on_gpu
        os.environ[tree_reduction.PARTS_VARIABLE] = str(parts)
        assert identify_row_parallel(layer, product) == product, "SGLang adds in an order of its own"
        patch(*hook, "AROUND")
        assert identify_row_parallel(layer, product) == in_parts(product, parts)


CASES = [
    a_live_module_is_named_by_its_hook_or_by_sglangs_method,
    attention_is_named_by_backend_and_splits,
    a_row_parallel_layer_is_named_by_its_parts_and_by_what_adds_them,
]


@pytest.mark.parametrize("case", CASES)
def test_in_a_process_of_its_own(case):
    call_in_fresh_process(in_stubbed_process, case, OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1")


def in_stubbed_process(case):
    stub_modules.install()
    sys.modules["sgl_kernel"] = MagicMock()
    case()
