"""The gated delta net on a CPU: equal bits for any division of tokens, sequences, heads, and threads; gradients of the plain formula."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.delta_rule import (
    ADVANCE_CASES,
    RECURRENCES,
    advance_in_cuts,
    attend_plainly,
    choose_heads,
    draw_layer,
    draw_recurrence,
    recur_plainly,
)
from support.kernel_tests import random

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.reference import advance, attend
from megatron_rl.kernels.gated_delta.scan import Scan, lay_out

HEADS = DeltaHeads(2, 6, 32, 48)
DTYPES = [torch.float32, torch.bfloat16]


@st.composite
def draw_case(draw: st.DrawFn) -> tuple[DeltaHeads, int, torch.dtype, list[list[int]], bool]:
    """Return (heads, taps, dtype, for each sequence the tokens of its chunks, whether decoded tokens follow in one batch)."""
    k, share = draw(st.sampled_from([(1, 1), (2, 2), (2, 3), (4, 1)]))
    heads = DeltaHeads(k, k * share, *(draw(st.sampled_from([8, 16, 24, 64])) for _ in range(2)))
    chunks = st.lists(st.integers(1, 90), min_size=1, max_size=4)
    cuts = draw(st.lists(chunks, min_size=1, max_size=5).filter(lambda cuts: max(map(sum, cuts)) <= 333))
    return heads, draw(st.integers(2, 4)), draw(st.sampled_from(DTYPES)), cuts, draw(st.booleans())


@settings(max_examples=25, deadline=None)
@given(draw_case())
def test_any_cut_of_any_batch_has_the_bits_of_the_packed_row(case):
    heads, taps, dtype, cuts, decoded = case
    if decoded:  # what follows a prompt's first chunk comes token by token
        cuts = [[chunks[0], *[1] * min(sum(chunks[1:]), 20)] for chunks in cuts]
    lengths = [sum(chunks) for chunks in cuts]
    weights, row = draw_layer(heads, sum(lengths), dtype, taps)
    whole = attend(weights, *row, lengths)
    assert whole.dtype == dtype and whole.shape == (sum(lengths), heads.v, heads.v_dim)
    found, windows, states = advance_in_cuts(advance, weights, row, cuts)
    assert torch.equal(found, whole)
    for n, (part, own) in enumerate(zip(zip(*(x.split(lengths) for x in row), strict=True), whole.split(lengths), strict=True)):
        assert torch.equal(attend(weights, *part, [lengths[n]]), own)
        alone, window, state = advance_in_cuts(advance, weights, part, [[lengths[n]]])
        assert torch.equal(alone, own) and torch.equal(window[0], windows[n]) and torch.equal(state[0], states[n])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ADVANCE_CASES))
def test_prompts_chunks_and_decoded_tokens_have_the_bits_of_training(name, dtype):
    cuts = ADVANCE_CASES[name]
    lengths = [sum(chunks) for chunks in cuts]
    weights, row = draw_layer(HEADS, sum(lengths), dtype)
    assert torch.equal(advance_in_cuts(advance, weights, row, cuts)[0], attend(weights, *row, lengths))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)])
def test_ranks_with_a_share_of_the_heads_and_two_threads_have_the_same_bits(dims, dtype):
    heads, lengths = DeltaHeads(4, 8, *dims), [1, 70, 9]
    weights, row = draw_layer(heads, sum(lengths), dtype)
    whole, threads = attend(weights, *row, lengths), torch.get_num_threads()
    for ranks in (2, 4):
        parts = [attend(*choose_heads(weights, row, rank, ranks), lengths) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts, 1), whole)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(attend(weights, *row, lengths), whole)
    finally:
        torch.set_num_threads(threads)


def test_many_heads_and_sequences_run_in_parts_with_the_bits_of_one(monkeypatch):
    lengths = [3, 0, 40, 1, 17, 40, 2]
    weights, row = draw_layer(HEADS, sum(lengths), torch.float32)
    whole = attend(weights, *row, lengths)
    for numbers in (1, 4 * 32 * 48, 12 * 32 * 48):
        monkeypatch.setattr("megatron_rl.kernels.gated_delta.scan._PART", numbers)
        assert torch.equal(attend(weights, *row, lengths), whole)
    parts = lay_out(tuple(lengths), 4)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(sum(lengths)))
    assert [part.sequences.tolist() for part in parts] == [[2, 5, 4, 0], [6, 3]] and parts[0].counts[:4] == (4, 4, 4, 3)


@pytest.mark.parametrize("lengths", [[70, 3, 131], [64], [1, 65]])
def test_the_gradients_are_those_of_the_plain_formula_in_float64(lengths):
    weights, row = draw_layer(HEADS, sum(lengths), torch.float32)
    dy = random(sum(lengths), HEADS.v, HEADS.v_dim, seed=9)
    results = []
    for function, dtype in ((attend, torch.float32), (attend_plainly, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (*weights[:3], *row)]
        out = function(DeltaWeights(*leaves[:3], HEADS), *leaves[3:], lengths)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dy.to(dtype))])
    for found, wanted in zip(*results, strict=True):
        assert found.shape == wanted.shape and (found - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("lengths", [(1, 64, 130, 0, 77), (5, 12)])
@pytest.mark.parametrize("name", list(RECURRENCES))
def test_gradients_stay_exact_where_states_are_kept_or_gone(name, lengths):
    """The decay's gradient is that of its logarithm, which is what the layer learns; each number of it is exact, not only its norm."""
    inputs, dy = draw_recurrence(name, sum(lengths), 1, 2, 32, 48), random(sum(lengths), 2, 48, seed=9)
    results = []
    for function, dtype in ((Scan.apply, torch.float32), (lambda lengths, *inputs: recur_plainly(inputs, lengths), torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        results.append(list(torch.autograd.grad(function(lengths, *leaves), leaves, dy.to(dtype))))
        results[-1][3] *= leaves[3].detach()
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    relative = (results[0][3] - results[1][3]).abs() / results[1][3].abs().clamp(min=1e-30)
    assert relative.median() < 1e-5


def test_gradients_of_bfloat16_activations_are_rounded_once():
    weights, row = draw_layer(HEADS, 40, torch.bfloat16)
    weights = weights._replace(conv=weights.conv.requires_grad_())
    row = [x.requires_grad_() for x in row]
    dy = random(40, HEADS.v, HEADS.v_dim, seed=9, dtype=torch.bfloat16)
    found = torch.autograd.grad(attend(weights, *row, [7, 33]), (weights.conv, *row), dy)
    exact = [x.detach().double().requires_grad_() for x in (weights.conv, *row)]
    out = attend_plainly(weights._replace(conv=exact[0]), *exact[1:], [7, 33])
    for a, b in zip(found, torch.autograd.grad(out, exact, dy.double()), strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).norm() < 2**-7 * b.norm()  # the convolution's result is rounded, too


def test_a_state_that_decays_to_nothing_and_huge_gates_stay_finite():
    weights, (mixed, a, b) = draw_layer(HEADS, 70, torch.float32)
    a, b = (torch.where(x > 0, 1e4, -1e4).requires_grad_() for x in (a, b))  # decays of 0 and 1, betas of 0 and 1
    mixed = (mixed * (torch.arange(70) % 3 > 0)[:, None]).requires_grad_()  # vectors of zeros
    out = attend(weights, mixed, a, b, [70])
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), (mixed, a, b))))


def test_a_step_changes_its_own_windows_and_states_only():
    weights, row = draw_layer(HEADS, 5, torch.float32)
    windows, states = random(7, row[0].shape[1], 3, seed=1), random(7, HEADS.v, HEADS.k_dim, HEADS.v_dim, seed=2)
    before, slots = [x.clone() for x in (*row, windows, states)], torch.tensor([6, 1, 3, 0, 4])
    out = advance(weights, *row, [1] * 5, slots, windows, states)
    assert all(map(torch.equal, before, row)) and not out.requires_grad
    assert torch.equal(windows[slots, :, :-1], before[3][slots, :, 1:]) and torch.equal(windows[slots, :, -1], row[0])
    assert torch.equal(windows[[2, 5]], before[3][[2, 5]]) and torch.equal(states[[2, 5]], before[4][[2, 5]])
    assert all(not torch.equal(states[slot], before[4][slot]) for slot in slots)
    before = windows.clone(), states.clone()
    nothing = advance(weights, *(x[:0] for x in row), [0] * 5, slots, windows, states)
    empty = row[0][:0].requires_grad_()
    assert torch.autograd.grad(attend(weights, empty, *(x[:0] for x in row[1:]), [0, 0]).sum(), empty)[0].shape == empty.shape
    assert torch.equal(before[0], windows) and torch.equal(before[1], states) and nothing.shape == (0, HEADS.v, HEADS.v_dim)


def test_what_does_not_belong_together_is_refused():
    weights, row = draw_layer(HEADS, 5, torch.bfloat16)
    slots, windows, states = torch.tensor([0]), row[0].new_zeros(2, row[0].shape[1], 3), torch.zeros(2, HEADS.v, HEADS.k_dim, HEADS.v_dim)
    with pytest.raises(ValueError, match="4 tokens need"):
        attend(weights, *row, [4])
    with pytest.raises(ValueError, match="need"):
        attend(weights._replace(heads=HEADS._replace(v=4)), *row, [5])
    with pytest.raises(ValueError, match=r"states are torch.bfloat16 .*, must be torch.float32"):
        advance(weights, *row, [5], slots, windows, states.bfloat16())
    with pytest.raises(ValueError, match=r"windows are torch.float32 .*, must be torch.bfloat16"):
        advance(weights, *row, [5], slots, windows.float(), states)
    with pytest.raises(ValueError, match=r"windows are torch.bfloat16 .*, contiguous"):
        advance(weights, *row, [5], slots, windows[:1].expand(2, -1, -1), states)


def test_functions_of_few_numbers_have_the_bits_of_many():
    x = 8 * random(333, seed=0)
    for function in (torch.exp, torch.sigmoid, F.softplus, F.silu):
        whole = batch_invariant.apply_elementwise(function, x)
        for start, length in itertools.product((0, 5, 200), (1, 2, 7, 31, 33, 100)):
            part = slice(start, start + length)
            assert torch.equal(batch_invariant.apply_elementwise(function, x[part]), whole[part])
