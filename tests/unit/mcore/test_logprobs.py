"""Log-probs and entropies of logits, and the positions that have logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state

from megatron_rl.mcore.logprobs import score_tokens, token_logprobs
from megatron_rl.mcore.scored_positions import ScoredPositions


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_softmaxs_and_so_are_gradient_and_entropy(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(1, 50, 70_000, generator=generator)).to(dtype).requires_grad_()
    targets, weights = torch.randint(70_000, (1, 50), generator=generator), torch.randn(1, 50, generator=generator)
    wanted = F.log_softmax(logits.float() / temperature, -1)
    at_targets = wanted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    logprobs, entropies = score_tokens(logits, targets, temperature)
    assert torch.equal(logprobs, at_targets) and torch.equal(token_logprobs(logits, targets, temperature), at_targets)
    torch.testing.assert_close(entropies, -(wanted.exp() * wanted).sum(-1).detach())
    (gradient,) = torch.autograd.grad((token_logprobs(logits, targets, temperature) * weights).sum(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad((at_targets * weights).sum(), logits)[0])


class _Model(torch.nn.Module):
    post_process = True

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=sequence_parallel)
        self.output_layer = torch.nn.Linear(4, 9)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output_layer(hidden.transpose(0, 1)).transpose(0, 1)  # Megatron's [s, b, h]


@pytest.mark.parametrize("mask, sequence_parallel, index", [
    ([0, 1, 0, 1, 1], False, [1, 3, 4]),
    ([0, 0, 0, 0, 0], False, [0]),  # a row of padding: its pass must still have a gradient
    ([1, 1, 1, 1, 1], False, [0, 1, 2, 3, 4]),
    ([0, 1, 0, 1, 1], True, [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_logits_are_those_of_the_scored_positions(mask, sequence_parallel, index):
    model: Any = _Model(sequence_parallel)
    hidden = torch.randn(1, 5, 4)
    scored = ScoredPositions.of(torch.tensor([mask]), model)
    with scored.restrict_logits(model):
        logits = model(hidden)
    assert torch.equal(logits, model(hidden[:, index])) and model(hidden).shape == (1, 5, 9)
    row = torch.arange(1.0, 6.0).unsqueeze(0)
    assert scored.select(row).tolist() == [[position + 1.0 for position in index]]
    assert scored.restore(scored.select(row)).tolist() == [[(position + 1.0) * (position in index) for position in range(5)]]
