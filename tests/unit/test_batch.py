"""Padded micro-batches: every answer token is a target exactly once, whatever the size of a micro-batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.batch import Sequence, micro_batches
from megatron_rl.row_invariant import FEWEST_ROWS

quick = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    """Sequences whose token ids tell which sequence and position they belong to; all know their advantage and log-probs."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7))
    found = []
    for index, (prompt, answer) in enumerate(lengths):
        ids = [1 + 100 * index + position for position in range(prompt + answer)]
        numbers = torch.arange(answer) + 10.0 * index
        found.append(Sequence(ids[:prompt], ids[prompt:], index - 2.5, numbers + 0.1, numbers + 0.2, numbers + 0.3))
    return found


@quick
@given(sequences(), st.integers(1, 8))
def test_rows_are_the_sequences_shifted_by_one_and_padded_right(found, size):
    batches = micro_batches(found, size)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(found)))
    for batch in batches:
        assert 1 <= len(batch.rows) <= size
        fewest = -(-FEWEST_ROWS // len(batch.rows))
        width = max(max(found[index].length for index in batch.rows) - 1, fewest)
        for name in ("tokens", "targets", "positions", "mask", "advantages", "old_logprobs", "reference_logprobs"):
            assert getattr(batch, name).shape == (len(batch.rows), width)
        assert (batch.positions == torch.arange(width)).all()
        for row, index in enumerate(batch.rows):
            ids = found[index].prompt_ids + found[index].answer_ids
            padding = [0] * (width - len(ids) + 1)
            assert batch.tokens[row].tolist() == ids[:-1] + padding
            assert batch.targets[row].tolist() == ids[1:] + padding


@quick
@given(sequences(), st.integers(1, 8))
def test_the_mask_selects_the_answer_tokens_and_what_is_known_of_them(found, size):
    for batch in micro_batches(found, size):
        assert set(batch.mask.unique().tolist()) <= {0.0, 1.0}
        for row, index in enumerate(batch.rows):
            sequence, answer = found[index], batch.mask[row].bool()
            assert batch.targets[row][answer].tolist() == sequence.answer_ids
            assert (batch.advantages[row] == batch.mask[row] * sequence.advantage).all()
            for name in ("old_logprobs", "reference_logprobs"):
                values = getattr(batch, name)[row]
                assert torch.equal(values[answer], getattr(sequence, name))
                assert (values[~answer] == 0).all()


@quick
@given(sequences(), st.integers(1, 8))
def test_answers_gives_each_sequence_its_part_back(found, size):
    returned = {index: part for batch in micro_batches(found, size) for index, part in batch.answers(batch.targets, found)}
    assert {index: part.tolist() for index, part in returned.items()} == {
        index: sequence.answer_ids for index, sequence in enumerate(found)
    }


@quick
@given(sequences())
def test_neighbours_are_of_like_length(found):
    lengths = [found[index].length for batch in micro_batches(found, 2) for index in batch.rows]
    assert lengths == sorted(lengths, reverse=True)


@quick
@given(sequences(), st.integers(1, 4), st.integers(1, 4))
def test_replicas_share_all_sequences_evenly_and_take_as_many_steps_as_each_other(found, size, replicas):
    dealt = [micro_batches(found, size, replica, replicas) for replica in range(replicas)]
    rows = [[row for batch in batches for row in batch.rows] for batches in dealt]
    assert sorted(row for share in rows for row in share) == list(range(len(found)))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    assert len({len(batches) for batches in dealt}) == 1
    for batch in (batch for batches in dealt for batch in batches):
        assert len(batch.rows) <= size and batch.tokens.numel() > 0
        assert batch.mask.sum() == sum(len(found[row].answer_ids) for row in batch.rows)


def test_unknown_log_probs_are_zeros():
    (batch,) = micro_batches([Sequence([1, 2], [3, 4])], 4)
    assert not batch.old_logprobs.any() and not batch.reference_logprobs.any() and not batch.advantages.any()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_to_cut_gives_no_micro_batch(size):
    assert micro_batches([], size) == []


def test_all_of_a_micro_batch_goes_to_the_models_device():
    (batch,) = micro_batches([Sequence([1, 2], [3, 4, 5])], 4)
    moved = batch.to(torch.device("meta"))
    assert moved.rows == batch.rows
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            assert (getattr(moved, name).device.type, getattr(moved, name).shape) == ("meta", value.shape), name
