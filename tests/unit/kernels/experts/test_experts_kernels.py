"""Tokens go to their experts and back: tables of padded rows, sums in a fixed order, gradients, and the kernels in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_gpu_libraries
from support.fp8_reference import check_columns, check_rows, same_bits, uneven
from support.kernel_tests import in_interpreter, random

from megatron_rl.kernels.experts import expert_sum
from megatron_rl.kernels.experts.expert_sum import sum_experts
from megatron_rl.kernels.experts.reference import collect, group_parts, place_tokens, scatter_tokens, sum_tokens, tabulate_parts, weigh
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.sums import reference as tree
from parallel.formats import BLOCK

_COUNTS = st.integers(1, 9).flatmap(lambda experts: st.lists(st.lists(st.integers(0, 300), min_size=experts, max_size=experts), min_size=1))
TOKENS, K = 5, 3
SENT = torch.tensor([[3, 0, 130], [1, 0, 20]])
"""Tokens of two ranks for three experts."""


def make_order() -> torch.Tensor:
    return torch.randperm(TOKENS * K, generator=torch.Generator().manual_seed(0)).view(TOKENS, K).sort(1).values


def sum_in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(order), x.shape[1])
    for places in order.unbind(1):
        total += x[places].float()
    return total.to(x.dtype)


def test_scatter_and_sum_are_each_others_gradients():
    order, x, rows = make_order(), random(TOKENS, 16, seed=0).requires_grad_(), random(TOKENS * K, 16, seed=1).requires_grad_()
    spread, summed = scatter_tokens(x, order), sum_tokens(rows, order)
    assert all(torch.equal(spread[places], x) for places in order.unbind(1))
    assert torch.allclose(summed, sum_in_order(rows, order), atol=1e-6)
    spread.backward(rows.detach())
    summed.backward(x.detach())
    assert torch.equal(x.grad, summed) and torch.equal(rows.grad, spread)


@in_interpreter
def test_the_kernels_give_the_references_bits():
    from megatron_rl.kernels.experts.triton import collect as collect_rows
    from megatron_rl.kernels.experts.triton import scatter, sum_rows

    order, places, weights = make_order(), torch.tensor([7, 0, 3]), torch.tensor([0.3, 1.7, 0.0])
    for dtype, width in ((torch.float32, 48), (torch.bfloat16, 64), (torch.int32, 33)):
        x = (random(TOKENS, width, seed=0) * 100).to(dtype)
        rows = scatter(x, order)
        assert torch.equal(rows, scatter_tokens(x, order)) and torch.equal(collect_rows(rows, places, None), collect(rows, places))
        if dtype is torch.float32:
            rows = random(TOKENS * K, width, seed=1)
            assert torch.equal(sum_rows(rows, order), sum_in_order(rows, order))
            assert torch.equal(collect_rows(rows, places, weights), weigh(rows[places], weights))
    exact = torch.arange(TOKENS * K * 64).view(TOKENS * K, 64).remainder(32).bfloat16()  # the interpreter truncates to BF16
    assert torch.equal(sum_rows(exact, order), sum_in_order(exact, order))
    assert sum_rows(torch.empty(0, 8), torch.empty(0, K, dtype=torch.int64)).shape == (0, 8)


@given(_COUNTS)
@settings(max_examples=50, deadline=None)
def test_tables_put_every_token_into_a_row_of_its_expert(counts):
    groups = TokenGroups.from_counts(counts, "cpu")
    owners = torch.cat([torch.arange(len(chunk)).repeat_interleave(torch.tensor(chunk)) for chunk in counts])
    assert groups.lengths == groups.sizes.tolist() == [-(-sum(column) // BLOCK) * BLOCK for column in zip(*counts, strict=True)]
    assert groups.rows == len(groups.sources) == sum(groups.lengths)
    assert torch.equal(groups.experts[groups.places].long(), owners)
    assert torch.equal(groups.sources[groups.places].long(), torch.arange(len(owners))), "no row has two tokens"
    assert (groups.sources < 0).sum() == groups.rows - len(owners)
    for number in range(len(groups.lengths)):
        of_expert = groups.sources[groups.experts == number]
        filled = of_expert[of_expert >= 0]
        assert torch.equal(of_expert[: len(filled)], filled) and (filled.diff() > 0).all(), "in order, padding behind them"
    first, length = groups.tiles
    for number, tile in enumerate(groups.experts[::BLOCK].tolist()):
        assert first[number] == sum(groups.lengths[:tile]) and length[number] == groups.lengths[tile]


@given(_COUNTS, st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_parts_give_every_token_the_row_that_counts_on_the_host_give_it(counts, spare):
    exact, size = TokenGroups.from_counts(counts, "cpu"), max(map(sum, counts)) + spare
    groups = group_parts(torch.tensor(counts), size)
    tokens = torch.cat([number * size + torch.arange(sum(chunk)) for number, chunk in enumerate(counts)])
    assert groups.rows % BLOCK == 0 and groups.rows >= exact.rows and len(groups.places) == len(counts) * size
    of_experts = groups.sources[: exact.rows]
    assert torch.equal(groups.experts[: exact.rows], exact.experts) and torch.equal(groups.places[tokens], exact.places)
    assert torch.equal(of_experts, torch.where(exact.sources < 0, -1, tokens[exact.sources.long()] if len(tokens) else -1).int())
    assert (groups.sources[exact.rows :] == -1).all() and (groups.experts[exact.rows :] == -1).all()


@in_interpreter
def test_places_and_tables_of_parts_match_the_kernels():
    """Also for parts that are too small, whose results are arbitrary but inside the parts."""
    from megatron_rl.kernels.experts import triton

    source = torch.Generator().manual_seed(0)
    for parts, experts, most in ((3, 5, 200), (1, 4, 10), (4, 1, 300), (8, 3, 40)):
        counts = torch.randint(0, most, (parts, experts), generator=source)
        for size in (int(counts.sum(1).max()) + 7, most // 2):
            limits = parts * size, experts, (parts * size // BLOCK + experts) * BLOCK  # of tokens, experts, and rows
            for ours, wanted, limit in zip(triton.tabulate_parts(counts, size), tabulate_parts(counts, size), limits, strict=True):
                assert ours.shape == wanted.shape and ours.dtype == wanted.dtype and int(ours.max()) < limit
                assert size == most // 2 or torch.equal(ours, wanted)
    tokens, experts, ranks = 50, 8, 4
    weights = torch.rand(experts, tokens, generator=source)
    routes = torch.zeros(experts, tokens, dtype=torch.bool).scatter_(0, weights.topk(K, 0).indices, True)
    chosen, counts = routes.flatten().nonzero().squeeze(1), routes.sum(1)
    for sizes in (counts.view(ranks, -1).sum(1) + torch.tensor([3, 0, 90, 1]), counts.view(ranks, -1).sum(1) - torch.tensor([0, 4, 0, 1])):
        total, noted = int(sizes.sum()), [torch.tensor([0.0, 0.9, 0.0, 0.0, 0.0]) for _ in range(2)]
        (places, sent), (wanted, at) = (
            place(chosen, weights.flatten(), counts, sizes, note, total)
            for place, note in zip((triton.place_tokens, place_tokens), noted, strict=True)
        )
        lacks = max(0, int((counts.view(ranks, -1).sum(1) - sizes).max()))
        assert torch.equal(places, wanted) and torch.equal(*noted) and noted[0][-1] == lacks and noted[0][1] == 0.9
        assert noted[0][2] == counts[4:6].sum() / len(chosen) and int(places.min()) >= 0 and int(places.max()) < total == len(sent)
        assert lacks or (len(places.unique()) == len(places) and torch.equal(sent[places], weights.flatten()[chosen]))
        assert lacks or torch.equal(at[places], sent[places])


@pytest.mark.kernels
@in_interpreter
def test_bytes_and_scales_match_separate_kernels():
    from megatron_rl.kernels.experts.triton import collect as collect_rows
    from megatron_rl.kernels.experts.triton import pack, quantize_weighed, spread_packed
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu

    groups = TokenGroups.from_counts(SENT, "cpu")
    tokens = len(groups.places)
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    for scale_format, dtype in (("pow2", torch.float32), ("fp32", torch.bfloat16)):
        x, outputs = uneven(tokens, 256, dtype), uneven(groups.rows, 256, dtype)
        spread = fake_gpu_libraries.spread(x, groups)
        rows, (data, scale) = quantize_activation(x, scale_format, rows=True, columns=True, groups=groups)
        check_rows(rows, spread, scale_format)
        for start, length in ((0, 128), (128, 256)):
            part = data[256 * start : 256 * (start + length)].view(256, length)
            check_columns((part, scale[:, start // 128 : (start + length) // 128]), spread[start : start + length], scale_format)
        weighed = collect_rows(x, torch.arange(tokens), weights)
        *found, of_weights = quantize_weighed(x, outputs, weights, groups, scale_format, columns=True)
        wanted = quantize_activation(weighed, scale_format, rows=True, columns=True, groups=groups)
        for pair, other in zip(found, wanted, strict=True):
            assert same_bits(pair, other) and [each.stride() for each in pair] == [each.stride() for each in other]
        exact = (x.double() * outputs[groups.places].double()).sum(-1)
        assert torch.allclose(of_weights.double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
        rows_alone, nothing, _ = quantize_weighed(x, outputs, weights, groups, scale_format, columns=False)
        assert nothing is None and same_bits(rows_alone, found[0])
        asked = {"rows": True, "columns": True, "groups": groups, "by_token": True}
        for source, by_token in (
            (x, quantize_activation(x, scale_format, **asked)),
            (weighed, quantize_weighed(x, outputs, weights, groups, scale_format, columns=True, by_token=True)[:2]),
        ):
            for pair, other in zip(by_token, fake_gpu_libraries.quantize_activation(source, scale_format, **asked), strict=True):
                assert same_bits(pair, other) and [each.stride() for each in pair] == [each.stride() for each in other]
        order = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(0)).view(tokens, 3)
        assert torch.equal(pack(x, order, scale_format), fake_gpu_libraries.pack(x, order, scale_format))
        in_parts = pack(x, 2 * order, scale_format, 7 * tokens)
        assert len(in_parts) == 7 * tokens and torch.equal(in_parts[2 * order], pack(x, order, scale_format)[order])
    packed = torch.randint(0, 1 << 30, (tokens, 64 + 2), dtype=torch.int32)
    found, wanted = spread_packed(packed, groups), fake_gpu_libraries.spread_packed(packed, groups)
    assert same_bits(found, wanted) and found[1].stride() == (1, 384)
    parts, size = group_parts(SENT, 150), 150
    sent = torch.full((len(SENT) * size, 64 + 2), -1, dtype=torch.int32)
    sent[torch.cat([number * size + torch.arange(count) for number, count in enumerate(SENT.sum(1).tolist())])] = packed
    in_parts = spread_packed(sent, parts)
    assert len(in_parts[0]) > groups.rows and same_bits([pair[: groups.rows] for pair in in_parts], found)
    gate_up = uneven(parts.rows, 512, torch.bfloat16)
    (wanted, _), (found, _) = (
        quantize_swiglu(gate_up[: each.rows], None, "pow2", rows=True, columns=False, groups=each) for each in (groups, parts)
    )
    assert same_bits([pair[: groups.rows] for pair in found], wanted)


@in_interpreter
def test_shapes_that_do_not_fit_are_refused():
    from megatron_rl.kernels.experts.triton import pack, quantize_weighed, scatter, spread_packed

    with pytest.raises(ValueError, match="does not match"):
        scatter(torch.zeros(4, 8), make_order())
    for shape in ((5, 192), (4, 256)):
        with pytest.raises(ValueError, match="must have a row per token"):
            pack(torch.zeros(shape), torch.zeros(5, 2, dtype=torch.int64), "pow2")
    groups, gradient = TokenGroups.from_counts(SENT, "cpu"), torch.zeros(154, 256)
    for outputs, weights in ((torch.zeros(154, 256), 154), (torch.zeros(384, 256), 153), (torch.zeros(384, 256).bfloat16(), 154)):
        with pytest.raises(ValueError, match="and groups do not match"):
            quantize_weighed(gradient, outputs, torch.zeros(weights), groups, "pow2", columns=True)
    for shape in ((154, 65), (153, 66)):
        with pytest.raises(ValueError, match="do not match their groups"):
            spread_packed(torch.zeros(shape, dtype=torch.int32), groups)


HIDDEN = 5


def add_slowly(outputs: dict[int, torch.Tensor], first: int, count: int) -> torch.Tensor | None:
    """Return the sum over the experts from `first` to `first + count - 1` that have an output, by the definition."""
    if count == 1:
        return outputs.get(first)
    half = (count + 1) // 2
    left, right = add_slowly(outputs, first, half), add_slowly(outputs, first + half, count - half)
    return left + right if left is not None and right is not None else right if left is None else left


def draw_choices(num_experts: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs `[n, H]` of many magnitudes, and their tokens `[n]` and experts `[n]` in random order. Some tokens have no expert."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, num_experts, generator=generator) < torch.rand(num_tokens, 1, generator=generator)
    tokens, experts = chosen.nonzero().t()
    order = torch.randperm(len(tokens), generator=generator)
    outputs = torch.randn(len(tokens), HIDDEN, generator=generator) * 2.0 ** torch.randint(-9, 9, (len(tokens), 1), generator=generator)
    return outputs, tokens[order], experts[order]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 999), st.sampled_from([1, 64, 1 << 20]))
def test_any_choice_is_added_up_by_the_tree_over_all_experts(num_experts, num_tokens, seed, tile):
    outputs, tokens, experts = draw_choices(num_experts, num_tokens, seed)
    before = outputs.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_sum, "_TILE", tile)
        summed = sum_experts(outputs, tokens, experts, num_tokens, num_experts, torch.float32)
    assert torch.equal(outputs, before)
    for token in range(num_tokens):
        mine = {int(expert): outputs[i] for i, expert in enumerate(experts) if tokens[i] == token}
        expected = add_slowly(mine, 0, num_experts)
        assert torch.equal(summed[token], torch.zeros(HIDDEN) if expected is None else expected)
        alone = tokens == token  # and without the other tokens
        assert torch.equal(sum_experts(outputs[alone], tokens[alone] * 0, experts[alone], 1, num_experts, torch.float32)[0], summed[token])


@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(0, 999))
def test_any_number_of_expert_parallel_ranks_gives_the_same_bits(experts_of_rank, ranks, seed):
    outputs, tokens, experts = draw_choices(ranks * experts_of_rank, 5, seed)
    whole = sum_experts(outputs, tokens, experts, 5, ranks * experts_of_rank, torch.float32)
    parts = []
    for rank in range(ranks):
        mine = experts // experts_of_rank == rank
        parts.append(sum_experts(outputs[mine], tokens[mine], experts[mine] % experts_of_rank, 5, experts_of_rank, torch.float32))
    assert torch.equal(tree.add(parts), whole)


def test_the_sum_is_rounded_once_and_its_gradient_is_every_outputs():
    outputs, tokens, experts = draw_choices(16, 8, 1)
    outputs = outputs.bfloat16().requires_grad_()
    summed = sum_experts(outputs, tokens, experts, 8, 16, torch.bfloat16)
    assert torch.equal(summed, sum_experts(outputs.detach(), tokens, experts, 8, 16, torch.float32).bfloat16())
    weights = torch.randn(8, HIDDEN).bfloat16()
    summed.backward(weights)
    assert torch.equal(outputs.grad, weights[tokens])
