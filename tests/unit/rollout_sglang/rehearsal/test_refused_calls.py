"""Kernels as functions of shapes take what SGLang gives them, and refuse what the libraries' sources do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.rehearsal import collectives, fake_cuda
from megatron_rl.rehearsal.device import FakeGpu, set_value
from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.recorder import Recorder
from rollout_sglang.rehearsal.kernels import flashinfer_attention as attention
from rollout_sglang.rehearsal.kernels import jit, triton

BF16, E4M3, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
QUERIES, KEYS, WIDTH, SLOTS = 8, 2, 128, 64


@pytest.fixture
def gpu(monkeypatch):
    torch._C._ensureCUDADeviceGuardSet()
    device = FakeGpu(Recorder(), collectives.communicate)
    device.recorder.begin("test")
    monkeypatch.setattr(fake_cuda, "_current", [device])
    monkeypatch.setattr(FakeTensor, "data_ptr", fake_cuda._address)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with device:
        yield device


def numbers(gpu: FakeGpu, *values: int) -> torch.Tensor:
    tensor: torch.Tensor = gpu.make((len(values),), INT32)
    set_value(tensor, torch.tensor(values, dtype=INT32))
    return tensor


def cache(gpu: FakeGpu, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    return gpu.make((SLOTS, KEYS, WIDTH), dtype), gpu.make((SLOTS, KEYS, WIDTH), dtype)


def decode(gpu: FakeGpu, **changes: object) -> torch.Tensor:
    """Three requests, of 5, 7 and 9 tokens, by the plan of a CUDA graph."""
    given = SimpleNamespace(width=WIDTH, heads=QUERIES, kv=E4M3, q=BF16, batch=3, keys=E4M3, rows=3, cores=True, room=32)
    vars(given).update(changes)
    buffers = (numbers(gpu, *range(given.batch + 1)), gpu.make((given.room,), INT32), numbers(gpu, *[1] * given.batch))
    wrapper = attention.BatchDecodeWithPagedKVCacheWrapper(
        gpu.make((1 << 20,), torch.uint8), "NHD", True, given.cores, *buffers, backend="fa2"
    )
    plan = (numbers(gpu, 0, 5, 12, 21), gpu.make((21,), INT32), numbers(gpu, 1, 1, 1), given.heads, KEYS, given.width, 1)
    starts = torch.tensor([0, 5, 12, 21], dtype=INT32)
    attention.fast_decode_plan(wrapper, *plan, q_data_type=BF16, data_type=given.kv, global_override_indptr_cpu=starts)
    return wrapper.forward(gpu.make((given.rows, QUERIES, WIDTH), given.q), cache(gpu, given.keys), v_scale=1.0)


def test_flashinfer_decodes_from_an_e4m3_cache_and_waits_for_nothing(gpu):
    out = decode(gpu)
    assert (tuple(out.shape), out.dtype) == ((3, QUERIES, WIDTH), BF16)
    assert gpu.recorder.phase.flops["bf16"] == 4 * (5 + 7 + 9) * QUERIES * WIDTH and not gpu.recorder.phase.waits


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 96}, "heads of 96 numbers"),
        ({"heads": 9}, "9 query heads, 2 of keys"),
        ({"kv": torch.float32}, "keys in torch.float32"),
        ({"batch": 4}, "3 requests in a CUDA graph of 4"),
        ({"room": 16}, "21 pages in a buffer of fewer"),
        ({"keys": BF16}, "k [64, 2, 128] is bfloat16, not float8_e4m3fn"),
        ({"q": torch.float16}, "q [3, 8, 128] is float16, not bfloat16"),
        ({"rows": 4}, "4 queries of a plan for 3"),
        ({"heads": 10, "cores": False}, "5 query heads for one of keys, without tensor cores"),
    ],
)
def test_flashinfer_refuses(gpu, changes, told):
    with pytest.raises(RefusedKernelError, match="flashinfer.BatchDecode") as refused:
        decode(gpu, **changes)
    assert told in str(refused.value)


def test_flashinfer_prefills_new_tokens_and_those_in_the_cache(gpu):
    workspace, starts = gpu.make((1 << 20,), torch.uint8), numbers(gpu, 0, 4, 10)
    ragged, paged = attention.BatchPrefillWithRaggedKVCacheWrapper(workspace), attention.BatchPrefillWithPagedKVCacheWrapper(workspace)
    ragged.begin_forward(starts, starts, QUERIES, KEYS, WIDTH, q_data_type=BF16)
    pages = (numbers(gpu, 0, 0, 3), gpu.make((3 + 256,), INT32), numbers(gpu, 1, 1))
    paged.begin_forward(starts, *pages, QUERIES, KEYS, WIDTH, 1, q_data_type=BF16, kv_data_type=E4M3)
    q, k = gpu.make((10, QUERIES, WIDTH), BF16), gpu.make((10, KEYS, WIDTH), BF16)
    own = ragged.forward_return_lse(q, k, k, causal=True)
    assert gpu.recorder.phase.flops["bf16"] == 4 * (4 * 5 // 2 + 6 * 7 // 2) * QUERIES * WIDTH
    merged, _ = attention.merge_state(*own, *paged.forward_return_lse(q, cache(gpu)))
    assert merged.shape == q.shape and sum(gpu.recorder.phase.waits.values()) == 5
    with pytest.raises(RefusedKernelError, match="k .* is float8_e4m3fn, not bfloat16"):
        ragged.forward(q, *cache(gpu))
    with pytest.raises(RefusedKernelError, match="11 queries of a plan for 10"):
        ragged.forward(gpu.make((11, QUERIES, WIDTH), BF16), k, k)


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
        ({"a_scale_ptr": (16, 2)}, "A_scale is [16, 2]"),
        ({"b_scale_ptr": (4, 512, 2)}, "B_scale is [4, 512, 2]"),
        ({"b_ptr": (4, 512, 128)}, "B is [4, 512, 128]"),
    ],
)
def test_experts_in_int8_refuse(gpu, change, told):
    shapes = {"a_ptr": (16, 256), "b_ptr": (4, 512, 256), "a_scale_ptr": (16, 1), "b_scale_ptr": (4, 512, 1)}
    given = {"use_int8_w8a8": True, "use_fp8_w8a8": False, "use_int8_w8a16": False, "per_channel_quant": True} | shapes | change
    for name in shapes:
        given[name] = gpu.make(given[name], torch.float32 if "scale" in name else torch.int8)
    given["c_ptr"] = gpu.make((16, 512), BF16)
    with pytest.raises(RefusedKernelError, match="fused_moe_kernel") as refused:
        triton._KERNELS["fused_moe_kernel"](given)
    assert told in str(refused.value)
