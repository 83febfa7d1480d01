"""Faults of an engine that reports right log-probs but draws other tokens: in a live engine (`planted_server`) and in simulations."""

import torch

from rollout_sglang.hooks.seeded_sampling import sample_tokens

TEMPERATURE, TOKEN = 0.7, 1
"""Temperature that is applied twice, and the token that is banned or preferred."""
_drawn, _probs = {}, {}  # by seed: tokens drawn until now, and the previous token's distribution


def draw(fault, probs, seeds, positions, sample=sample_tokens):
    """Return int32 tokens `[n]` drawn with a fault, or right if it has no name here."""
    probs = probs.clone()
    if fault == "temperature twice":
        probs = probs.double() ** (1 / TEMPERATURE)
    elif fault == "biased token":
        probs[:, TOKEN] *= 3
    elif fault == "banned token":
        probs[:, TOKEN] = 0
    elif fault == "greedy":
        probs = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).float()
    elif fault == "one seed":
        seeds = torch.full_like(seeds, 7)
    elif fault == "one number":
        positions = torch.zeros_like(positions)
    elif fault == "kept set off by one":
        last = probs.masked_fill(probs == 0, torch.inf).argmin(-1)
        many = (probs > 0).sum(-1) > 1
        probs[many, last[many]] = 0
    elif fault == "penalty":
        for row, seed in enumerate(seeds.tolist()):
            probs[row, list(_drawn.get(seed, ()))] /= 2
    elif fault == "previous distribution":
        own = [_probs.get(seed, row) for seed, row in zip(seeds.tolist(), probs, strict=True)]
        _probs.update(zip(seeds.tolist(), probs, strict=True))
        probs = torch.stack(own)
    tokens = sample(probs, seeds, positions)
    if fault == "penalty":
        for seed, token in zip(seeds.tolist(), tokens.tolist(), strict=True):
            _drawn.setdefault(seed, set()).add(token)
    return tokens


def forget():
    """Forget earlier tokens."""
    _drawn.clear()
    _probs.clear()
