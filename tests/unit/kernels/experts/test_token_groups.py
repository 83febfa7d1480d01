"""The tables of tokens that experts get, padded to blocks: each says what the counts say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.experts.token_groups import TokenGroups
from parallel.formats import BLOCK


@given(st.integers(1, 9).flatmap(lambda experts: st.lists(st.lists(st.integers(0, 300), min_size=experts, max_size=experts), min_size=1)))
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
