"""Log-probs over a vocabulary that ranks share: its parts put together, and the kernels' results in Triton's interpreter."""

import pytest
import torch
from support.kernel_tests import in_interpreter

from megatron_rl.kernels.vocabulary.reference import combine, differentiate_, summarize

ROWS, VOCABULARY = 5, 96


def draw(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, and a target for each row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * 5
    return logits.to(dtype), torch.tensor([0, 1, vocabulary // 2, vocabulary - 2, vocabulary - 1])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_parts_of_the_vocabulary_match_the_whole(ranks, temperature):
    logits, targets = draw(torch.float64)
    logits.requires_grad_()
    wanted = (logits / temperature).log_softmax(-1)
    at_targets, width = wanted.gather(-1, targets[:, None])[:, 0], VOCABULARY // ranks
    parts = [part.detach().float() for part in logits.split(width, -1)]
    columns = [targets - rank * width for rank in range(ranks)]
    scores = combine(torch.cat([summarize(part, own, temperature, 4 // ranks) for part, own in zip(parts, columns, strict=True)]))
    assert torch.allclose(scores.logprobs.double(), at_targets, atol=1e-5)
    assert torch.allclose(scores.entropies.double(), -(wanted.exp() * wanted).sum(-1), atol=1e-5)
    factors = torch.linspace(-1, 1, ROWS)
    (expected,) = torch.autograd.grad((at_targets * factors).sum(), logits)
    for part, own in zip(parts, columns, strict=True):
        differentiate_(part, own, scores.log_sums, factors, temperature)
    assert torch.allclose(torch.cat(parts, -1).double(), expected, atol=1e-5)


@in_interpreter
def test_the_kernels_results_are_the_references():
    from megatron_rl.kernels.vocabulary import triton as kernels

    assert kernels.summarize(torch.empty(0, 96), torch.empty(0, dtype=torch.int64), 1.0).shape == (1, 0, 4)
    for vocabulary in (96, 5000):  # more than a program looks at together
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):  # the interpreter truncates to BF16
            for temperature in (1.0, 0.7):
                logits, targets = draw(dtype, vocabulary)
                targets[0], targets[1] = -7, vocabulary  # another rank's
                logits[2, : vocabulary // 3] = -torch.inf
                found, wanted = (f(logits, targets, temperature, 4) for f in (kernels.summarize, summarize))
                assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
                log_sums, gradient = combine(wanted).log_sums, torch.linspace(-1, 1, ROWS)
                in_place = logits.clone(), logits.clone()
                kernels.differentiate_(in_place[0], targets, log_sums, gradient, temperature)
                differentiate_(in_place[1], targets, log_sums, gradient, temperature)
                assert torch.allclose(in_place[0].float(), in_place[1].float(), rtol=bound, atol=1e-6)
