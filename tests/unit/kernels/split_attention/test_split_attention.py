"""Attention in splits of absolute keys, in Triton's interpreter: values, log-sums and gradients against float64, and bits that depend
neither on other sequences, nor on cuts, nor on where keys lie. The interpreter shows cuts, not instructions of tensor cores."""

import pytest
import torch
from support.kernel_tests import in_interpreter, random, unmixed_rows

from megatron_rl.kernels.split_attention import Sequences, pack, reference

LENGTHS = (1, 63, 64, 65, 2, 200)
SPLIT = 128  # of these tests, two blocks of keys
KINDS = (
    (4, 2, 64, 0, False),
    (3, 1, 64, 9, True),
    (7, 1, 64, 0, False),
    (2, 2, 128, 64, False),
    (4, 2, 128, 0, True),
    (2, 1, 256, 0, False),
)
"""Heads, heads of keys, width, window, sinks."""


def draw(heads, groups, width, sinks, lengths=LENGTHS, dtype=torch.float32):
    tokens = sum(lengths)
    query, key, value = (random(tokens, count, width, seed=seed, dtype=dtype) for seed, count in enumerate((heads, groups, groups)))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return (query, key, value), starts, random(heads, seed=9) if sinks else None


def page(key, value, start, length):
    """Return a cache that holds the keys and values of a sequence in any order among others', and the table of their slots."""
    slots = torch.randperm(3 * length, generator=torch.Generator().manual_seed(length))[:length].int()
    caches = [torch.full((3 * length, *x.shape[1:]), 1e3, dtype=x.dtype) for x in (key, value)]
    for cache, x in zip(caches, (key, value), strict=True):
        cache[slots.long()] = x[start : start + length]
    return *caches, torch.stack([torch.zeros_like(slots), slots])


def compare_cuts(attend, kind, lengths, planted=0):
    """Return the numbers of rows that differ from the packed sequences' in a bit, by cut. `planted` keys are missing in front."""
    heads, groups, width, window, sinks = kind
    (query, key, value), starts, sinks = draw(heads, groups, width, sinks, lengths)
    scale, different = width**-0.5, {}
    whole, log_sums = attend(query, key, value, pack(starts, max(lengths), len(query)), scale, sinks, window)

    def count(cut, found, rows):
        same = (found[0] == whole[rows]).flatten(1).all(1) & (found[1].t() == log_sums.t()[rows]).all(1)
        different[cut] = different.get(cut, 0) + int((~same).sum())

    for start, length in zip(starts.tolist(), lengths, strict=False):
        own = slice(start, start + length)
        alone = torch.tensor([0, length], dtype=torch.int32)
        count("alone", attend(*(x[own] for x in (query, key, value)), pack(alone, length, length), scale, sinks, window), own)
        keys, values, slots = page(key, value, start, length)
        for size in (1, 40):
            for end in {length, *(n for n in (1, 64, 65, 128, 129) if n <= length)}:
                rows = slice(start + max(end - size, 0), start + end)
                taken = rows.stop - rows.start
                queries = torch.tensor([0, taken])
                cached = torch.tensor([end - min(planted, end - taken)])
                given = Sequences(queries, cached, torch.tensor([1]), slots[:, end - int(cached) :].contiguous(), 0, taken)
                given = given._replace(row_stride=given.slots.shape[1])
                count(f"chunks of {size}", attend(query[rows], keys, values, given, scale, sinks, window), rows)
                if size == 1:
                    together = given._replace(splits=-(-length // SPLIT) + 1)
                    count("decoded", attend(query[rows], keys, values, together, scale, sinks, window), rows)
    count_all = Sequences(torch.arange(len(lengths) + 1), starts.diff(), starts[:-1], torch.arange(len(query)).int(), 1, 1, 1)
    last = starts[1:].long() - 1
    count("decoded", attend(query[last], key, value, count_all._replace(splits=-(-max(lengths) // SPLIT)), scale, sinks, window), last)
    return different


@pytest.mark.kernels
@in_interpreter
def test_a_row_has_the_bits_of_its_own_keys():
    from unittest.mock import patch

    from megatron_rl.kernels.split_attention import triton as kernels

    with patch.object(kernels, "SPLIT", SPLIT), unmixed_rows():
        for kind in KINDS:
            found = compare_cuts(kernels.attend, kind, (65, 200) if kind[2] < 256 else (130,))
            assert set(found) == {"alone", "decoded", "chunks of 1", "chunks of 40"}
            assert not any(found.values()), (kind, found)
        moved = compare_cuts(kernels.attend, (4, 2, 64, 9, False), (200,), planted=20)
        assert moved["alone"] == 0 and moved["decoded"] > 0 and moved["chunks of 40"] > 0, "blocks do not begin at multiples of 64"
    splits = iter(range(1, 10**6))

    def attend(*args):
        with patch.object(kernels, "SPLIT", 64 * (1 + next(splits) % 2)):
            return kernels.attend(*args)

    assert compare_cuts(attend, KINDS[0], (200,))["decoded"] > 0, "splits of other sizes"


@pytest.mark.kernels
@in_interpreter
def test_results_log_sums_and_gradients_are_those_of_float64():
    from unittest.mock import patch

    from megatron_rl.kernels.split_attention import triton as kernels

    for heads, groups, width, window, has_sinks in KINDS:
        inputs, starts, sinks = draw(heads, groups, width, has_sinks)
        given = [x.requires_grad_() for x in (*inputs, *([sinks] if has_sinks else ()))]
        doubles = [x.detach().double().requires_grad_() for x in given]
        sequences, scale = pack(starts, max(LENGTHS), sum(LENGTHS)), width**-0.5
        exact, log_sums = reference.attend(*doubles[:3], sequences, scale, *(doubles[3:] or [None]), window)
        with patch.object(kernels, "SPLIT", SPLIT), patch.object(reference, "attend", kernels.attend):
            own = kernels.attend(*inputs, sequences, scale, sinks, window)
            output = reference.attend_packed(*inputs, starts, max(LENGTHS), None, sinks, window)
        assert torch.equal(output, own[0])
        torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own[1], log_sums.float(), rtol=1e-5, atol=1e-5)
        gradient = random(*output.shape, seed=5)
        for x, y in zip(torch.autograd.grad(output, given, gradient), torch.autograd.grad(exact, doubles, gradient.double()), strict=True):
            assert (x - y).norm() < 1e-5 * y.norm()


@in_interpreter
def test_what_the_kernel_does_not_take_is_refused():
    from megatron_rl.kernels.split_attention import triton as kernels

    for width, window, heads in ((80, 0, 2), (256, 9, 2), (64, 0, 3)):
        inputs, starts, _ = draw(heads, 2, width, False, (3,))
        with pytest.raises(ValueError, match=rf"\[3, {heads}, {width}\].*a window of {window}"):
            kernels.attend(*inputs, pack(starts, 3, 3), 1.0, None, window)
