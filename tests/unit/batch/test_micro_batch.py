"""Packed micro-batches: every response token is a target exactly once. Serialization of samples is lossless; totals of parts add up."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.samples import assert_equal_samples, make_samples

from megatron_rl.batch.kept_tokens import extend_kept_tokens, make_kept_tokens
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.packing import compute_costs, context_parallel_positions, deal, pack
from megatron_rl.batch.sample_bytes import SampleBytes, read_samples
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.batch_invariant import MIN_ROWS


@st.composite
def sequences(draw: st.DrawFn) -> list[TrainingSample]:
    """Sequences with advantages and log-probs, whose token ids encode sequence and position."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7))
    samples = []
    for index, (prompt, response) in enumerate(lengths):
        ids = [1 + 100 * index + position for position in range(prompt + response)]
        numbers = torch.arange(response) + 10.0 * index
        samples.append(TrainingSample(ids[:prompt], ids[prompt:], index - 2.5, numbers + 0.1, numbers + 0.2, numbers + 0.3))
    return samples


BOUND = st.integers(1, 40)


@given(sequences(), BOUND, st.integers(1, 4))
def test_a_row_concatenates_sequences_with_targets_shifted_by_one(samples, most, multiple):
    batches = make_micro_batches(samples, most, multiple=multiple)
    assert sorted(row for batch in batches for row in batch.sample_indices) == list(range(len(samples)))
    for batch in batches:
        used = [samples[index].length - 1 for index in batch.sample_indices]
        assert batch.sample_indices and (len(used) == 1 or sum(used) <= most)
        assert batch.lengths == used + [batch.padding] * bool(batch.padding)
        assert batch.padding < max(multiple, MIN_ROWS + multiple - sum(used))
        width = sum(batch.lengths)
        assert width >= MIN_ROWS and width % multiple == 0
        for name in ("tokens", "targets", "positions", "mask", "advantages", "old_logprobs", "reference_logprobs"):
            assert getattr(batch, name).shape == (1, width)
        parts = zip(*(getattr(batch, name)[0].split(batch.lengths) for name in ("tokens", "targets", "positions")), strict=True)
        for number, (tokens, targets, positions) in enumerate(parts):
            assert positions.tolist() == list(range(len(tokens)))
            sequence = samples[batch.sample_indices[number]] if number < len(used) else TrainingSample([0] * (batch.padding + 1), [])
            ids = sequence.ids.tolist()
            assert tokens.tolist() == ids[:-1] and targets.tolist() == ids[1:]


@given(sequences(), BOUND, st.integers(0, 3))
def test_a_shifted_row_looks_ahead_within_each_sequence(samples, most, by):
    for batch in make_micro_batches(samples, most):
        for row, shifted in zip(*(rows[0].split(batch.lengths) for rows in (batch.targets, batch.shift(batch.targets, by))), strict=True):
            assert shifted.tolist() == [*row[by:].tolist(), *[0] * min(by, len(row))]


@given(sequences(), BOUND)
def test_the_mask_selects_response_tokens_and_their_values(samples, most):
    for batch in make_micro_batches(samples, most):
        known = torch.zeros_like(batch.mask)
        for index, places in batch.split_by_sample(torch.arange(batch.mask.shape[1])[None], samples):
            known[0, places] = index + 1
        assert torch.equal(batch.mask, (known > 0).float())
        for index, sequence in enumerate(samples):
            if index in batch.sample_indices:
                response = known == index + 1
                assert batch.targets[response].tolist() == sequence.response_ids.tolist()
                assert (batch.advantages[response] == sequence.advantage).all()
                for name in ("old_logprobs", "reference_logprobs"):
                    assert torch.equal(getattr(batch, name)[response], getattr(sequence, name))
        for name in ("advantages", "old_logprobs", "reference_logprobs", "loss_weights", "importance_weights"):
            assert (getattr(batch, name)[known == 0] == 0).all()
        values = torch.arange(batch.mask.numel()).double().square().unsqueeze(0)
        means, sums = (dict(batch.split_by_sample(f(values), samples)) for f in (batch.average_by_sample, batch.sum_by_sample))
        for index, part in batch.split_by_sample(values, samples):  # means and sums cover only the response
            torch.testing.assert_close(means[index], part.mean().expand(len(part)), rtol=1e-12, atol=0)
            torch.testing.assert_close(sums[index], part.sum().expand(len(part)), rtol=1e-12, atol=0)


@given(sequences(), BOUND, st.integers(1, 4))
def test_replicas_share_all_sequences_and_take_equally_many_steps(samples, most, replicas):
    shares = [[samples[index] for index in share] for share in deal([sample.length for sample in samples], replicas)]
    assert sorted(sample.ids[0].item() for share in shares for sample in share) == [sample.ids[0].item() for sample in samples]
    needed = max(len(make_micro_batches(share, most)) for share in shares)
    for share in shares:
        batches = make_micro_batches(share, most, agree=lambda count: max(count, needed))
        assert sorted(row for batch in batches for row in batch.sample_indices) == list(range(len(share))) and len(batches) == needed
        for batch in batches:
            assert batch.tokens.numel() > 0
            assert batch.mask.sum() == sum(len(share[row].response_ids) for row in batch.sample_indices)


@given(sequences(), BOUND, st.integers(1, 3), st.integers(2, 4), st.integers(1, 3))
def test_context_ranks_get_equal_parts_of_every_sequence(samples, most, multiple, context, rounds):
    batches = make_micro_batches(samples, most, multiple=multiple, cp_size=context, vpp_group=rounds)
    assert len(batches) % rounds == 0
    assert sorted(row for batch in batches for row in batch.sample_indices) == list(range(len(samples)))
    for batch in batches:
        width = batch.tokens.numel()
        assert width == sum(batch.lengths) >= MIN_ROWS * context and width % (context * multiple) == 0
        assert all(length % (2 * context) == 0 for length in batch.lengths)
        assert width - batch.padding == sum(samples[index].length - 1 for index in batch.sample_indices)
        for index, response in batch.split_by_sample(batch.targets, samples):
            assert response.tolist() == samples[index].response_ids.tolist()
        parts = [context_parallel_positions(batch.lengths, rank, context) for rank in range(context)]
        assert sorted(place for part in parts for place in part) == list(range(width))
        assert {len(part) for part in parts} == {width // context}


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 400), st.integers(1, 8))
def test_bins_hold_every_sequence_once_within_the_bound_and_are_balanced(lengths, bound, replicas):
    bins = pack(lengths, bound, replicas)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert loads == sorted(loads, reverse=True)
    assert len(bins) % replicas == 0
    for load, members in zip(loads, bins, strict=True):
        assert load <= bound or len(members) == 1
    if lengths:
        assert loads[0] - loads[-1] <= max(lengths)
        shares = [sum(lengths[index] for index in share) for share in deal(lengths, replicas)]
        assert max(shares) - min(shares) <= max(lengths)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 400), st.integers(1, 4), st.integers(0, 9))
def test_bins_have_similar_cost_within_bounds_of_tokens_and_count(lengths, bound, multiple, at_least):
    """Attention doubles the cost of a sequence of 100 tokens."""
    costs = compute_costs(lengths, 100)
    assert costs == [length * (1 + length / 100) for length in lengths]
    bins = pack(lengths, bound, multiple, at_least, costs)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert len(bins) >= at_least and len(bins) % multiple == 0
    for members in bins:
        assert len(members) <= 1 or sum(lengths[index] for index in members) <= bound
    free = pack(lengths, 10**6, multiple, at_least, costs)
    loads = [sum(costs[index] for index in members) for members in free]
    assert max(loads) - min(loads) <= max(costs) + 1e-9


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 1000))
def test_bins_are_at_least_half_full(lengths, bound):
    """The two least full bins together exceed the bound, unless there is only one bin."""
    assert len(pack(lengths, bound)) <= max(1, 2 * sum(lengths) // bound + 1)


def test_one_micro_batch_by_hand_and_none():
    """A context-parallel rank gets one chunk from the front and one from the back."""
    assert context_parallel_positions([8, 4], 0, 2) == [0, 1, 6, 7, 8, 11]
    assert context_parallel_positions([8, 4], 1, 2) == [2, 3, 4, 5, 9, 10]
    assert len(pack([600] * 4096, 1000)) == 4096, "packed within moments"
    (batch,) = make_micro_batches([TrainingSample([1, 2], [3, 4])], 64)
    assert not batch.old_logprobs.any() and not batch.reference_logprobs.any() and not batch.advantages.any(), "unknown values are zeros"
    assert len(make_micro_batches([], 64)) == 0
    copy = batch.to(torch.device("meta"))
    assert copy.sample_indices == batch.sample_indices
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert (getattr(copy, name).device.type, getattr(copy, name).shape) == ("meta", value.shape), name


def test_kept_tokens_are_placed_at_their_target():
    """This also holds next to a sample without kept tokens, and next to tokens of an environment."""
    kept = extend_kept_tokens(make_kept_tokens([[4, 9], [5]]), make_kept_tokens([[7, 8, 6]]))
    samples = [TrainingSample([1, 2], [4, 5, 0, 6], response_mask=[True, True, False, True], kept_tokens=kept), TrainingSample([1], [3])]
    [batch] = make_micro_batches(samples, 100)
    width = batch.tokens.shape[1]
    assert batch.kept_tokens.shape == (1, width, 3) and batch.kept_tokens.dtype == torch.int32
    expected = {4: [4, 9, -1], 5: [5, -1, -1], 6: [7, 8, 6]}  # by target
    for target, mask, row in zip(batch.targets[0].tolist(), batch.mask[0].tolist(), batch.kept_tokens[0].tolist(), strict=True):
        assert row == (expected.get(target, [-1] * 3) if mask else [-1] * 3)
    assert not len(make_micro_batches(samples[1:], 100)[0].kept_tokens)


SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), max_size=6)
COLUMNS = {
    "old_logprobs": 0.0,
    "reference_logprobs": 0.0,
    "values": 0.0,
    "returns": 0.0,
    "teacher_logprobs": 0.0,
    "importance_weights": 1.0,
}


@given(
    SHAPES, st.sets(st.sampled_from(["mask", "kept"])), st.sets(st.sampled_from([*COLUMNS, "token_advantages", "draws"])), st.integers(1, 2)
)
def test_a_row_holds_the_values_of_each_sample_at_its_own_targets(shapes, with_columns, names, context):
    """Every column may be missing from some samples."""
    samples, numbers = make_samples(shapes, with_columns), torch.Generator().manual_seed(0)
    for index, sample in enumerate(samples):
        for place, name in enumerate(sorted(names)):
            if (index + place) % 3:
                shape = (sample.sampled_count, 2) if name == "draws" else (sample.sampled_count,)
                setattr(sample, name, torch.rand(*shape, generator=numbers, dtype=torch.float64 if name == "draws" else torch.float32))
    firsts = [sum(sample.length - 1 for sample in samples[:index]) for index in range(len(samples))]
    for batch in make_micro_batches(samples, 17, cp_size=context):
        start, known = 0, torch.zeros_like(batch.mask)
        for index, length in zip(batch.sample_indices, batch.lengths, strict=False):
            sample, own = samples[index], start + samples[index].target_positions
            positions = slice(start, start + sample.length - 1)
            assert batch.token_indices[0, positions].tolist() == list(range(firsts[index], firsts[index] + sample.length - 1))
            assert batch.tokens[0, positions].equal(sample.ids[:-1].long()) and batch.targets[0, positions].equal(sample.ids[1:].long())
            assert (batch.loss_weights[0, own] == sample.loss_weight).all() and batch.advantages[0, own].equal(sample.advantages)
            for name, default in COLUMNS.items():
                if len(values := getattr(sample, name)) or len(getattr(batch, name)):
                    assert getattr(batch, name)[0, own].equal(values if len(values) else torch.full((len(own),), default)), name
            if len(batch.draws):
                assert not len(own) or len(sample.draws) == 0 or batch.draws[0, own].equal(sample.draws)
                assert len(sample.draws) or (batch.draws[0, own, 0] == -1).all()
            if len(batch.kept_tokens):
                tokens, found = sample.kept_tokens, batch.kept_tokens[0, own]
                counts = np.zeros(len(own)) if tokens is None else tokens.counts
                assert (found >= 0).sum(-1).tolist() == counts.tolist()
                assert tokens is None or found[found >= 0].tolist() == tokens.ids.tolist()
            known[0, own], start = 1.0, start + length
        assert batch.mask.equal(known) and not batch.advantages[known == 0].any() and not batch.importance_weights[known == 0].any()
        unused = [name for name in ("tokens", "targets") for place in range(start, len(batch.tokens[0])) if getattr(batch, name)[0, place]]
        assert not unused and (batch.token_indices >= 0).sum() == sum(samples[index].length - 1 for index in batch.sample_indices)


@given(SHAPES, st.sets(st.sampled_from(["mask", "experts", "wide experts", "kept", "lags"])), st.integers(1, 400))
def test_serialization_is_lossless(shapes, with_columns, piece_bytes):
    samples = make_samples(shapes, with_columns)
    sent = SampleBytes(samples)
    pieces = [piece.clone() for piece in sent.iterate(piece_bytes)]
    assert all(len(piece) == min(piece_bytes, sent.total) for piece in pieces[:-1]) and sum(map(len, pieces)) == sent.total
    data = torch.cat(pieces)
    received = read_samples(data)
    assert_equal_samples(received, samples)
    owners = {sample.response_ids.untyped_storage().data_ptr() for sample in received if len(sample.response_ids)}
    assert owners <= {data.untyped_storage().data_ptr()}, "nothing is copied"


def test_a_token_takes_eight_bytes_and_a_column_has_one_dtype():
    ids, logprobs = torch.zeros(10**5, dtype=torch.int32), torch.zeros(10**5)
    assert SampleBytes([TrainingSample(ids[:1], ids, rollout_logprobs=logprobs)]).total < 8.03 * 10**5
    with pytest.raises(ValueError, match="samples disagree on the dtype or shape of a column"):
        SampleBytes([TrainingSample(ids, ids, rollout_logprobs=values) for values in (logprobs, logprobs.double())])


def damage(data: bytes, old: bytes, new: bytes) -> bytes:
    """Return the serialized samples with another header."""
    length = int.from_bytes(data[:8], "little")
    assert old in data[8 : 8 + length]
    header = data[8 : 8 + length].replace(old, new)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


FOREIGN = {
    "a pickle": lambda data: len(text := pickle.dumps([{}, [], []])).to_bytes(8, "little") + text,
    "no samples": lambda data: bytes(8),
    "more samples": lambda data: damage(data, b"[2,[", b"[3,["),
    "a negative number": lambda data: damage(data, b"[2,[", b"[-2,["),
    "a number as text": lambda data: damage(data, b"[2,[", b'["2",['),
    "another attribute of torch": lambda data: damage(data, b"float32", b"manual_seed"),
    "an unknown dtype": lambda data: damage(data, b"float32", b"float31"),
    "another dtype": lambda data: damage(data, b"float32", b"float64"),
    "another shape": lambda data: damage(data, b'"float32",[]', b'"float32",[7]'),
    "bytes too many": lambda data: data + bytes(16),
    "bytes too few": lambda data: data[:-16],
    "a header longer than the data": lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_data_that_are_no_samples_are_refused(kind):
    samples = [TrainingSample(torch.arange(3), torch.arange(5), rollout_logprobs=torch.zeros(5)) for _ in range(2)]
    data = b"".join(piece.numpy().tobytes() for piece in SampleBytes(samples).iterate(1 << 20))
    read_samples(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    with pytest.raises((ValueError, RuntimeError)):
        read_samples(torch.frombuffer(bytearray(FOREIGN[kind](data)), dtype=torch.uint8))


@given(st.lists(st.floats(-100, 100, width=32), max_size=9), st.integers(0, 9))
def test_merged_totals_equal_the_totals_of_the_whole(values, cut):
    whole, *parts = (Totals() for _ in range(3))
    for totals, some in zip((whole, *parts), (values, values[:cut], values[cut:]), strict=True):
        totals.add("x", torch.tensor(some))
    merged = Totals.merge(parts)
    assert (merged.count("x"), merged.largest("x")) == (len(values), max(values, default=0.0))
    assert merged.mean("x") == pytest.approx(whole.mean("x"), rel=1e-12, abs=1e-12)
    assert merged.mean("x") == pytest.approx(np.mean(values) if values else 0.0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_kept(order):
    totals = Totals()
    for value in order:
        totals.add("x", torch.tensor([value]))
    assert math.isnan(totals.largest("x")) and math.isnan(totals.mean("x"))
