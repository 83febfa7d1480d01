"""Sampling depends only on seed and position, with the right frequencies."""

import ast
import typing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_tests import random

from megatron_rl.rollout.groups import derive_seed
from rollout_sglang.hooks.seeded_sampling import find_kept_tokens, hash_to_uniform, sample_tokens, sample_truncated, truncate


def test_a_draw_does_not_depend_on_its_company_and_frequencies_are_the_probabilities():
    probs, positions = torch.softmax(2 * random(64, 300, seed=0), -1), torch.arange(64) * 3
    seeds = torch.tensor([derive_seed(0, 1, "train/0", index) for index in range(64)])
    tokens = sample_tokens(probs, seeds, positions)
    assert tokens.dtype == torch.int32 and tokens.shape == (64,)
    for row in range(64):
        assert sample_tokens(probs[row : row + 1], seeds[row : row + 1], positions[row : row + 1])[0] == tokens[row]
    for other in (sample_tokens(probs, seeds, positions + 1), sample_tokens(probs, seeds + 1, positions)):
        assert not torch.equal(other, tokens)
    probs, count = torch.softmax(2 * random(1, 12, seed=0), -1), 40_000
    seeds = torch.tensor([derive_seed(0, 0, "train/0", index) for index in range(count // 40)]).repeat_interleave(40)
    tokens = sample_tokens(probs.expand(count, 12), seeds, torch.arange(count) % 40)
    result = torch.bincount(tokens.long(), minlength=12) / count
    error = (probs[0] * (1 - probs[0]) / count).sqrt()
    assert ((result - probs[0]).abs() < 5 * error).all()
    probs = torch.zeros(5000, 4)
    probs[:, 1], probs[:, 3] = 0.25, 0.75
    tokens = sample_tokens(probs, torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    assert set(tokens.tolist()) == {1, 3}


def test_the_hash_is_splitmix64_and_seeds_differ_by_run_version_purpose_and_completion():
    """The generator's published first outputs from seed 0 (its state after one and two steps), as numbers in [0, 1)."""
    result = hash_to_uniform(np.array([0, 0]), np.array([0, 1]))
    assert result.tolist() == [(0xE220A8397B1DCDAF >> 11) * 2.0**-53, (0x6E789E6AA1B965F4 >> 11) * 2.0**-53]
    draws = [(0, 1, "eval", 0), (1, 1, "eval", 0), (0, 2, "eval", 0), (0, 1, "train/0", 0), (0, 1, "eval", 1)]
    seeds = {derive_seed(*draw) for draw in draws}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 1, "eval", 0) == derive_seed(0, 1, "eval", 0)


def kept_by_definition(probs: list[float], top_p: float, top_k: int, min_p: float) -> list[int]:
    """Select token by token, most probable first: at most top_k, none once top_p is reached, none below min_p of the first."""
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, reached, total = [], 0.0, float(np.sum(np.array(probs)))
    for rank, token in enumerate(ranked):
        if rank < top_k and (top_p == 1 or reached < top_p * total) and probs[token] >= np.float32(min_p * probs[ranked[0]]):
            kept.append(token)
        reached += probs[token]
    return kept


BOUNDS = [0.01, 0.3, 0.5, 0.9, 0.999, 1.0], [1, 2, 7, 50, 1 << 30], [0.0, 0.01, 0.2, 0.9]  # top_p, top_k, min_p


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 600), st.floats(0.1, 20), st.tuples(*map(st.sampled_from, BOUNDS)), st.booleans())
def test_the_kept_tokens_are_those_of_the_definition(seed, size, spread, bounds, coarse):
    logits = random(size, seed=seed) * spread
    probs = torch.softmax(logits.round() if coarse else logits, -1)  # coarse: many are equally probable
    assert find_kept_tokens(probs, *bounds).tolist() == kept_by_definition(probs.double().tolist(), *bounds)


def test_the_kept_tokens_are_those_of_sglang():
    """Compared with the installed source, except for tokens at the border, where SGLang's float32 sums round."""
    [package] = find_spec("sglang").submodule_search_locations
    functions = ast.parse(Path(package, "srt", "layers", "sampler.py").read_text()).body
    named = [node for node in functions if getattr(node, "name", "") == "top_k_top_p_min_p_sampling_from_probs_torch"]
    names = {"torch": torch, "Optional": typing.Optional}
    exec(compile(ast.Module(named, []), "sampler.py", "exec"), names)
    probs = torch.softmax(3 * random(200, 5000, seed=5), -1)
    top_ps, top_ks, min_ps = torch.full((200,), 0.9), torch.full((200,), 40, dtype=torch.int32), torch.full((200,), 0.0)
    filtered = names[named[0].name]
    _, weights, ids, _ = filtered(probs.clone(), top_ks, top_ps, min_ps, False, None, None, return_filtered_probs=True)
    for row in range(200):
        expected = set(ids[row, weights[row] > 0].tolist())
        assert len(expected ^ set(find_kept_tokens(probs[row], 0.9, 40, 0.0).tolist())) <= 1


def test_sglang_gets_the_kept_tokens_most_probable_first():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75], [0.5, 0.0, 0.3, 0.2]])
    arguments = (None, None, None, False, torch.tensor([1, 2]), torch.tensor([0, 0]))
    tokens, weights, ids, drawn = sample_truncated(probs, *arguments, return_filtered_probs=True, max_top_k=3)
    assert torch.equal(tokens, sample_truncated(probs, *arguments)) and torch.equal(tokens, sample_tokens(probs, *arguments[-2:]))
    assert [row[mass > 0].tolist() for row, mass in zip(ids, weights, strict=True)] == [[3, 1], [0, 2, 3]]
    assert drawn.tolist() == [probs[row, token] for row, token in enumerate(tokens.tolist())] and ids.dtype == torch.int32


def test_every_request_of_a_batch_is_cut_by_its_own_bounds():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]]).repeat(5, 1)
    sampling = SimpleNamespace(
        temperatures=torch.tensor([[1.0], [1.0], [0.01], [1.0], [1.0]]),
        top_ps=torch.tensor([1.0, 1.0, 0.9, 0.7, 1.0]),
        top_ks=torch.tensor([1 << 30, 1, 1 << 30, 1 << 30, 1 << 30], dtype=torch.int32),
        min_ps=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1]),
    )
    truncate(logits, sampling)
    kept = [torch.isfinite(row).nonzero().view(-1).tolist() for row in logits]
    assert kept == [[0, 1, 2, 3], [0], [0], [0, 2], [0, 1, 2]], "temperature comes before top_p"
    assert logits[3].tolist() == [3.0, -torch.inf, 2.0, -torch.inf]
