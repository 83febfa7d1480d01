"""Log-probs over the tokens that were kept: those of the definition, with their gradient, however ranks share the vocabulary."""

from __future__ import annotations

import pytest
import torch
from support import trainer

from megatron_rl.batch.kept_tokens import make_kept_tokens, pad_kept_tokens
from megatron_rl.mcore.passes.logprobs import Targets


@pytest.mark.parametrize("ranks", [1, 2])
def test_they_are_the_definitions_however_many_ranks_share_the_vocabulary(worlds, ranks):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((4, 8), (12, 8)))
    sets = [[2, 9, 4], [11], [6, 5], list(range(12))]
    kept = pad_kept_tokens(make_kept_tokens(sets), 12)
    kept[3] = -1  # nothing is known: all tokens
    targets = Targets(torch.tensor([2, 11, 5, 7]), 0.7, kept)
    results = worlds(ranks).call(trainer.vocabulary_logprobs, hidden, weight, targets)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.t() / 0.7
    expected = torch.stack([logits[row][ids].log_softmax(-1)[ids.index(int(targets.tokens[row]))] for row, ids in enumerate(sets)])
    dhidden, dweight = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(torch.cat([result["weight"] for result in results]), dweight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(result["hidden"] for result in results), dhidden, rtol=1e-5, atol=1e-6)
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()  # over all tokens
    for result in results:
        assert torch.equal(result["logprobs"], result["scored"]) and result["scored"][1] == 0, "of one token alone"
        torch.testing.assert_close(result["logprobs"], expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result["entropies"], entropies)
