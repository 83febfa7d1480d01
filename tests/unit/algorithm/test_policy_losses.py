"""Every algorithm against its paper's formula, written here as loops over tokens in Python floats; gradients by finite differences.

Nothing of megatron_rl.algorithm takes part in the expectations. Numbers are float64 on both sides, so that 1e-12 is rounding. What cannot
work is refused before anything starts.
"""

import dataclasses
import math
import random
from statistics import fmean, pstdev, stdev, variance

import pytest
import torch

from megatron_rl.algorithm.advantages import compute_advantages, measure_kl
from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.plug_check import check_algorithm
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import MicroBatch, make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.plugs import ADVANTAGES, LOSSES

LONGEST = 12
FLOATS = ("mask", "advantages", "old_logprobs", "reference_logprobs", "loss_weights", "importance_weights")
Tokens = list[list[float]]


@pytest.fixture(params=["one turn", "environment"])
def sequences(request) -> list[TrainingSample]:
    """Answers of 1 to 12 sampled tokens, advantages of both signs and zero, corrections other than 1. Where an environment spoke, one to
    three tokens of its lie between some of them; nothing of what follows may depend on those."""
    source = random.Random(3)
    result = []
    for number, advantage in enumerate((1.5, -0.75, 0.0, -2.0, 0.5, -0.25)):
        length = (5, 1, 3, 12, 7, 2)[number]
        old, reference = (torch.tensor([source.uniform(-4, -1) for _ in range(length)]) for _ in range(2))
        correction = torch.tensor([source.uniform(0, 2) for _ in range(length)])
        result.append(TrainingSample([7] * source.randint(1, 5), [9] * length, advantage, old, old, reference, correction))
        result[-1].high_covariance = torch.tensor([is_chosen(position) for position in range(length)])
        if request.param == "environment":
            flags = [flag for _ in range(length) for flag in [*[False] * source.choice((0, 0, 1, 3)), True]]
            result[-1].response_mask = torch.tensor(flags)
            result[-1].response_ids = torch.where(result[-1].response_mask, 9, 8)
    return result


@pytest.fixture
def now(sequences) -> Tokens:
    """Current log-probs: the old ones times ratios on all sides of every clip used here, none within 0.005 of it. In a sequence the
    ratios' deviations have one sign, so that GSPO's means leave its bounds as well."""
    source = random.Random(4)
    result = []
    for number, sequence in enumerate(sequences):
        ratios = (1.1, 1.25, 1.6, 3.7) if number in (0, 3) else (0.3, 0.7, 0.95)
        result.append([old + math.log(source.choice(ratios)) for old in sequence.old_logprobs.tolist()])
    return result


def is_chosen(position: int) -> bool:
    """Which tokens `algorithm.covariance` is said to have chosen."""
    return position % 3 == 1


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


Formula = list[tuple[float, bool]]  # by token: its loss, and whether the clip touches it


def ppo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 1707.06347, eq. 7, with arXiv 2503.14476's two bounds; arXiv 1912.09729, eq. 5, for the dual clip."""
    results = []
    for new, before in zip(logp, old, strict=True):
        ratio = math.exp(new - before)
        objective = min(ratio * advantage, clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
        if config.dual_clip is not None and advantage < 0:
            objective = max(objective, config.dual_clip * advantage)
        results.append((-objective, objective != ratio * advantage))
    return results


def gspo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2507.18071, eq. 5 and 7."""
    ratio = math.prod(math.exp(new - before) for new, before in zip(logp, old, strict=True)) ** (1 / len(old))
    objective = min(ratio * advantage, clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage)
    return [(-objective, objective != ratio * advantage)] * len(old)


def cispo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2506.13585, eq. 4 and 5."""
    ratios = [math.exp(new - before) for new, before in zip(fixed, old, strict=True)]
    weights = [clip(ratio, 1 - config.clip_low, 1 + config.clip_high) for ratio in ratios]
    return [(-weight * advantage * new, weight != ratio) for weight, ratio, new in zip(weights, ratios, logp, strict=True)]


def gmpo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2507.20673, eq. 4: the product over tokens of min(rho^s, clip(rho, e^-low, e^high)^s), s the sign of A, to the power s / T."""
    sign, product, touched = (1 if advantage >= 0 else -1), 1.0, []
    for new, before in zip(logp, old, strict=True):
        ratio = math.exp(new - before)
        bounded = clip(ratio, math.exp(-config.clip_low), math.exp(config.clip_high))
        product *= min(ratio**sign, bounded**sign)
        touched.append(advantage != 0 and bounded**sign < ratio**sign)
    objective = product ** (sign / len(old)) * advantage
    return [(-objective, each) for each in touched]


def dppo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2602.04879: the mask with its two divergences; the weight's bound of 20 of section 5.4."""
    results = []
    for new, still, before in zip(logp, fixed, old, strict=True):
        p, q = min(math.exp(still), 1.0), math.exp(before)
        moved = abs(p - q)
        if config.loss == "dppo_kl":
            moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
        away = (still > before and advantage > 0 and moved > config.clip_high) or (
            still < before and advantage < 0 and moved > config.clip_low
        )
        results.append((0.0 if away else -min(math.exp(still - before), 20.0) * advantage * new, away))
    return results


def clip_cov(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2505.22617, eq. 9 and 10."""
    of_ppo = ppo(config, logp, old, advantage, fixed)
    return [(0.0, True) if is_chosen(position) else each for position, each in enumerate(of_ppo)]


def kl_cov(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    """arXiv 2505.22617, eq. 11 and 12."""
    results = []
    for position, (new, before) in enumerate(zip(logp, old, strict=True)):
        penalty = config.kl_cov_coef * abs(new - before) if is_chosen(position) else 0.0
        results.append((-math.exp(new - before) * advantage + penalty, is_chosen(position)))
    return results


def sapo(config: AlgorithmConfig, logp: list[float], old: list[float], advantage: float, fixed: list[float]) -> Formula:
    tau = config.loss_settings.get("tau_positive", 1.0) if advantage > 0 else config.loss_settings.get("tau_negative", 1.05)
    ratios = [math.exp(new - before) for new, before in zip(logp, old, strict=True)]
    return [(-4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage, False) for ratio in ratios]


SAPO = "examples.plugs.sapo:token_losses"
FORMULAS = {"dppo_tv": dppo, "dppo_kl": dppo, "clip_cov": clip_cov, "kl_cov": kl_cov}
FORMULAS |= {"ppo": ppo, "gspo": gspo, "gmpo": gmpo, "cispo": cispo, SAPO: sapo}
"""`logp` are the log-probs; a weight that has no gradient is computed from `fixed`."""
KL = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - d - 1}


def is_dropped(config: AlgorithmConfig, sequence: TrainingSample, logp: list[float]) -> bool:
    """arXiv 2512.02556, section 3.1."""
    left = fmean(before - new for before, new in zip(sequence.old_logprobs.tolist(), logp, strict=True))
    return config.off_policy_mask_threshold is not None and sequence.advantage < 0 and left > config.off_policy_mask_threshold


def expected(config: AlgorithmConfig, sequences: list[TrainingSample], logprobs: Tokens, fixed: Tokens) -> float:
    """The whole loss: objective, correction, KL and mean."""
    per_sequence = []
    for sequence, logp, still in zip(sequences, logprobs, fixed, strict=True):
        old, reference, correction = (v.tolist() for v in (sequence.old_logprobs, sequence.reference_logprobs, sequence.importance_weights))
        losses = [loss for loss, _ in FORMULAS[config.loss](config, logp, old, sequence.advantage, still)]
        if is_dropped(config, sequence, still):
            losses = [0.0] * len(old)
        if config.kl_coef and config.kl_in == "loss":
            kl = [config.kl_coef * KL[config.kl_estimator](ref - new) for ref, new in zip(reference, logp, strict=True)]
            if config.kl_bias_correction:
                kl = [math.exp(new - before) * value for value, new, before in zip(kl, logp, old, strict=True)]
        else:
            kl = [0.0] * len(old)
        per_sequence.append([c * value + k for c, value, k in zip(correction, losses, kl, strict=True)])
    if config.aggregate == "token":
        return sum(map(sum, per_sequence)) / sum(map(len, per_sequence))
    if config.aggregate == "sequence":
        return sum(sum(losses) / len(losses) for losses in per_sequence) / len(per_sequence)
    return sum(map(sum, per_sequence)) / (len(per_sequence) * LONGEST)


def run(
    config: AlgorithmConfig, sequences: list[TrainingSample], logprobs: Tokens, most: int, elsewhere: float = -50.0
) -> tuple[float, list[list[float]], dict[str, float]]:
    """(loss, gradient by sequence, metrics) as the trainer makes them: sums over micro-batches over the answer tokens of the step.
    All other tokens have the log-prob `elsewhere`."""
    assign_loss_weights(sequences, config.aggregate, LONGEST)
    tokens = sum(len(sequence.old_logprobs) for sequence in sequences)
    total, gradients, metrics = 0.0, [[]] * len(sequences), {}
    for batch in make_micro_batches(sequences, most):
        batch = in_float64(batch, sequences)
        values = torch.full(batch.mask.shape, elsewhere, dtype=torch.float64)
        for index, places in batch.split_by_sample(torch.arange(batch.mask.shape[1])[None], sequences):
            values[0, places] = torch.tensor(logprobs[index], dtype=torch.float64)
        values.requires_grad_()
        loss, sums = PolicyLoss(config)(values, batch)
        (loss / tokens).backward()
        total += loss.item() / tokens
        metrics = {name: metrics.get(name, 0.0) + float(value) / tokens for name, value in sums.items()}
        for index, part in batch.split_by_sample(values.grad, sequences):
            gradients[index] = part.tolist()
        assert not (values.grad * (1 - batch.mask)).any(), "a token that is no answer has a gradient"
    return total, gradients, metrics


def in_float64(batch: MicroBatch, sequences: list[TrainingSample]) -> MicroBatch:
    """With the weights as Python floats hold them; the tensors of a batch are float32."""
    exact = torch.zeros(batch.loss_weights.shape, dtype=torch.float64)
    for index, places in batch.split_by_sample(torch.arange(batch.mask.shape[1])[None], sequences):
        exact[0, places] = sequences[index].loss_weight
    torch.testing.assert_close(batch.loss_weights.double(), exact, rtol=1e-7, atol=0)
    return dataclasses.replace(batch, **{name: getattr(batch, name).double() for name in FLOATS} | {"loss_weights": exact})


CONFIGS = {
    "grpo": {"name": "grpo"},
    "grpo as published": {"name": "grpo", "aggregate": "sequence", "kl_coef": 0.04},
    "dr_grpo": {"name": "dr_grpo"},
    "rloo": {"name": "rloo"},
    "reinforce_pp": {"name": "reinforce_pp", "kl_coef": 0.01},
    "dapo": {"name": "dapo"},
    "dual clip": {"name": "grpo", "dual_clip": 3.0},
    "gspo": {"name": "gspo"},
    "gspo, wide": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1},
    "gspo by token": {"name": "gspo", "aggregate": "token"},
    "gmpo": {"name": "gmpo"},
    "off-policy sequences dropped": {"name": "grpo", "off_policy_mask_threshold": 0.2, "kl_coef": 0.1, "kl_bias_correction": True},
    "cispo": {"name": "cispo"},
    "dppo": {"name": "dppo", "clip_low": 0.05, "clip_high": 0.1, "kl_coef": 0.1},
    "dppo, divergence": {"name": "dppo", "loss": "dppo_kl", "clip_low": 0.02, "clip_high": 0.05},
    "clip_cov": {"loss": "clip_cov", "clip_high": 0.28},
    "kl_cov": {"loss": "kl_cov", "kl_cov_coef": 0.7, "aggregate": "sequence"},
    "sapo": {"loss": SAPO, "loss_settings": {"tau_negative": 4.0}},
    "sapo, two taus": {"loss": SAPO, "loss_settings": {"tau_positive": 2.0, "tau_negative": 0.5}},
    "cispo, two bounds": {"name": "cispo", "clip_low": 0.2, "kl_coef": 0.1, "kl_estimator": "k1"},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_loss_and_gradient_are_the_papers_whatever_the_micro_batches(settings, sequences, now):
    """Central differences of step 1e-6 err by about 1e-12 in curvature and 1e-10 in rounding; sums in another order err by 1e-12."""
    config = AlgorithmConfig(**settings)
    loss, gradients, metrics = run(config, sequences, now, 25)
    assert loss == pytest.approx(expected(config, sequences, now, now), rel=1e-12)
    differing = 0
    for index, logprobs in enumerate(now):
        for position in range(len(logprobs)):
            both = []
            for step in (1e-6, -1e-6):
                other = [list(row) for row in now]
                other[index][position] += step
                both.append(expected(config, sequences, other, now))
            difference = (both[0] - both[1]) / 2e-6
            differing += difference != 0
            assert gradients[index][position] == pytest.approx(difference, abs=2e-9)
    assert differing
    for most in (1, 20, 1000):
        other_loss, other_gradients, other_metrics = run(config, sequences, now, most)
        assert other_loss == pytest.approx(loss, rel=1e-12) and other_metrics == pytest.approx(metrics, rel=1e-12)
        assert other_gradients == [pytest.approx(gradient, rel=1e-12) for gradient in gradients]
    for name, sign in (("clip/positive", 1), ("clip/negative", -1)):
        clipped = 0
        for sequence, logp in zip(sequences, now, strict=True):
            if sign * sequence.advantage > 0:
                by_token = FORMULAS[config.loss](config, logp, sequence.old_logprobs.tolist(), sequence.advantage, logp)
                clipped += sum(touched for _, touched in by_token)
        assert metrics[name] == pytest.approx(clipped / sum(map(len, now)), rel=1e-12)
    assert (metrics["clip/positive"] + metrics["clip/negative"] > 0) == (config.loss != SAPO)
    dropped = [is_dropped(config, sequence, logp) for sequence, logp in zip(sequences, now, strict=True)]
    assert (0 < sum(dropped) < sum(s.advantage < 0 for s in sequences)) == (config.off_policy_mask_threshold is not None)
    count = sum(len(logp) for flag, logp in zip(dropped, now, strict=True) if flag)
    assert metrics.get("mask/off_policy", 0) == pytest.approx(count / sum(map(len, now)))


def test_every_loss_has_its_formula_here():
    assert {*LOSSES.builtin, SAPO} == set(FORMULAS) == {AlgorithmConfig(**settings).loss for settings in CONFIGS.values()}


def test_what_is_no_answer_token_never_matters(sequences, now):
    """Prompt tokens and padding have log-probs too, and some are astronomically improbable to the policy."""
    config = AlgorithmConfig(kl_coef=0.05)
    assert run(config, sequences, now, 1000, 0.0) == run(config, sequences, now, 1000) == run(config, sequences, now, 1000, -1000.0)


def test_policy_and_kl_are_reported_apart(sequences, now):
    config = AlgorithmConfig(kl_coef=0.05)
    loss, _, metrics = run(config, sequences, now, 20)
    without, _, other = run(AlgorithmConfig(), sequences, now, 20)
    assert metrics["loss/policy"] == pytest.approx(without, rel=1e-12)
    assert metrics["loss/policy"] + 0.05 * metrics["loss/kl"] == pytest.approx(loss, rel=1e-12)
    assert "loss/kl" not in other
    in_reward, without = (run(AlgorithmConfig(name="rloo", kl_coef=coef), sequences, now, 1000) for coef in (0.5, 0.0))
    assert in_reward == without, "KL in the reward is not in the loss too"


def test_an_answer_without_tokens_teaches_nothing(sequences, now):
    """Its GSPO ratio is a mean over nothing."""
    empty = TrainingSample([1, 2], [], 1.0, *[torch.empty(0)] * 4)
    for settings in CONFIGS.values():
        config = AlgorithmConfig(**{**settings, "aggregate": "token"})
        assert run(config, [*sequences, empty], [*now, []], 1000)[0] == pytest.approx(run(config, sequences, now, 1000)[0], rel=1e-12)


GROUPS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.25, 0.0, 2.0, 0.5]]
CENTRED = [[reward - fmean(group) for reward in group] for group in GROUPS]
ALL_CENTRED = [value for values in CENTRED for value in values]
BY_HAND = {
    "group_std": [value / (stdev(group) + 1e-6) for group, values in zip(GROUPS, CENTRED, strict=True) for value in values],
    "group_mean": ALL_CENTRED,
    "leave_one_out": [r - fmean(group[:i] + group[i + 1 :]) for group in GROUPS for i, r in enumerate(group)],
    "token_std": [(value - fmean(ALL_CENTRED)) / math.sqrt(variance(ALL_CENTRED) + 1e-8) for value in ALL_CENTRED],
    "batch_std": [(value - fmean(ALL_CENTRED)) / (pstdev(ALL_CENTRED) + 1e-6) for value in ALL_CENTRED],
    "max_rl": [value / fmean(group) for group, values in zip(GROUPS, CENTRED, strict=True) for value in values],
}
"""arXiv 2402.03300 (sec. 4.1.2), 2503.20783 (sec. 3.2), 2402.14740 (eq. 6), 2501.03262 (REINFORCE++ with baseline)."""


@pytest.mark.parametrize("kind", ADVANTAGES.builtin)
def test_advantages_and_excluded_members_leave_the_others_as_if_they_were_alone(kind):
    compute = ADVANTAGES.load(kind)

    def advantages(rewards: list[list[float]], counted: list[list[bool]]) -> list[float]:
        return compute(torch.tensor(rewards, dtype=torch.float64), torch.tensor(counted)).flatten().tolist()

    assert advantages(GROUPS, [[True] * 4] * 3) == pytest.approx(BY_HAND[kind], abs=1e-12)
    result = advantages([[1.0, 99.0, 0.0, 0.5], [0.25, -99.0, 0.75, 1.0]], [[True, False, True, True]] * 2)
    alone = advantages([[1.0, 0.0, 0.5], [0.25, 0.75, 1.0]], [[True] * 3] * 2)
    assert result[:1] + result[2:5] + result[6:] == pytest.approx(alone, abs=1e-12)
    assert result[1] == result[5] == 0.0
    assert advantages([[1.0, 2.0], [3.0, 4.0]], [[False, True], [False, False]]) == [0.0] * 4, "nothing to compare with"


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_excluded_sequences_leave_the_loss_as_if_they_were_not_there(sequences, now, aggregate, estimator):
    config = AlgorithmConfig(name="grpo", aggregate=aggregate, kl_coef=0.1, kl_estimator=estimator, kl_in="loss")
    sequences[1].excluded, sequences[1].advantage = True, 0.0
    loss, gradients, _ = run(config, sequences, now, 3)
    alone, lone_gradients, _ = run(config, sequences[:1] + sequences[2:], now[:1] + now[2:], 3)
    assert loss == pytest.approx(alone, abs=1e-12)
    assert not any(gradients.pop(1))
    assert gradients == [pytest.approx(gradient, abs=1e-12) for gradient in lone_gradients]
    for sequence in sequences:
        sequence.excluded = True
    assert run(config, sequences, now, 3)[0] == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward(estimator):
    source = random.Random(1)
    sequences = []
    for reward in (1.0, 0.0, 0.0, 1.0):
        old, reference = ([source.uniform(-3, -1) for _ in range(3)] for _ in range(2))
        old, reference = torch.tensor(old), torch.tensor(reference)
        sequences.append(TrainingSample([1], [2, 2, 2], old_logprobs=old, reference_logprobs=reference, reward=reward))
    config = AlgorithmConfig(name="rloo", kl_coef=0.1, kl_estimator=estimator)
    measured = [measure_kl(sequence, config) for sequence in sequences]
    kl = [sum(KL[estimator](r - p) for p, r in zip(s.old_logprobs.tolist(), s.reference_logprobs.tolist(), strict=True)) for s in sequences]
    shaped = [s.reward - 0.1 * value for s, value in zip(sequences, kl, strict=True)]
    first, second = shaped[0] - shaped[1], shaped[2] - shaped[3]
    assert measured == pytest.approx(kl, abs=1e-6)  # float32 log-probs
    assert compute_advantages(shaped, [False] * 4, config, 2) == pytest.approx([first, -first, second, -second], abs=1e-12)


def test_overlong_punishment_with_the_papers_numbers():
    """arXiv 2503.14476, eq. 13 with L_max 20480 and L_cache 4096."""
    for length, added in ((0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (20000, -3616 / 4096), (30000, -1.0)):
        assert compute_overlong_penalty(length, 20480, 0.2, 1.0) == pytest.approx(added)
        assert compute_overlong_penalty(length, 20480, 0.2, 0.25) == pytest.approx(added / 4)
        assert compute_overlong_penalty(length, 20480, 0.0, 1.0) == 0.0


@pytest.mark.parametrize(
    "given, result",
    [
        ({}, ("ppo", "group_std", "token", 0.2, 0.2)),
        ({"name": "dapo"}, ("ppo", "group_std", "token", 0.2, 0.28)),
        ({"name": "dapo", "clip_high": 0.3}, ("ppo", "group_std", "token", 0.2, 0.3)),
        ({"name": "dr_grpo"}, ("ppo", "group_mean", "constant", 0.2, 0.2)),
        ({"name": "gspo"}, ("gspo", "group_std", "sequence", 3e-4, 4e-4)),
        ({"name": "gspo", "advantage": "leave_one_out"}, ("gspo", "leave_one_out", "sequence", 3e-4, 4e-4)),
    ],
)
def test_a_name_sets_defaults_and_fields_win(given, result):
    config = AlgorithmConfig.model_validate(given)
    assert (config.loss, config.advantage, config.aggregate, config.clip_low, config.clip_high) == result


@pytest.mark.parametrize(
    "given, rule",
    [
        ({"name": "gspo", "dual_clip": 3.0}, "dual_clip only applies to loss ppo"),
        ({"kl_bias_correction": True}, "kl_bias_correction applies to the KL term of the loss; set kl_coef"),
        ({"name": "rloo", "kl_coef": 0.1, "kl_bias_correction": True}, "kl_bias_correction applies to the KL term of the loss"),
        ({"dual_clip": 1.1}, "must be greater than 1 [+] clip_high"),
        ({"correction": "tis", "old_policy": "engine"}, "needs old_policy = .trainer."),
        ({"correction": ["tis", "icepop"]}, "tis and icepop all weight tokens"),
        ({"correction": ["icepop", "geometric_mask"]}, "icepop and geometric_mask all use correction_low"),
        ({"accuracy_low": 0.5, "accuracy_high": 0.5, "dynamic_sampling_max_rounds": 2}, "must be less than accuracy_high"),
        ({"accuracy_low": 0.2}, "set dynamic_sampling_max_rounds"),
        ({"advantage": "max_rl", "overlong_share": 0.2}, "needs rewards of 0 or more"),
        ({"name": "rloo", "advantage": "max_rl", "kl_coef": 0.1}, "use kl_in = .loss."),
        ({"name": "rloo", "multi_objective_aggregation": "normalize_then_sum", "kl_coef": 0.1}, "use kl_in = .loss."),
        ({"loss": "clip_cov", "clip_cov_low": 5.0}, r"clip_cov_low \(5.0\) must be less than clip_cov_high"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(given, rule):
    with pytest.raises(ValueError, match=rule):
        AlgorithmConfig.model_validate(given)


OWN = """
import torch
from megatron_rl.algorithm.losses.ppo import token_losses

def sentence(logprobs, batch, config, *, words): return token_losses(logprobs, batch, config)
def scalar(logprobs, batch, config): return logprobs.sum(), logprobs > 0
def numbers(logprobs, batch, config): return logprobs * batch.advantages, logprobs
def constant(logprobs, batch, config): return logprobs.detach(), logprobs > 0
def double(logprobs, batch, config): return logprobs.double(), logprobs > 0
def no_number(logprobs, batch, config): return logprobs / (batch.mask * 0), logprobs > 0
def flat(rewards, counted): return rewards.flatten()
def all_members(rewards, counted): return rewards - rewards.mean(1, keepdim=True)
def infinite(rewards, counted): return rewards / 0
"""


@pytest.mark.parametrize("name", [*LOSSES.builtin, SAPO])
def test_every_loss_and_advantage_passes_its_trial(name):
    for advantage in (*ADVANTAGES.builtin, "examples.plugs.group_median:group_median"):
        check_algorithm(AlgorithmConfig(loss=name, advantage=advantage, kl_coef=0.1))


@pytest.mark.parametrize(
    "given, line",
    [
        (
            {"loss": "absent_module:loss"},
            r"algorithm.loss = 'absent_module:loss': cannot be imported \(ModuleNotFoundError.*; use one of ppo,",
        ),
        ({"loss_settings": {"tau": 1.0}}, "algorithm.loss = 'ppo': failed on a toy batch .*unexpected keyword argument 'tau'"),
        ({"loss": SAPO, "loss_settings": {"tau_negative": 0.0}}, r"failed on a toy batch \(ValueError: tau_positive .* must be above 0"),
        ({"loss": "own_algorithm:sentence"}, "missing 1 required keyword-only argument: 'words'"),
        ({"loss": "own_algorithm:scalar"}, "must return .losses, clipped. of the log-probs' shape"),
        ({"loss": "own_algorithm:numbers"}, "clipped as bool"),
        ({"loss": "own_algorithm:constant"}, "RuntimeError: element 0 of tensors does not require grad"),
        ({"loss": "own_algorithm:double"}, "losses in their dtype"),
        ({"loss": "own_algorithm:no_number"}, "must return finite losses with finite gradients"),
        ({"advantage": "own_algorithm:absent"}, "algorithm.advantage = 'own_algorithm:absent': cannot be imported .AttributeError"),
        ({"advantage": "own_algorithm:sentence"}, "algorithm.advantage.*missing 1 required positional argument"),
        ({"advantage": "own_algorithm:flat"}, "algorithm.advantage.*must return finite values of the rewards' shape"),
        ({"advantage": "own_algorithm:all_members"}, "0 if counted is False"),
        ({"advantage": "own_algorithm:infinite"}, "must return finite values"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(given, line, tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=line):
        check_algorithm(AlgorithmConfig(**given))


def test_settings_reach_a_loss_and_a_name_of_neither_form_is_refused_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    check_algorithm(AlgorithmConfig(loss="own_algorithm:sentence", loss_settings={"words": 3}))
    for field in ("loss", "advantage"):
        with pytest.raises(ValueError, match="must be one of (ppo|group_std), .*, or your own as module:attribute"):
            AlgorithmConfig(**{field: "grpo"})


def test_group_median_leaves_out_who_is_excluded():
    rewards = (1.0, 0.0, 0.25, 99.0, 1.0, 3.0, 2.0, 9.0)
    config = AlgorithmConfig(advantage="examples.plugs.group_median:group_median")
    assert compute_advantages(rewards, [reward > 50 for reward in rewards], config, 4) == [0.75, -0.25, 0.0, 0.0, -1.5, 0.5, -0.5, 6.5]
