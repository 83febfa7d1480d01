"""FlashInfer's shape functions count what its kernels multiply and move, wait where its plans wait, and refuse what it refuses."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.rehearsal.device import value_of
from megatron_rl.rehearsal.kernels import RefusedKernelError
from rollout_sglang.rehearsal.kernels import flashinfer

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PROCESSORS = 148
HEADS, KV_HEADS, WIDTH = 16, 4, 128


@pytest.fixture
def device(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROCESSORS))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return gpu


def starts_of(device, lengths):
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    return device.make(starts.shape, torch.int32, starts)


def workspace(device, nbytes=512 << 20):
    return device.make((nbytes,), torch.uint8)


def plan_prompts(device, lengths, backend="cutlass", width=WIDTH):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend=backend)
    starts = starts_of(device, lengths)
    wrapper.begin_forward(starts, starts, HEADS, KV_HEADS, width, q_data_type=BF16)
    return wrapper


def rows(device, tokens, heads=KV_HEADS, width=WIDTH, dtype=BF16):
    return device.make((tokens, heads, width), dtype)


@pytest.mark.parametrize(("backend", "waits"), [("cutlass", 3), ("auto", 2), ("fa2", 2)])
def test_prompts(device, backend, waits):
    """A causal mask leaves n (n + 1) / 2 pairs of n tokens. Nothing waits in a layer."""
    lengths = [1000, 24, 2048]
    wrapper, tokens = plan_prompts(device, lengths, backend), sum(lengths)
    assert sum(device.recorder.phase.waits.values()) == waits
    before = device.recorder.phase.traffic
    out = wrapper.forward(rows(device, tokens, HEADS), rows(device, tokens), rows(device, tokens), causal=True, sm_scale=0.1)
    assert out.shape == (tokens, HEADS, WIDTH) and out.dtype == BF16
    assert device.recorder.phase.flops["bf16"] == 4 * HEADS * WIDTH * sum(n * (n + 1) // 2 for n in lengths)
    assert device.recorder.phase.traffic - before == 2 * tokens * WIDTH * (2 * HEADS + 2 * KV_HEADS)
    assert sum(device.recorder.phase.waits.values()) == waits


def make_decode(device, contexts, graph, nbytes=512 << 20):
    counts = device.make((len(contexts),), torch.int32, torch.ones(len(contexts), dtype=torch.int32))
    buffers = {"paged_kv_indices_buffer": device.make((1 << 20,), torch.int32), "paged_kv_last_page_len_buffer": counts} if graph else {}
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device, nbytes), "NHD", backend="fa2", use_cuda_graph=graph, use_tensor_cores=True, **buffers
    )
    slots = device.make((sum(contexts),), torch.int32)
    return decode, (starts_of(device, contexts), slots, counts, HEADS, KV_HEADS, WIDTH, 1)


def count_parts(contexts, graph):
    """The rows that blocks write, by trying every length of a split. A tile holds the query heads of one key head."""
    longest, blocks = max(contexts), 2 * PROCESSORS // KV_HEADS

    def rows_of(split):
        return sum(-(-length // split) for length in contexts)

    split = next((split for split in range(128, longest) if rows_of(split) <= blocks), max(128, longest))
    return rows_of(split) if graph or split < longest else 0


@pytest.mark.parametrize("contexts", [[32768], [100, 5000], [1023] * 256, [60], [9000, 1, 129] * 20])
@pytest.mark.parametrize("graph", [False, True])
def test_decoded_tokens(device, contexts, graph):
    """Long contexts are split until all multiprocessors have work. The parts' rows are written and read again."""
    decode, arguments = make_decode(device, contexts, graph)
    decode.begin_forward(*arguments, data_type=E4M3, q_data_type=BF16, non_blocking=True, fixed_split_size=None, disable_split_kv=False)
    assert sum(device.recorder.phase.waits.values()) == 2
    before, tokens = device.recorder.phase.traffic, sum(contexts)
    cache = rows(device, 1 << 20, dtype=E4M3), rows(device, 1 << 20, dtype=E4M3)
    out = decode.forward(rows(device, len(contexts), HEADS), cache, sm_scale=0.1, logits_soft_cap=0.0, k_scale=1.0, v_scale=None)
    assert out.shape == (len(contexts), HEADS, WIDTH)
    assert device.recorder.phase.flops["bf16"] == 4 * HEADS * WIDTH * tokens
    parts = 2 * count_parts(contexts, graph) * HEADS * (2 * WIDTH + 4)
    moved = 4 * len(contexts) * HEADS * WIDTH + 2 * tokens * KV_HEADS * WIDTH + parts
    assert device.recorder.phase.traffic - before == moved


def test_a_replay_is_planned_without_a_wait_if_the_host_knows_the_lengths(device):
    contexts = [300, 4000]
    decode, arguments = make_decode(device, contexts, True)
    lengths = torch.tensor([0, *contexts], dtype=torch.int32).cumsum(0).int()
    named = {"data_type": E4M3, "q_data_type": BF16, "non_blocking": True, "fixed_split_size": None, "disable_split_kv": False}
    flashinfer.fast_decode_plan(decode, *arguments, **named, global_override_indptr_cpu=lengths)
    assert not device.recorder.phase.waits and decode._plan.key_starts is lengths
    flashinfer.fast_decode_plan(decode, *arguments, **named)
    assert sum(device.recorder.phase.waits.values()) == 1


def test_what_flashinfer_refuses(device):
    for width in (80, 256):
        with pytest.raises(RefusedKernelError, match=f"heads of {width} numbers"):
            plan_prompts(device, [8], width=width)
    with pytest.raises(RefusedKernelError, match="plan info is not initialized"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device)).forward(*[rows(device, 4)] * 3)
    wrapper = plan_prompts(device, [8])
    with pytest.raises(RefusedKernelError, match=r"q is torch.bfloat16 and k torch.float8_e4m3fn"):
        wrapper.forward(rows(device, 8, HEADS), rows(device, 8, dtype=E4M3), rows(device, 8, dtype=E4M3))
    with pytest.raises(RefusedKernelError, match=r"q is \[9, 16, 128]"):
        wrapper.forward(rows(device, 9, HEADS), rows(device, 9), rows(device, 9))
    with pytest.raises(RefusedKernelError, match="a window of 64"):
        wrapper.forward(rows(device, 8, HEADS), rows(device, 8), rows(device, 8), window_left=64)
    decode, arguments = make_decode(device, [32768], False, nbytes=1 << 20)
    with pytest.raises(RefusedKernelError, match="bytes for parts of contexts, 1048576 in the workspace"):
        decode.begin_forward(*arguments, data_type=E4M3, q_data_type=BF16)
    with pytest.raises(RefusedKernelError, match="pages of 16 tokens"):
        decode.begin_forward(*arguments[:-1], 16, data_type=E4M3, q_data_type=BF16)
    captured, arguments = make_decode(device, [5, 5], True)
    with pytest.raises(RefusedKernelError, match="3 requests in a graph of 2"):
        flashinfer.fast_decode_plan(captured, starts_of(device, [5, 5, 5]), *arguments[1:])


def test_lengths_that_are_copied_together_are_known(device):
    """As SGLang fills the inputs of its graphs."""
    buffers = [device.make((3,), torch.int64, torch.ones(3, dtype=torch.int64)) for _ in range(2)]
    sent = device.make((3,), torch.int64, torch.arange(3))
    device.__torch_dispatch__(torch.ops.aten._foreach_copy_.default, (), (buffers, [sent, sent]))
    assert [value_of(buffer).tolist() for buffer in buffers] == [[0, 1, 2]] * 2
