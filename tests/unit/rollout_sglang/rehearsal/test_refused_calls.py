"""Shape functions of kernels refuse what the libraries refuse; a sync without data reports bytes that are not written once."""

from collections.abc import Sequence

import pytest
import torch

from megatron_rl.rehearsal import hopper
from megatron_rl.rehearsal.kernels import RefusedKernelError, deep_gemm
from megatron_rl.rehearsal.kernels.match import Call
from parallel.chunking import Chunk
from parallel.shards import Rect
from rollout_sglang.rehearsal.kernels import jit, triton
from rollout_sglang.rehearsal.sync import receive

BF16 = torch.bfloat16


@pytest.mark.parametrize(("rows", "dtype", "split", "told"), [
    (16, BF16, 2, ""),
    (17, BF16, 2, "17 rows, compiled for 16"),
    (16, torch.float16, 2, "is float16, not bfloat16"),
    (16, BF16, 3, "in blocks of 3 columns"),
])  # fmt: skip
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


@pytest.mark.parametrize(("major", "a_scale", "told"), [
    (9, "fp32", ""),
    (10, "fp32", ""),
    (10, "packed", ""),
    (9, "packed", "scales are [6, 2] torch.int32"),
    (10, "rows", "packed scales are [6, 2] [2, 1]"),
])  # fmt: skip
def test_deep_gemm_takes_packed_scales_on_blackwell_only(gpu, monkeypatch, major, a_scale, told):
    monkeypatch.setattr(hopper.PROPERTIES, "major", major)
    a, b, d = gpu.make((6, 640), torch.float8_e4m3fn), gpu.make((256, 640), torch.float8_e4m3fn), gpu.make((6, 256), BF16)
    by_rows = [
        torch.empty_strided((6, words), (1, 8), dtype=dtype, device="cuda") for words, dtype in ((2, torch.int32), (5, torch.float32))
    ]
    packed = by_rows[0], torch.empty_strided((256, 2), (1, 256), dtype=torch.int32, device="cuda")
    plain = by_rows[1], gpu.make((2, 5), torch.float32)
    scales = {"packed": packed, "fp32": plain, "rows": (gpu.make((6, 2), torch.int32), packed[1])}[a_scale]
    if not told:
        deep_gemm.fp8_gemm_nt((a, scales[0]), (b, scales[1]), d)
        assert gpu.recorder.phase.flops["fp8"] == 2 * 6 * 256 * 640
        return
    with pytest.raises(RefusedKernelError, match="fp8_gemm_nt") as refused:
        deep_gemm.fp8_gemm_nt((a, scales[0]), (b, scales[1]), d)
    assert told in str(refused.value)


@pytest.mark.parametrize(("change", "told"), [
    ({"per_channel_quant": False}, "INT8 without a scale for each output"),
    ({"a_scale_ptr": (16, 2)}, "a_scale_ptr is [16, 2]"),
    ({"b_scale_ptr": (4, 512, 2)}, "b_scale_ptr is [4, 512, 2]"),
    ({"b_ptr": (4, 512, 128)}, "b_ptr is [4, 512, 128]"),
])  # fmt: skip
def test_experts_in_int8_refuse(gpu, change, told):
    shapes = {"a_ptr": (16, 256), "b_ptr": (4, 512, 256), "a_scale_ptr": (16, 1), "b_scale_ptr": (4, 512, 1)}
    given = {"use_int8_w8a8": True, "use_fp8_w8a8": False, "use_int8_w8a16": False, "per_channel_quant": True} | shapes | change
    for name in shapes:
        given[name] = gpu.make(given[name], torch.float32 if "scale" in name else torch.int8)
    given["c_ptr"] = gpu.make((16, 512), BF16)
    with pytest.raises(RefusedKernelError, match="fused_moe_kernel") as refused:
        triton._KERNELS["fused_moe_kernel"](Call("fused_moe_kernel"), given)
    assert told in str(refused.value)


LEFT, RIGHT = ("w", Rect(0, 0, 6, 3)), ("w", Rect(0, 3, 6, 5))
SCALES = ("s", Rect(0, 0, 4, 1))


def make_chunk(*targets: tuple[str, Rect]) -> Chunk:
    return Chunk(0, 0, 0, sum(rect.rows * rect.cols * (2 if name == "w" else 4) for name, rect in targets), (), targets)


def live() -> dict[str, torch.Tensor]:
    return {"w": torch.empty(2, 3, 8, dtype=torch.bfloat16, device="meta"), "s": torch.empty(4, dtype=torch.float32, device="meta")}


@pytest.mark.parametrize(("chunks", "fault"), [
    ([make_chunk(LEFT, RIGHT)], "s: a sync writes row 0, bytes 0..3 0 times"),
    ([make_chunk(LEFT, SCALES)], "w: a sync writes row 0, bytes 6..15 0 times"),
    ([make_chunk(LEFT, SCALES), make_chunk(("w", Rect(0, 3, 5, 5)))], "w: a sync writes row 5, bytes 6..15 0 times"),
    ([make_chunk(LEFT, RIGHT), make_chunk(SCALES, ("w", Rect(2, 0, 1, 4)))], "w: a sync writes row 2, bytes 0..5 2 times"),
    ([make_chunk(LEFT, RIGHT, ("s", Rect(0, 0, 5, 1)))], "s: rows 0..4 lie outside"),
    ([make_chunk(LEFT, RIGHT, SCALES, ("gone", Rect(0, 0, 1, 1)))], "there is no tensor gone"),
])  # fmt: skip
def test_a_fault_has_the_name_of_its_tensor(chunks: Sequence[Chunk], fault: str):
    with pytest.raises(ValueError, match=fault):
        receive(live(), chunks)


def test_all_bytes_are_written_once_and_two_names_of_one_memory_twice():
    shared = torch.empty(6, 8, dtype=torch.bfloat16, device="meta")
    whole = Rect(0, 0, 6, 8)
    with pytest.raises(ValueError, match=r"w: a sync writes row 0, bytes 0\.\.15 2 times"):
        receive({"w": shared, "tied": shared}, [Chunk(0, 0, 0, 192, (), (("w", whole), ("tied", whole)))])
    receive(live(), [make_chunk(LEFT), make_chunk(RIGHT, SCALES)])
