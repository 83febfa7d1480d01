"""The root of an engine rank's digests is the sum of what the trainer ranks fold, and any other list of digests has another root."""

import random

from hypothesis import given
from hypothesis import strategies as st

from parallel.proof_root import ROOT_NUMBERS, add_roots, fold_digests, reduce_root

digests = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")
received = st.lists(st.tuples(st.integers(0, 4), digests), min_size=1, max_size=12, unique_by=lambda entry: entry[1])


@given(received, st.integers(0, 511), st.randoms(use_true_random=False))
def test_the_sum_over_trainer_ranks_is_the_engine_ranks_root(entries, target, order):
    whole = fold_digests(target, entries)
    shares = [fold_digests(target, [entry for entry in entries if entry[0] == source]) for source in range(5)]
    order.shuffle(shares)
    assert reduce_root([sum(numbers) for numbers in zip(*shares, strict=True)]) == whole  # as a reduction adds them
    total = [0] * ROOT_NUMBERS
    for share in shares:
        total = add_roots(total, share)
    assert total == whole and whole[0] == len(entries) and all(0 <= lane < 2**32 for lane in whole[1:])
    interleaved = sorted(entries, key=lambda entry: entry[0])  # the order between trainer ranks does not matter
    assert fold_digests(target, interleaved) == whole


@given(received, st.integers(0, 511), st.data())
def test_every_change_shows(entries, target, data):
    whole = fold_digests(target, entries)
    index = data.draw(st.integers(0, len(entries) - 1))
    source, digest = entries[index]
    flipped = f"{int(digest, 16) ^ 1 << data.draw(st.integers(0, 127)):032x}"
    others = [*entries[:index], *entries[index + 1 :]]
    changed = {
        "a flipped bit": [*entries[:index], (source, flipped), *entries[index + 1 :]],
        "a lost chunk": others,
        "a chunk of another trainer rank": [*entries[:index], (source + 5, digest), *entries[index + 1 :]],
        "a chunk that is not hashed": [*entries[:index], (source, ""), *entries[index + 1 :]],
        "a chunk twice": [*entries, entries[index]],
    }
    later = [each for each in entries[index + 1 :] if each[0] == source]
    if later:
        changed["chunks in another order"] = [*entries[:index], *entries[index + 1 :], entries[index]]
    for what, other in changed.items():
        assert fold_digests(target, other) != whole, what
    assert fold_digests(target + 1, entries) != whole
    assert fold_digests(target, changed["a chunk that is not hashed"])[0] == len(entries) - 1


def test_lanes_of_many_ranks_do_not_overflow():
    numbers, ranks = random.Random(0), 1 << 20
    root = [1, *(numbers.getrandbits(32) for _ in range(ROOT_NUMBERS - 1))]
    assert max(root[1:]) * ranks < 2**63
    assert reduce_root([number * ranks for number in root]) == [ranks, *(lane * ranks % 2**32 for lane in root[1:])]
