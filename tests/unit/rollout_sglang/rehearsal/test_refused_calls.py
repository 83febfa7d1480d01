"""Shape functions of kernels accept what SGLang passes to them, and refuse what the libraries' sources refuse."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.rehearsal import collectives, fake_cuda, kernels
from megatron_rl.rehearsal.device import FakeGpu
from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.recorder import Recorder
from rollout_sglang.rehearsal.kernels import jit, triton
from rollout_sglang.rehearsal.kernels.match import Call

BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    torch._C._ensureCUDADeviceGuardSet()
    device = FakeGpu(Recorder(), collectives.communicate)
    device.recorder.begin("test")
    monkeypatch.setattr(kernels, "_recorder", [lambda: device.recorder])
    monkeypatch.setattr(FakeTensor, "data_ptr", fake_cuda._address)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with device:
        yield device


@pytest.mark.parametrize(
    ("rows", "dtype", "split", "told"),
    [
        (16, BF16, 2, ""),
        (17, BF16, 2, "17 rows, compiled for 16"),
        (16, torch.float16, 2, "is float16, not bfloat16"),
        (16, BF16, 3, "in blocks of 3 columns"),
    ],
)
def test_the_router_of_few_tokens(gpu, rows, dtype, split, told):
    n, k = 256, 7168
    run = jit._Module(("tiny_n_gemm", str(n), str(k), "16", str(split), "fp32", "1", "bf16")).run
    tensors = gpu.make((rows, k), dtype), gpu.make((n, k), BF16), gpu.make((rows, n), torch.float32)
    if not told:
        run(*tensors)
        assert gpu.recorder.phase.flops["bf16"] == 2 * rows * n * k
        return
    with pytest.raises(RefusedKernelError, match="tiny_n_gemm") as refused:
        run(*tensors)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"per_channel_quant": False}, "INT8 without a scale for each output"),
        ({"a_scale_ptr": (16, 2)}, "a_scale_ptr is [16, 2]"),
        ({"b_scale_ptr": (4, 512, 2)}, "b_scale_ptr is [4, 512, 2]"),
        ({"b_ptr": (4, 512, 128)}, "b_ptr is [4, 512, 128]"),
    ],
)
def test_experts_in_int8_refuse(gpu, change, told):
    shapes = {"a_ptr": (16, 256), "b_ptr": (4, 512, 256), "a_scale_ptr": (16, 1), "b_scale_ptr": (4, 512, 1)}
    given = {"use_int8_w8a8": True, "use_fp8_w8a8": False, "use_int8_w8a16": False, "per_channel_quant": True} | shapes | change
    for name in shapes:
        given[name] = gpu.make(given[name], torch.float32 if "scale" in name else torch.int8)
    given["c_ptr"] = gpu.make((16, 512), BF16)
    with pytest.raises(RefusedKernelError, match="fused_moe_kernel") as refused:
        triton._KERNELS["fused_moe_kernel"](Call("fused_moe_kernel"), given)
    assert told in str(refused.value)
