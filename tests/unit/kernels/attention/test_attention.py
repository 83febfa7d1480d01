"""Attention over packed sequences gives each sequence the result that it has alone: the same bits on a CPU, and the same gradient."""

import itertools

import pytest
import torch
from support.causal_attention import causal_attention
from support.kernel_tests import random

from megatron_rl.kernels.attention import reference as packed_attention

SHAPES = [(2, 2, 128, 128), (4, 2, 64, 64), (8, 1, 96, 64)]  # heads, key-value heads, width of q and k, width of v
LENGTHS = [1, 5, 31, 32, 33, 64, 0, 70, 150, 40, 1]


def row(heads: int, groups: int, width: int, values: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((heads, width), (groups, width), (groups, values))
    return [random(sum(LENGTHS), *shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(LENGTHS, 2) for x in (query, key, value)), strict=True)
    return torch.cat([causal_attention(*part)[0] for part in parts if part[0].numel()], 1).transpose(0, 1)


def assert_same_gradients(output: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    found, expected = (torch.autograd.grad(each, inputs, random(*wanted.shape, seed=9)) for each in (output, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_by_row_gives_the_bits_of_each_sequence_alone(shape, dtype):
    inputs = row(*shape, dtype)
    output, wanted = packed_attention.grouped_attention(*inputs, packed_attention.group_by_length(LENGTHS)), alone(*inputs)
    assert output.dtype == dtype and torch.equal(output, wanted)
    if dtype is torch.float32:
        assert_same_gradients(output, wanted, inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_company_changes_no_bit_of_a_gradient(shape):
    inputs = row(*shape)
    gradient = random(sum(LENGTHS), shape[0], shape[3], seed=9)

    def gradients(*cuts: int) -> tuple[torch.Tensor, ...]:
        """Return the gradients if the sequences are split into rows at `cuts`."""
        ends = [0, *cuts, len(LENGTHS)]
        rows = [LENGTHS[first:last] for first, last in itertools.pairwise(ends)]
        parts = zip(*(x.split([sum(lengths) for lengths in rows]) for x in inputs), rows, strict=True)
        outputs = [packed_attention.grouped_attention(*part, packed_attention.group_by_length(lengths)) for *part, lengths in parts]
        return torch.autograd.grad(torch.cat(outputs), inputs, gradient)

    together = gradients()
    for cuts in ((3, 8), tuple(range(1, len(LENGTHS)))):
        assert all(map(torch.equal, together, gradients(*cuts)))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_by_one_gives_the_same_numbers_and_flash_is_asked_for_them(shape, monkeypatch):
    """FlashAttention needs a GPU. A stand-in checks the arguments of the call and computes the result from them."""

    def stand_in(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert enable_gqa == (query.shape[1] != key.shape[1]) and window_size == (-1, 0)
        assert starts_q.dtype == starts_k.dtype == torch.int32 and longest_q == longest_k == max(LENGTHS)
        return packed_attention.sdpa_per_sequence(query, key, value, starts_q.diff().tolist(), scale)

    inputs = row(*shape)
    output, wanted = packed_attention.sdpa_per_sequence(*inputs, LENGTHS, None), alone(*inputs)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    assert_same_gradients(output, wanted, inputs)
    monkeypatch.setattr(packed_attention, "varlen_attn", stand_in)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    torch.testing.assert_close(packed_attention.flash_attention(*inputs, starts, max(LENGTHS), None), wanted, rtol=1e-5, atol=1e-5)


def test_flash_fits_the_installed_operator_and_copies_values_only_if_they_are_narrower(monkeypatch):
    """torch's operator accepts the call. On the meta device it returns only shapes."""
    shapes = ((20, 4, 192), (20, 2, 192), (20, 2, 128))
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    output = packed_attention.flash_attention(query, key, value, torch.empty(3, dtype=torch.int32, device="meta"), 15, 0.1)
    assert output.shape == (20, 4, 128) and output.dtype is torch.bfloat16
    passed = []
    monkeypatch.setattr(packed_attention, "varlen_attn", lambda q, k, v, *_, **__: passed.append(v) or v)
    query, key = torch.randn(6, 4, 32), torch.randn(6, 2, 32)
    for width in (32, 16):
        value = torch.randn(6, 2, width)
        result = packed_attention.flash_attention(query, key, value, torch.tensor([0, 6]), 6, None)
        assert (passed.pop() is value) == (width == 32) and torch.equal(result, value)
