"""More tensor-parallel ranks than key-value heads: a rank exchanges what it needs, and gets what Megatron gathers."""

from __future__ import annotations

import pytest
import torch
from support import shared_heads
from support.shared_heads import DIM, TOKENS


@pytest.mark.parametrize("tp, groups, queries", [(2, 1, 4), (4, 2, 16), (4, 1, 4), (4, 1, 8)])
def test_heads_and_gradients_are_those_of_megatrons_gather(worlds, tp, groups, queries):
    results = worlds(tp).call(shared_heads.exchanged_and_gathered, groups, queries)
    for exchanged, gathered in results:
        assert torch.equal(exchanged["y"], gathered["y"])
        if tp == 2 * groups:  # of two addends
            assert torch.equal(exchanged["dx"], gathered["dx"])
        else:  # Megatron rounds after every addition
            assert torch.allclose(exchanged["dx"], gathered["dx"], rtol=2**-6, atol=2**-5)
        assert (exchanged["dx"] != 0).float().mean() > 0.99
    ranks = tp // groups
    own = [sum(exchanged["sent"]) for exchanged, _ in results]
    # forward and backward: keys and values for the other ranks of the head, and queries that lie with another
    assert sum(own) < 2 * groups * TOKENS * DIM * (2 * (ranks - 1) + queries)
    assert sum(own) < 2 * tp * (tp - 1) * TOKENS * (queries + 2) * DIM // ranks
