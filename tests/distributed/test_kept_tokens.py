"""Log-probs over the tokens that were kept: those of the definition, with their gradient, however ranks share the vocabulary."""

from __future__ import annotations

import pytest
import torch
from support import trainer

from megatron_rl.batch.kept_tokens import make_kept_tokens, pad_kept_tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_they_are_the_definitions_however_many_ranks_share_the_vocabulary(worlds, ranks):
    generator = torch.Generator().manual_seed(3)
    logits, targets = 3 * torch.randn(1, 4, 12, generator=generator), torch.tensor([[2, 11, 5, 7]])
    sets = [[2, 9, 4], [11], [6, 5], list(range(12))]
    kept = pad_kept_tokens(make_kept_tokens(sets), 12)[None]
    kept[0, 3] = -1  # nothing is known: all tokens
    results = worlds(ranks).call(trainer.vocabulary_logprobs, logits, targets, 0.7, kept)
    logits.requires_grad_()
    rows = [(logits[0, row] / 0.7)[ids].log_softmax(-1)[ids.index(int(targets[0, row]))] for row, ids in enumerate(sets)]
    expected = torch.stack(rows)
    [gradient] = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(torch.cat([part for _, part in results], -1), gradient, rtol=1e-5, atol=1e-6)
    for logprobs, _ in results:
        torch.testing.assert_close(logprobs[0], expected.detach(), rtol=1e-6, atol=1e-6)
        assert logprobs[0, 1] == 0, "of one token alone"
