"""Log-probs and entropies in chunks of rows, the scored positions, and the order in which two micro-batches take turns."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from support.largest_tensor import LargestTensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.kernels.batch_invariant import SPLIT_SUM, invariant_matmul
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.base import two_batch
from megatron_rl.mcore.base.two_batch import PerMicroBatch, get_turn, give_turn, is_under_way, run_in_turns
from megatron_rl.mcore.passes import logprobs
from megatron_rl.mcore.passes.logprobs import ScoredPositions, Targets, score_tokens, token_logprobs

VOCABULARY, TOKENS = 3000, 50


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(two_batch, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=contextlib.nullcontext))


def make_layer(dtype: torch.dtype, width: int = SPLIT_SUM + 31) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (hidden states, weight, targets)."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, width, generator=generator) for rows in (TOKENS, VOCABULARY))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), (weight / 8).to(dtype).requires_grad_(), targets


def keep_some(tokens: torch.Tensor, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three tokens for each, and the logits of these alone."""
    kept = torch.stack([tokens, (tokens + 7) % VOCABULARY, (tokens + 9) % VOCABULARY], -1)
    return kept.int(), torch.full_like(scaled, -torch.inf).scatter(-1, kept, scaled.gather(-1, kept))


@pytest.mark.parametrize("rows", [16, 23, 1000])
@pytest.mark.parametrize("temperature, keep", [(1.0, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_gradients_and_entropies_match_whole_logits(monkeypatch, rows, temperature, keep, dtype):
    """The same bits for any chunk size, including a last chunk of two rows."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", rows * VOCABULARY)
    hidden, weight, tokens = make_layer(dtype)
    scaled = invariant_matmul(hidden, weight).float() / temperature
    kept, among = keep_some(tokens, scaled) if keep else (None, scaled)
    targets = Targets(tokens, temperature, kept)
    everything = tree.log_softmax(scaled)
    torch.testing.assert_close(everything, F.log_softmax(scaled, -1))
    wanted = tree.log_softmax(among).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    scored, entropies = score_tokens(hidden, weight, targets)
    at_targets = token_logprobs(hidden, weight, targets)
    assert torch.equal(scored, wanted) and torch.equal(at_targets, wanted)
    torch.testing.assert_close(entropies, -(everything.exp() * everything).sum(-1).detach())
    factors = torch.linspace(-1, 1, TOKENS)
    expected = torch.autograd.grad((wanted * factors).sum(), (hidden, weight))
    for got, gradient in zip(torch.autograd.grad((at_targets * factors).sum(), (hidden, weight)), expected, strict=True):
        assert (got - gradient).norm() < (1e-5 if dtype is torch.float32 else 5e-3) * gradient.norm() and got.dtype is dtype


@pytest.mark.parametrize("temperature, keep", [(1.0, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("alone", [False, True])
def test_the_gradient_of_entropies_matches_autograd(monkeypatch, temperature, keep, alone):
    """In chunks of 23 rows, with the gradient of log-probs or alone."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 23 * VOCABULARY)
    hidden, weight, tokens = make_layer(torch.float32)
    scaled = (hidden.double() @ weight.double().t()) / temperature
    kept, among = keep_some(tokens, scaled) if keep else (None, scaled)
    everything = F.log_softmax(scaled, -1)
    wanted = F.log_softmax(among, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    scored, entropies = score_tokens(hidden, weight, Targets(tokens, temperature, kept))
    factors = torch.linspace(-1, 1, TOKENS)
    got = torch.autograd.grad((entropies * factors).sum() + (0 if alone else (scored * factors.flip(0)).sum()), (hidden, weight))
    expected = torch.autograd.grad((entropy * factors).sum() + (0 if alone else (wanted * factors.flip(0)).sum()), (hidden, weight))
    for gradient, exact in zip(got, expected, strict=True):
        assert (gradient - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_gradient_goes_into_megatrons_buffer(monkeypatch, tied):
    """If an embedding shares the weight, DDP's hook adds autograd's gradient, which must then be zero."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 1)
    hidden, weight, tokens = make_layer(torch.bfloat16)
    (expected,) = torch.autograd.grad(token_logprobs(hidden, weight, Targets(tokens, 1.0)).sum(), weight)
    buffer = torch.ones_like(weight, dtype=torch.float32)
    weight.main_grad, weight.zero_out_wgrad = buffer, tied
    token_logprobs(hidden, weight, Targets(tokens, 1.0)).sum().backward()
    assert weight.grad_added_to_main_grad and weight.main_grad is buffer
    torch.testing.assert_close((buffer - 1).to(torch.bfloat16), expected, rtol=1e-2, atol=1e-3)
    assert not tied or not weight.grad.any()


def test_no_tensor_has_all_logits(monkeypatch):
    """In a forward and backward pass, and in a pass that only scores."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 16 * VOCABULARY)
    hidden, weight, tokens = make_layer(torch.float32, width=8)
    with LargestTensor() as largest:
        token_logprobs(hidden, weight, Targets(tokens, 0.7)).sum().backward()
        score_tokens(hidden, weight, Targets(tokens, 0.7))
    assert largest.numel == 16 * VOCABULARY


def test_logits_that_are_kept_give_the_same_bits_and_save_a_product(monkeypatch):
    """With fused kernels. They cannot differentiate entropies; then the logits are recomputed."""
    monkeypatch.setattr(logprobs, "_runs_kernels", lambda _: True)
    monkeypatch.setattr(logprobs, "LOGITS_PER_GPU_CHUNK", 16 * VOCABULARY)
    monkeypatch.setattr(logprobs, "_TILE", 16)
    hidden, weight, tokens = make_layer(torch.bfloat16)

    def run(keep_logits: bool, of_entropies: bool) -> tuple[list[torch.Tensor], float]:
        with FlopCounterMode(display=False) as counter:
            scored, entropies = score_tokens(hidden, weight, Targets(tokens, 0.7), keep_logits)
            loss = (scored * torch.linspace(-1, 1, TOKENS)).sum() + (entropies.sum() if of_entropies else 0)
            gradients = torch.autograd.grad(loss, (hidden, weight))
        return [scored, entropies, *gradients], counter.get_total_flops() / (2 * hidden.numel() * VOCABULARY)

    for of_entropies, products in ((False, 3), (True, 4)):
        (kept, made_once), (anew, made_twice) = (run(keep, of_entropies) for keep in (True, False))
        assert all(map(torch.equal, kept, anew)) and kept[2].any() and kept[3].any()
        assert (made_once, made_twice) == (products, 4)


def test_the_kernels_score_kept_tokens_as_pytorchs_operators_do(monkeypatch):
    """Rows that keep some tokens, one that keeps all, and one whose only kept token is the target."""
    hidden, weight, tokens = make_layer(torch.float32)
    kept = torch.stack([tokens, (tokens + 3) % VOCABULARY, (tokens + 7) % VOCABULARY], 1).int()
    kept[0], kept[1, 1:] = -1, -1
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(logprobs, "_runs_kernels", lambda _, kernels=kernels: kernels)
        scored, entropies = score_tokens(hidden, weight, Targets(tokens, 0.7, kept), keep_logits=True)
        alone = token_logprobs(hidden, weight, Targets(tokens, 0.7, kept))
        loss = (scored * torch.linspace(-1, 1, TOKENS)).sum() + entropies.sum()
        found.append([scored, entropies, alone, *torch.autograd.grad(loss, (hidden, weight))])
    assert found[0][0][1] == found[1][0][1] == 0 and torch.equal(found[1][0], found[1][2])
    for operators, kernels in zip(*found, strict=True):
        torch.testing.assert_close(operators, kernels, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask, index", [
    ([0, 1, 0, 1, 1], [1, 3, 4]),
    ([0, 0, 0, 0, 0], [0]),  # padding only: the pass must still have a gradient
    ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_scored_positions_are_the_sampled_tokens(mask, index):
    scored = ScoredPositions.from_mask(torch.tensor([mask]))
    row = torch.arange(1.0, 6.0).unsqueeze(0)
    assert scored.select(row).tolist() == [position + 1.0 for position in index]
    assert scored.restore(scored.select(row).unsqueeze(0)).tolist() == [[(position + 1.0) * (position in index) for position in range(5)]]


def work(number: int, log: list, parts: int = 3):
    def run() -> int:
        for part in range(parts):
            assert get_turn() == number and is_under_way()
            log.append((number, part))
            give_turn()
        return number

    return run


@pytest.mark.parametrize("parts, late, order", [
    ([3, 3], False, [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2)]),
    ([3, 3], True, [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)]),
    ([2], True, [(0, 0), (0, 1)]),
    ([1, 3], False, [(1, 0), (0, 0), (1, 1), (1, 2)]),
])  # fmt: skip
def test_the_last_pass_runs_first_and_results_keep_their_order(parts, late, order):
    log: list = []
    assert run_in_turns([work(number, log, count) for number, count in enumerate(parts)], late) == list(range(len(parts)))
    assert log == order and not is_under_way() and get_turn() == 0
    give_turn()  # no effect outside


def test_an_error_ends_both_and_the_next_two_run():
    def fail() -> int:
        give_turn()
        raise ValueError("of one pass")

    log: list = []
    with pytest.raises(ValueError, match="of one pass"):
        run_in_turns([work(0, log), fail], False)
    assert not is_under_way() and run_in_turns([work(0, log), work(1, log)], False) == [0, 1]


def test_each_micro_batch_has_its_own_value_of_an_attribute():
    class Layer:
        scored = PerMicroBatch()

    layer, seen = Layer(), []

    def keep(value: str) -> None:
        layer.scored = value
        give_turn()
        seen.append(layer.scored)
        layer.scored = None

    run_in_turns([lambda: keep("a"), lambda: keep("b")], False)
    assert seen == ["b", "a"] and layer.scored is None


def test_backward_passes_alternate_in_the_opposite_order():
    log: list = []

    def forward(number: int) -> torch.Tensor:
        x = torch.ones(1, requires_grad=True)
        for part in range(3):
            x = x * 2
            log.append((number, part))
            x.register_hook(lambda _, part=part: log.append((number, part)))
            give_turn()
        return x

    first, second = run_in_turns([lambda: forward(0), lambda: forward(1)], True)
    (first + second).backward()
    assert log[6:] == log[5::-1]
