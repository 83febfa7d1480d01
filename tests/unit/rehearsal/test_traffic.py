"""Bytes that operators move, compared with a table made by hand, and bounds of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.cost.hardware import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, Cluster
from megatron_rl.rehearsal.bound import estimate_bound
from megatron_rl.rehearsal.recorder import Recorder
from megatron_rl.rehearsal.traffic import count_bytes, count_moved, name_kind

aten = torch.ops.aten


def new(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


X, ROW, TABLE, PLACES = new(4, 8), new(8), new(1000, 8), new(6, dtype=torch.int64)
CASES = [
    (aten.empty.memory_format, ([4, 8],), 0),
    (aten.empty_like.default, (X,), 0),
    (aten.new_empty.default, (X, [4, 8]), 0),
    (aten._unsafe_view.default, (X, [32]), 0),
    (aten.view.default, (X, [32]), 0),
    (aten.detach.default, (X,), 0),
    (aten.add.Tensor, (X, X), 2 * 128),
    (aten.add.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.add.Tensor, (X, ROW.expand(4, 8)), 2 * 128 + 32),
    (aten.add_.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.mul_.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.copy_.default, (X, new(4, 8, dtype=torch.bfloat16)), 128 + 64),
    (aten.copy_.default, (X, ROW.expand(4, 8)), 128 + 32),
    (aten.zero_.default, (X,), 128),
    (aten.fill_.Scalar, (X, 1.0), 128),
    (aten.zeros_like.default, (X,), 128),
    (aten.mm.default, (X, new(8, 2)), 128 + 64 + 32),
    (aten.embedding.default, (TABLE, PLACES), 2 * 192 + 48),
    (aten.index.Tensor, (TABLE, [PLACES]), 2 * 192 + 48),
    (aten.index_select.default, (TABLE, 0, PLACES), 2 * 192 + 48),
    (aten.index_put_.default, (TABLE, [PLACES], new(6, 8)), 48 + 2 * 192),
    (aten.index_add_.default, (TABLE, 0, PLACES, new(6, 8)), 48 + 3 * 192),
    (aten._foreach_add_.List, ([X, ROW], [new(4, 8), new(8)]), 3 * 160),
    (aten._foreach_mul_.Scalar, ([X, ROW], 2.0), 2 * 160),
    (aten._foreach_copy_.default, ([X, ROW], [new(4, 8), new(8)]), 2 * 160),
    (aten._foreach_zero_.default, ([X, ROW],), 160),
]


@pytest.mark.parametrize(("func", "args", "nbytes"), CASES, ids=[f"{func}-{nbytes}" for func, _, nbytes in CASES])
def test_an_operator_moves_what_its_kernel_reads_and_writes(func, args, nbytes):
    assert count_moved(func, args, {}, func(*args) if func is not aten.empty.memory_format else X) == nbytes


def test_a_result_that_is_given_is_not_read():
    result = new(4, 8)
    assert count_moved(aten.mul.out, (X, new(4, 8)), {"out": result}, result) == 3 * 128
    assert count_moved(aten.mul.out, (X, new(4, 8)), {"out": X}, X) == 3 * 128


def test_attention_counts_once():
    """The kernel's shape function counts it (`rehearsal.kernels.flash_attention`)."""
    from torch.nn.attention import varlen  # noqa: F401 - registers the operators

    assert count_moved(torch.ops.torch_attn._varlen_attn_backward.default, (X, X), {}, X) == 0


def test_an_expanded_tensor_has_the_bytes_of_its_storage():
    assert count_bytes(ROW.expand(4, 8)) == 32 and count_bytes(new(0, 8)) == 0


def test_kinds_follow_dtype_and_line():
    assert name_kind("aten::mm", "bf16", "megatron_rl/mcore/passes/logprobs.py:3") == "bf16 products"
    assert name_kind("", "other", "megatron_rl/kernels/heads/triton.py:3") == "queries and keys"
    assert name_kind("attention", "bf16", "megatron_rl/mcore/x.py:3") == "attention"
    assert name_kind("aten::add", "other", "megatron/core/distributed/param_and_grad_buffer.py:9") == "gradient buffers"


def test_a_bound_multiplies_passes_alone_and_takes_the_link_that_a_group_has():
    job = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(updates_per_step=1)), has_reference=False)
    cluster = Cluster.from_options(2, 8, "h100")
    recorder = Recorder()
    phase = recorder.begin("update 2")
    phase.passes, recorder.in_pass = 2, True
    recorder.work("fp8", 10**12, X)
    recorder.collective("all-gather", "tp 2", 10**9, [0, 1])
    recorder.collective("send", "pp 2", 10**9, [0, 8])
    recorder.collective("reduce-scatter", "dp 2", 10**9, [0, 8])  # gradients, in the step's last backward pass
    recorder.in_pass = False
    recorder.work("other", 0, X, X, kernel="norm")
    recorder.collective("all-gather", "dp 2", 10**9, [0, 8])
    bound = estimate_bound(phase, job, SimpleNamespace(train=SimpleNamespace(vpp=1), micro_batches=lambda _: 20), cluster)
    assert bound.passes == 20
    assert bound.seconds["fp8 products"] == pytest.approx(10**13 / (1979e12 * COMPUTE_EFFICIENCY))
    assert bound.seconds["norms"] == pytest.approx(256 / (3.35e12 * LINK_EFFICIENCY))
    assert bound.seconds["exposed communication"] == pytest.approx((10 * 0.5e9 / 450e9 + 0.5e9 / 50e9) / LINK_EFFICIENCY)
    assert bound.hidden == pytest.approx((10 * 1e9 + 0.5e9) / 50e9 / LINK_EFFICIENCY)


@pytest.mark.parametrize("products, exposed", [(0, 3.0), (1, 2.0), (2, 1.0), (4, 0.0)])
def test_exchange_is_hidden_as_far_as_kernels_run_between_its_start_and_the_wait(products, exposed):
    """Two exchanges of one and two seconds over one link, and a third that is waited for immediately."""
    job = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(updates_per_step=1)), has_reference=False)
    recorder, second = Recorder(), 450e9 * LINK_EFFICIENCY
    phase = recorder.begin("update 2")
    phase.passes, recorder.in_pass = 1, True
    waits = [recorder.collective("send", "tp 2", seconds * second, [0, 1]) for seconds in (1, 2)]
    recorder.work("fp8", products * 1979e12 * COMPUTE_EFFICIENCY)
    for wait in waits:
        wait()
        wait()
    recorder.collective("send", "tp 2", second / 2, [0, 1])()
    bound = estimate_bound(
        phase, job, SimpleNamespace(train=SimpleNamespace(vpp=1), micro_batches=lambda _: 3), Cluster.from_options(1, 8, "h100")
    )
    assert bound.seconds["exposed communication"] == pytest.approx(3 * (exposed + 0.5))
    assert bound.hidden == pytest.approx(3 * (3 - exposed), abs=1e-9)
