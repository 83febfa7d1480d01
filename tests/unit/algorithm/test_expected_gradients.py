"""The expected gradient of every algorithm setting, against a closed form.

An answer has two tokens, each 0 or 1, so a policy is three probabilities. The engine's are such that eight equally likely answers, some of
them equal, are its whole distribution. A step of all groups of these answers has exact expectations: nothing is sampled. The product turns
it into advantages, weights, and a loss, and autograd gives the gradient with respect to the policy's three logits. The closed forms below
are objectives of the policy with the same gradient. They use nothing of megatron_rl.algorithm.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple, get_args

import pytest
import torch
from support.micro_batches import iter_target_positions

from megatron_rl.algorithm.advantages import compute_advantages, measure_kl
from megatron_rl.algorithm.covariance import mark_high_covariance
from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.gae import assign_token_advantages
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import MicroBatch, make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import _USERS, AlgorithmConfig, Correction
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.plugs import ADVANTAGES, LOSSES

Answer = tuple[int, ...]
TWO_TOKENS: list[Answer] = [(0, 0)] * 3 + [(0, 1), (1, 0)] + [(1, 1)] * 3
ENDS_AT_0: list[Answer] = [(0,)] * 4 + [(1, 0)] + [(1, 1)] * 3
"""The answers of ENGINE, each as often as it samples it; in the second list, a first token of 0 ends the answer."""
REWARDS = {(0, 0): 0.5, (0, 1): 1.0, (1, 0): 0.75, (1, 1): 0.0, (0,): 0.25}
RIGHT = {answer: float(answer[-1]) for answer in REWARDS}
VALUES = {(): 0.3, (0,): 0.9, (1,): 0.1}
LONGEST = 2


class Policy:
    """Given by the probabilities of a 1: as the first token, after a 0, and after a 1."""

    def __init__(self, *ones: float) -> None:
        self.logits = torch.tensor(ones, dtype=torch.float64).logit().requires_grad_()

    def logprobs(self, answer: Answer) -> torch.Tensor:
        contexts = torch.tensor([0, *(1 + token for token in answer)][: len(answer)], dtype=torch.long)
        return torch.nn.functional.logsigmoid(self.logits[contexts] * (2 * torch.tensor(answer) - 1))

    def prob(self, answer: Answer) -> torch.Tensor:
        return self.logprobs(answer).sum().exp()

    def tokens(self, prefix: Answer) -> torch.Tensor:
        """Probabilities of 0 and 1 after `prefix`."""
        return torch.stack([self.logprobs((*prefix, token))[-1] for token in (0, 1)]).exp()

    def entropies(self, answer: Answer) -> torch.Tensor:
        """Of the distribution of each token."""
        rows = [self.tokens(answer[:place]) for place in range(len(answer))]
        return torch.stack([-(row * row.log()).sum() for row in rows]) if rows else torch.empty(0)


@functools.cache
def measure(ones: tuple[float, ...], answer: Answer) -> torch.Tensor:
    return Policy(*ones).logprobs(answer).detach()


ENGINE, REFERENCE, TEACHER, MOVED = (0.5, 0.25, 0.75), (0.3, 0.6, 0.55), (0.8, 0.35, 0.9), (0.62, 0.42, 0.52)


@dataclasses.dataclass
class Step:
    """A step of all groups of `size` answers. `old` and `now` are the trainer's policies before the step and in its loss."""

    settings: dict[str, Any]
    old: tuple[float, ...] = ENGINE
    now: tuple[float, ...] | None = None
    answers: list[Answer] = dataclasses.field(default_factory=lambda: TWO_TOKENS)
    size: int = 2
    rewards: dict[Answer, float] = dataclasses.field(default_factory=lambda: REWARDS)
    teacher: dict[str, Any] | None = None
    excluded: tuple[Answer, ...] = ()
    masked: tuple[Answer, ...] = ()
    spoken: int = 0  # tokens that an environment writes before each sampled token but the first
    empty: bool = False  # whether there is an answer without tokens

    def make_sample(self, number: int, answer: Answer) -> TrainingSample:
        mask = [flag for place in range(len(answer)) for flag in [*[False] * (self.spoken if place else 0), True]]
        return TrainingSample(
            [5, 5], [2] * len(mask), 0.0, *(measure(ones, answer).float() for ones in (ENGINE, self.old, REFERENCE)),
            teacher_logprobs=measure(TEACHER, answer).float(), number=number,
            response_mask=mask if self.spoken else [], reward=self.rewards[answer],
            values=torch.tensor([VALUES[answer[:place]] for place in range(len(answer))]),
            excluded=answer in self.excluded, masked=answer in self.masked,
        )  # fmt: skip

    def prepare(self, config: AlgorithmConfig) -> tuple[list[Answer], list[TrainingSample], TeacherConfig | None]:
        """Do what the training loop does before the update."""
        answers = [answer for group in product(self.answers, repeat=self.size) for answer in group]
        samples = [self.make_sample(number, answer) for number, answer in enumerate(answers)]
        assign_loss_weights(samples, config.aggregate, LONGEST)
        excluded, lengths = [sample.excluded for sample in samples], [sample.sampled_count for sample in samples]
        rewards = [
            sample.reward
            + compute_overlong_penalty(sample.sampled_count, LONGEST, config.overlong_share, config.overlong_penalty)
            - (config.kl_coef * measure_kl(sample, config) if config.kl_in_reward else 0.0)
            for sample in samples
        ]
        if config.has_critic:
            assign_token_advantages(samples, config)
        else:
            if config.multi_objective_aggregation == "normalize_then_sum":
                parts = {"first": rewards, "right": [RIGHT[answer] for answer in answers]}
                advantages = normalize_then_sum(parts, {"first": 1.0, "right": 0.5}, excluded, config, self.size, lengths)
            else:
                advantages = compute_advantages(rewards, excluded, config, self.size, lengths)
            for sample, advantage in zip(samples, advantages, strict=True):
                sample.advantage = advantage
        if self.empty:
            answers.append(())
            samples.append(TrainingSample([5], [], 1.0, *[torch.empty(0)] * 3, number=len(samples)))
        teacher = self.teacher and TeacherConfig(path=Path("teacher"), **self.teacher)
        assign_distilled_advantages(samples, teacher)
        assign_corrections(samples, config)
        mark_high_covariance(samples, config, version=0)
        return answers, samples, teacher

    def run(
        self, config: AlgorithmConfig | None = None, max_tokens: int = 100_000, elsewhere: float = -50.0
    ) -> tuple[list[float], dict[str, float]]:
        """Return the gradient of the loss by the logits of `now`, and the loss's metrics."""
        config, policy = config or AlgorithmConfig(**self.settings), Policy(*(self.now or self.old))
        answers, samples, teacher = self.prepare(config)
        total, metrics, loss = torch.zeros((), dtype=torch.float64), dict[str, float](), PolicyLoss(config, teacher)
        known = {answer: torch.stack([policy.logprobs(answer), policy.entropies(answer)]) for answer in set(answers)}
        for batch in make_micro_batches(samples, max_tokens):
            rows = torch.full((2, *batch.mask.shape), elsewhere, dtype=torch.float64)
            for index, places in iter_target_positions(batch, samples):
                rows[:, 0, places] = known[answers[index]]
            value, sums = loss(rows[0], in_float64(batch), rows[1] if loss.with_entropy else None)
            total = total + value
            for name, part in sums.items():
                metrics[name] = metrics.get(name, 0.0) + float(part) / sum(sample.sampled_count for sample in samples)
        (gradient,) = torch.autograd.grad(total / sum(sample.sampled_count for sample in samples), policy.logits)
        return gradient.tolist(), metrics


def in_float64(batch: MicroBatch) -> MicroBatch:
    floats = {name: value.double() for name, value in vars(batch).items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return dataclasses.replace(batch, **floats)


# --- Closed forms. All are losses: means over tokens, of which an answer has two. ---


def mean_reward(p: Policy, rewards: dict[Answer, float] = REWARDS, answers: Sequence[Answer] = TWO_TOKENS) -> torch.Tensor:
    return sum(p.prob(answer) * rewards[answer] for answer in set(answers))


def kl_of_answers(p: Policy, other: tuple[float, ...]) -> torch.Tensor:
    return sum(p.prob(x) * (p.logprobs(x) - measure(other, x)).sum() for x in set(TWO_TOKENS))


def by_prefix(of_token: Callable[[Answer], torch.Tensor]) -> torch.Tensor:
    """Mean over the prefixes that the engine samples."""
    return (of_token(()) + (of_token((0,)) + of_token((1,))) / 2) / 2


def kl_of_tokens(p: Policy, other: tuple[float, ...], forward: bool = False) -> torch.Tensor:
    """KL(p || other) per token, or KL(other || p) if `forward`."""

    def at(prefix: Answer) -> torch.Tensor:
        mine, others = p.tokens(prefix), Policy(*other).tokens(prefix).detach()
        return (others * (others.log() - mine.log())).sum() if forward else (mine * (mine.log() - others.log())).sum()

    return by_prefix(at)


def entropy(p: Policy) -> torch.Tensor:
    return by_prefix(lambda prefix: -(p.tokens(prefix) * p.tokens(prefix).log()).sum())


def compare_pairs(p: Policy, prefer: Callable[[Answer, Answer], float]) -> torch.Tensor:
    """Mean of `prefer` for an answer of the policy and one of the engine."""
    return sum(p.prob(x) * prefer(x, y) for x in set(TWO_TOKENS) for y in TWO_TOKENS) / len(TWO_TOKENS)


Slopes = Callable[[Answer, float], Sequence[float]]


def weigh_tokens(p: Policy, slopes: Slopes, pairs: Sequence[tuple[Answer, Answer]] = tuple(product(TWO_TOKENS, repeat=2))) -> torch.Tensor:
    """Mean over tokens of slope * log-prob. `slopes` maps an answer and its advantage, of `leave_one_out`, to each token's slope."""
    logprobs = {x: p.logprobs(x) for x, _ in pairs}
    total = sum((torch.tensor(slopes(x, REWARDS[x] - REWARDS[y])) * logprobs[x]).sum() * count for (x, y), count in Counter(pairs).items())
    return total / (2 * len(pairs))


def ratios(answer: Answer, of: tuple[float, ...] = MOVED, to: tuple[float, ...] = ENGINE) -> list[float]:
    return (measure(of, answer) - measure(to, answer)).exp().tolist()


def sign(value: float) -> float:
    return (value > 0) - (value < 0)


def ppo(low: float, high: float, dual: float = math.inf) -> Slopes:
    def slope(ratio: float, a: float) -> float:
        return 0.0 if (a > 0 and ratio > 1 + high) or (a < 0 and not 1 - low <= ratio <= dual) else -ratio * a

    return lambda x, a: [slope(ratio, a) for ratio in ratios(x)]


def gspo(x: Answer, a: float) -> list[float]:
    mean = math.sqrt(math.prod(ratios(x)))
    return [0.0 if (a > 0 and mean > 1.2) or (a < 0 and mean < 0.8) else -mean * a] * 2


def gmpo(x: Answer, a: float) -> list[float]:
    bounded = [min(r, math.exp(0.3)) if a > 0 else max(r, math.exp(-0.3)) for r in ratios(x)]
    return [-math.sqrt(math.prod(bounded)) * a * (b == r) for b, r in zip(bounded, ratios(x), strict=True)]


def cispo(x: Answer, a: float) -> list[float]:
    return [-min(max(ratio, 0.75), 1.28) * a for ratio in ratios(x)]


def dppo(bound: float, diverge: Callable[[float, float], float]) -> Slopes:
    def slope(ratio: float, old: float, a: float) -> float:
        return 0.0 if (ratio - 1) * a > 0 and diverge(ratio * old, old) > bound else -ratio * a

    return lambda x, a: [slope(r, q, a) for r, q in zip(ratios(x), measure(ENGINE, x).exp().tolist(), strict=True)]


def bernoulli_kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def clip_cov(x: Answer, a: float) -> list[float]:
    """Without the tokens whose covariance is from 0.02 to 0.3. The mean advantage is 0."""
    mean = fmean(value for answer in TWO_TOKENS for value in measure(ENGINE, answer).tolist())
    covariances = [(old - mean) * a for old in measure(ENGINE, x).tolist()]
    return [0.0 if 0.02 <= cov <= 0.3 else slope for cov, slope in zip(covariances, ppo(0.2, 0.2)(x, a), strict=True)]


def kl_cov(x: Answer, a: float) -> list[float]:
    return [-ratio * a + 0.7 * sign(ratio - 1) for ratio in ratios(x)]


SAPO = "examples.plugs.sapo:token_losses"


def sapo(x: Answer, a: float) -> list[float]:
    """The derivative of -4 / tau * sigmoid(tau (ratio - 1)) * A."""
    tau = 1.0 if a > 0 else 2.0
    gates = [(ratio, 1 / (1 + math.exp(-tau * (ratio - 1)))) for ratio in ratios(x)]
    return [-4 * gate * (1 - gate) * ratio * a for ratio, gate in gates]


def corrected(weigh: Callable[[list[float]], list[float]]) -> Slopes:
    return lambda x, a: [-weight * a for weight in weigh(ratios(x))]


def estimate_gae(x: Answer, gamma: float, lam: float) -> list[float]:
    first, second = VALUES[()], VALUES[x[:1]]
    return [gamma * second - first + gamma * lam * (REWARDS[x] - second), REWARDS[x] - second]


def whiten(of_answer: Callable[[Answer], list[float]]) -> Callable[[Answer], list[float]]:
    every = [value for x in TWO_TOKENS for value in of_answer(x)]
    return lambda x: [(value - fmean(every)) / math.sqrt(stdev(every) ** 2 + 1e-8) for value in of_answer(x)]


def weigh_answers(p: Policy, of_answer: Callable[[Answer], list[float]]) -> torch.Tensor:
    return weigh_tokens(p, lambda x, a: of_answer(x), [(x, x) for x in TWO_TOKENS])


def kl_rewards(x: Answer) -> list[float]:
    """The advantages of GAE with values, lambda, and gamma of 0, 1, and 1, less what does not depend on the KL."""
    kl = (measure(ENGINE, x) - measure(REFERENCE, x)).tolist()
    return [REWARDS[x] - VALUES[()] - 0.1 * sum(kl), REWARDS[x] - VALUES[x[:1]] - 0.1 * kl[1]]


class Row(NamedTuple):
    step: Step
    objective: Callable[[Policy], torch.Tensor]
    slopes: Slopes | None = None


EQUAL = dict.fromkeys(REWARDS, 0.5)
DIFFERENCES = [REWARDS[x] - REWARDS[y] for x, y in product(TWO_TOKENS, repeat=2)]
BATCH_STD = pstdev([d / 2 for d in DIFFERENCES])
UPDATES = {"updates_per_step": 2, "advantage": "leave_one_out"}
KL = {"advantage": "leave_one_out", "kl_coef": 0.2}
LOO = {"advantage": "leave_one_out"}


def of_loss(slopes: Slopes, **settings: Any) -> Row:
    """The second update of a step."""
    return Row(Step(UPDATES | settings, now=MOVED), lambda p: weigh_tokens(p, slopes), slopes)


def of_correction(weigh: Callable[[list[float]], list[float]], **settings: Any) -> Row:
    """The first update of a step that an engine sampled which differs from the trainer."""
    return Row(Step(LOO | settings, old=MOVED), lambda p: weigh_tokens(p, corrected(weigh)))


def within(low: float, high: float, value: float) -> float:
    return float(low <= value <= high)


ADVANTAGE_ROWS = {
    "group_mean": Row(Step({"name": "dr_grpo"}), lambda p: -mean_reward(p) / 2 / 2),
    "leave_one_out": Row(Step({"name": "rloo"}), lambda p: -mean_reward(p) / 2),
    "group_std": Row(
        Step({"name": "grpo"}), lambda p: -compare_pairs(p, lambda x, y: sign(REWARDS[x] - REWARDS[y])) / math.sqrt(2) / 2
    ),
    "group_std, population": Row(
        Step({"name": "dapo", "overlong_share": 0.0, "advantage_std": "population"}),
        lambda p: -compare_pairs(p, lambda x, y: sign(REWARDS[x] - REWARDS[y])) / 2,
    ),
    "batch_std": Row(Step({"advantage": "batch_std"}), lambda p: -mean_reward(p) / 2 / 2 / BATCH_STD),
    "token_std": Row(Step({"name": "reinforce_pp"}), lambda p: -mean_reward(p) / 2 / 2 / (BATCH_STD * math.sqrt(256 / 255))),
    "max_rl, groups of 2": Row(Step({"name": "max_rl"}, rewards=RIGHT), lambda p: -mean_reward(p, RIGHT) / 2),
    "max_rl, groups of 3": Row(  # of -log(success), expanded to n - 1 terms
        Step({"name": "max_rl"}, rewards=RIGHT, size=3),
        lambda p: sum((1 - mean_reward(p, RIGHT)) ** k / k for k in (1, 2)) / 2,
    ),
    "custom": Row(Step({"advantage": "examples.plugs.group_median:group_median"}), lambda p: -mean_reward(p) / 2 / 2),
    "gae": Row(Step({"name": "ppo"}, size=1), lambda p: -weigh_answers(p, whiten(lambda x: estimate_gae(x, 1, 1)))),
    "gae has the policy gradient": Row(
        Step({"advantage": "gae"}, size=1),
        lambda p: -mean_reward(p) / 2 / stdev([value for x in TWO_TOKENS for value in estimate_gae(x, 1, 1)]),
    ),
    "gae, lambda and gamma": Row(
        Step({"advantage": "gae", "lam": 0.6, "gamma": 0.8}, size=1),
        lambda p: -weigh_answers(p, whiten(lambda x: estimate_gae(x, 0.8, 0.6))),
    ),
    "normalize_then_sum": Row(
        Step({"multi_objective_aggregation": "normalize_then_sum"}),
        lambda p: -compare_pairs(p, prefer_both) / 2 / pstdev([prefer_both(x, y) for x, y in product(TWO_TOKENS, repeat=2)]),
    ),
    "overlong": Row(
        Step(LOO | {"aggregate": "constant", "overlong_share": 0.5, "overlong_penalty": 0.75}, answers=ENDS_AT_0),
        lambda p: -mean_reward(p, {x: REWARDS[x] - 0.75 * (len(x) == 2) for x in REWARDS}, ENDS_AT_0) / 2,
    ),
}  # fmt: skip


def prefer_both(x: Answer, y: Answer) -> float:
    return sign(REWARDS[x] - REWARDS[y]) + 0.5 * sign(RIGHT[x] - RIGHT[y])


LOSS_ROWS = {
    "ppo": of_loss(ppo(0.2, 0.28), name="dapo", overlong_share=0.0),
    "ppo, dual clip": of_loss(ppo(0.2, 0.2, 1.5), dual_clip=1.5),
    "gspo": of_loss(gspo, name="gspo", clip_low=0.2, clip_high=0.2),
    "gmpo": of_loss(gmpo, name="gmpo", clip_low=0.3, clip_high=0.3),
    "cispo": of_loss(cispo, name="cispo", clip_low=0.25),
    "dppo_tv": of_loss(dppo(0.15, lambda p, q: abs(p - q)), name="dppo", clip_low=0.15, clip_high=0.15),
    "dppo_kl": of_loss(dppo(0.05, bernoulli_kl), loss="dppo_kl", clip_low=0.05, clip_high=0.05),
    "clip_cov": of_loss(clip_cov, loss="clip_cov", cov_ratio=1.0, clip_cov_low=0.02, clip_cov_high=0.3),
    "kl_cov": of_loss(kl_cov, loss="kl_cov", cov_ratio=1.0, kl_cov_coef=0.7),
    "custom": of_loss(sapo, loss=SAPO, loss_settings={"tau_negative": 2.0}),
    "off-policy mask": of_loss(
        lambda x, a: [0.0] * 2 if a < 0 and math.prod(ratios(x)) < math.exp(-0.2) else ppo(0.2, 0.2)(x, a), off_policy_mask_threshold=0.1
    ),
    "the engine's policy as the old one": Row(
        Step(LOO | {"old_policy": "engine"}, old=MOVED), lambda p: weigh_tokens(p, ppo(0.2, 0.2))
    ),
    "gspo, a critic": Row(
        Step({"name": "gspo", "advantage": "gae", "updates_per_step": 2, "clip_low": 0.9, "clip_high": 0.9}, now=MOVED, size=1),
        lambda p: -weigh_answers(p, lambda x: [math.sqrt(math.prod(ratios(x))) * a for a in whiten(lambda x: estimate_gae(x, 1, 1))(x)]),
    ),
    **{
        f"{name}, on-policy": Row(Step(LOO | {"loss": name}), lambda p: -mean_reward(p) / 2)
        for name in LOSSES.builtin if name not in ("clip_cov", "kl_cov")
    },
}  # fmt: skip


def tis_objective(p: Policy) -> torch.Tensor:
    """The engine reaches the prefix and finishes the answer; only the token itself is the trainer's."""
    one = lambda answer, place: Policy(*ENGINE).tokens(answer[:place])[answer[place]].detach()  # noqa: E731
    mine = lambda answer, place: p.tokens(answer[:place])[answer[place]]  # noqa: E731
    return -sum((mine(x, 0) * one(x, 1) + one(x, 0) * mine(x, 1)) * REWARDS[x] for x in set(TWO_TOKENS)) / 2


CORRECTION_ROWS = {
    "sequence_tis below the cap": Row(
        Step(LOO | {"correction": "sequence_tis", "correction_cap": 99.0}, old=MOVED), lambda p: -mean_reward(p) / 2
    ),
    "tis below the cap": Row(Step(LOO | {"correction": "tis", "correction_cap": 99.0}, old=MOVED), tis_objective),
    "none": of_correction(lambda q: [1.0, 1.0], correction="none"),
    "tis": of_correction(lambda q: [min(each, 1.5) for each in q], correction="tis", correction_cap=1.5),
    "sequence_tis": of_correction(lambda q: [min(math.prod(q), 1.5)] * 2, correction="sequence_tis", correction_cap=1.5),
    "icepop": of_correction(
        lambda q: [each * within(0.75, 1.5, each) for each in q], correction="icepop", correction_low=0.75, correction_high=1.5
    ),
    "geometric_mask": of_correction(
        lambda q: [within(0.9, 1.2, math.sqrt(math.prod(q)))] * 2, correction="geometric_mask", correction_low=0.9, correction_high=1.2
    ),
    "sequence_mask": of_correction(
        lambda q: [within(0.5, 2, math.prod(q))] * 2, correction="sequence_mask"
    ),
    "token_veto": of_correction(lambda q: [float(min(q) >= 0.7)] * 2, correction="token_veto", correction_veto=0.7),
    "a mask and a weight": of_correction(
        lambda q: [min(each, 1.5) * (min(q) >= 0.7) for each in q],
        correction=["token_veto", "tis"], correction_cap=1.5, correction_veto=0.7,
    ),
    "gspo": of_correction(lambda q: [min(each, 1.5) for each in q], name="gspo", correction="tis", correction_cap=1.5),
    "gmpo": of_correction(lambda q: [min(each, 1.5) for each in q], name="gmpo", correction="tis", correction_cap=1.5),
}  # fmt: skip


def of_kl(objective: Callable[[Policy], torch.Tensor], scale: float = 0.2, now: tuple[float, ...] | None = None, **settings: Any) -> Row:
    return Row(Step(KL | settings, rewards=EQUAL, now=now), lambda p: scale * objective(p))


def of_teacher(objective: Callable[[Policy], torch.Tensor], **teacher: Any) -> Row:
    return Row(Step(LOO, teacher={"kl_coef": 0.3, "reward_coef": 0.5} | teacher), lambda p: 0.3 * objective(p) - 0.5 * mean_reward(p) / 2)


KL_ROWS = {
    "loss, k2": of_kl(lambda p: kl_of_tokens(p, REFERENCE), kl_estimator="k2"),
    "loss, k3": of_kl(lambda p: kl_of_tokens(p, REFERENCE, forward=True)),
    "loss, k1 corrected": of_kl(lambda p: kl_of_tokens(p, REFERENCE), kl_estimator="k1", kl_bias_correction=True),
    "loss, k3 corrected": of_kl(lambda p: kl_of_tokens(p, REFERENCE), kl_bias_correction=True),
    "loss, k1 corrected, second update": of_kl(
        lambda p: kl_of_tokens(p, REFERENCE), now=MOVED, updates_per_step=2, kl_estimator="k1", kl_bias_correction=True
    ),
    "loss, k3 corrected, second update": of_kl(
        lambda p: kl_of_tokens(p, REFERENCE), now=MOVED, updates_per_step=2, kl_bias_correction=True
    ),
    "rloo in the loss": of_kl(lambda p: kl_of_tokens(p, REFERENCE, forward=True), name="rloo", kl_in="loss"),
    "reward, k1": of_kl(lambda p: kl_of_answers(p, REFERENCE) / 2, name="rloo"),
    "reward, k1, group_mean": of_kl(lambda p: kl_of_answers(p, REFERENCE) / 2 / 2, kl_in="reward", advantage="group_mean"),
    "reward, k1, batch_std": Row(
        Step({"advantage": "batch_std", "kl_coef": 0.1, "kl_in": "reward"}),
        lambda p: (0.1 * kl_of_answers(p, REFERENCE) - mean_reward(p)) / 2 / 2 / pstdev(
            [(sum(shaped(x)) - sum(shaped(y))) / 2 for x, y in product(TWO_TOKENS, repeat=2)]
        ),
    ),
    "reward, k1, gae": Row(
        Step({"name": "ppo", "kl_coef": 0.1}, size=1),
        lambda p: (0.1 * kl_of_answers(p, REFERENCE) - mean_reward(p)) / 2 / stdev([each for x in TWO_TOKENS for each in kl_rewards(x)]),
    ),
    "entropy": Row(Step(LOO | {"entropy_coef": 0.3}, rewards=EQUAL), lambda p: -0.3 * entropy(p)),
    "teacher in the advantage": of_teacher(lambda p: kl_of_tokens(p, TEACHER)),
    "teacher in the loss": of_teacher(lambda p: kl_of_tokens(p, TEACHER), kl_in="loss"),
    "teacher in the loss, k3": of_teacher(lambda p: kl_of_tokens(p, TEACHER, forward=True), kl_in="loss", kl_estimator="k3"),
    "teacher alone": Row(Step(LOO, teacher={"reward_coef": 0.0}), lambda p: kl_of_tokens(p, TEACHER)),
    "teacher in the loss, second update": Row(
        Step(UPDATES, now=MOVED, teacher={"reward_coef": 0.0, "kl_in": "loss"}),
        lambda p: weigh_tokens(p, lambda x, a: (measure(MOVED, x) - measure(TEACHER, x)).tolist()),
    ),
    "teacher, gspo": Row(Step({"name": "gspo"}, teacher={"reward_coef": 0.0}), lambda p: kl_of_tokens(p, TEACHER)),
}  # fmt: skip


def shaped(x: Answer) -> list[float]:
    kl = (measure(ENGINE, x) - measure(REFERENCE, x)).tolist()
    return [REWARDS[x] / 2 - 0.1 * each for each in kl]


COUNTED = [(x, y) for x, y in product(TWO_TOKENS, repeat=2) if x != (1, 1)]
BASELINE = fmean(REWARDS[x] for x in ENDS_AT_0)


def weigh_lengths(p: Policy, divisor: Callable[[Answer], float]) -> torch.Tensor:
    return -sum((REWARDS[x] - BASELINE) * p.logprobs(x).sum() / divisor(x) for x in ENDS_AT_0) / len(ENDS_AT_0)


MASK_ROWS = {
    "token": Row(Step(LOO, answers=ENDS_AT_0), lambda p: weigh_lengths(p, lambda x: fmean(map(len, ENDS_AT_0)))),
    "sequence": Row(Step(LOO | {"aggregate": "sequence"}, answers=ENDS_AT_0), lambda p: weigh_lengths(p, len)),
    "constant": Row(Step(LOO | {"aggregate": "constant"}, answers=ENDS_AT_0), lambda p: weigh_lengths(p, lambda x: LONGEST)),
    "constant has the policy gradient": Row(
        Step({"name": "rloo"}, answers=ENDS_AT_0), lambda p: -mean_reward(p, answers=ENDS_AT_0) / 2
    ),
    **{
        f"masked, {how}": Row(Step(LOO | {"aggregate": how}, masked=((1, 1),)), lambda p: weigh_tokens(p, lambda x, a: [-a] * 2, COUNTED))
        for how in ("token", "sequence", "constant")
    },
    **{
        f"excluded, {how}": Row(
            Step(LOO | {"aggregate": how}, excluded=((1, 1),)),
            lambda p: weigh_tokens(p, lambda x, a: [-a] * 2, [(x, x if y == (1, 1) else y) for x, y in COUNTED]),
        )
        for how in ("token", "sequence", "constant")
    },
}  # fmt: skip
TABLES = {"advantage": ADVANTAGE_ROWS, "loss": LOSS_ROWS, "correction": CORRECTION_ROWS, "kl": KL_ROWS, "mask": MASK_ROWS}
ROWS = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_expected_gradient_is_its_closed_form(row):
    """The tensors of a batch are float32, and a standard deviation has 1e-6 added."""
    policy = Policy(*(row.step.now or row.step.old))
    (expected,) = torch.autograd.grad(row.objective(policy), policy.logits)
    assert expected.abs().max() > 1e-3
    assert row.step.run()[0] == pytest.approx(expected.tolist(), rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("row", [*LOSS_ROWS.values(), *KL_ROWS.values()], ids=[*LOSS_ROWS, *KL_ROWS])
def test_micro_batches_environments_and_other_tokens_do_not_matter(row):
    step = dataclasses.replace(row.step, settings=row.step.settings | {"aggregate": "token"})
    gradient, metrics = step.run()
    other_gradient, other_metrics = dataclasses.replace(step, spoken=2, empty=True).run(max_tokens=50, elsewhere=-1000.0)
    assert other_gradient == pytest.approx(gradient, rel=1e-6, abs=1e-9) and other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


CLIPPED = {
    **{name: lambda slope, *_: slope == 0.0 for name in ("ppo", "ppo, dual clip", "gspo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov")},
    "cispo": lambda slope, ratio, _: not 0.75 <= ratio <= 1.28,
    "kl_cov": lambda *_: True,
    "custom": lambda *_: False,
}


@pytest.mark.parametrize("name", CLIPPED)
def test_the_share_of_clipped_tokens_is_reported_by_sign(name):
    slopes, (_, metrics) = LOSS_ROWS[name].slopes, LOSS_ROWS[name].step.run()
    pairs = [(x, REWARDS[x] - REWARDS[y]) for x, y in product(TWO_TOKENS, repeat=2)]
    for name_of_sign, of_sign in (("positive", 1), ("negative", -1)):
        tokens = [(s, r, a) for x, a in pairs if sign(a) == of_sign for s, r in zip(slopes(x, a), ratios(x), strict=True)]
        touched = sum(CLIPPED[name](*token) for token in tokens)
        assert metrics[f"clip/{name_of_sign}"] == pytest.approx(touched / 128)


def test_each_term_is_reported():
    p = Policy(*ENGINE)
    settings = LOO | {"kl_coef": 0.2, "entropy_coef": 0.3, "kl_estimator": "k3"}
    _, metrics = Step(settings, teacher={"kl_in": "loss", "kl_estimator": "k3"}).run()
    values = {"loss/kl": kl_of_tokens(p, REFERENCE), "loss/teacher_kl": kl_of_tokens(p, TEACHER), "loss/entropy": entropy(p)}
    assert {name: metrics[name] for name in values} == pytest.approx({name: float(value) for name, value in values.items()}, rel=1e-5)
    assert "loss/kl" not in Step(KL | {"name": "rloo"}).run()[1], "KL in the reward is not in the loss too"
    masked = LOSS_ROWS["off-policy mask"].step.run()[1]["mask/off_policy"]
    pairs = [(x, y) for x, y in product(TWO_TOKENS, repeat=2) if REWARDS[x] < REWARDS[y] and math.prod(ratios(x)) < math.exp(-0.2)]
    assert masked == pytest.approx(len(pairs) / 64) and 0 < masked < 0.5


# --- What is refused: a field without effect, and a KL term whose gradient is not a KL's. ---


def compute_kl_gradient(**settings: Any) -> torch.Tensor:
    """Of a KL term that the configuration refuses, where answers earn equal rewards."""
    config = AlgorithmConfig(advantage="leave_one_out", kl_coef=1.0, updates_per_step=2).model_copy(update=settings)
    return torch.tensor(Step({}, rewards=EQUAL).run(config)[0])


def test_refused_kl_terms_have_no_gradient_of_a_kl(monkeypatch):
    monkeypatch.setitem(globals(), "REFERENCE", (0.5, 0.125, 0.375))
    p = Policy(*ENGINE)
    (wanted,) = torch.autograd.grad(kl_of_tokens(p, REFERENCE), p.logits)
    assert compute_kl_gradient(kl_estimator="k1").abs().max() < 1e-6
    assert compute_kl_gradient(kl_estimator="k2", kl_bias_correction=True)[2] < 0.9 * wanted[2]
    for estimator in ("k2", "k3"):
        gradient = compute_kl_gradient(kl_estimator=estimator, kl_in="reward")
        assert wanted[2] > 0 > gradient[2], "after a 1, the policy is pushed away from the reference"
    small, large = (compute_kl_gradient(kl_in="reward", kl_estimator="k1", advantage="group_std", kl_coef=coef) for coef in (0.01, 1.0))
    torch.testing.assert_close(small, large, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "settings, rule",
    [
        ({"kl_estimator": "k1"}, "kl_estimator k1 in the loss has a gradient of mean 0"),
        ({"kl_estimator": "k2", "kl_bias_correction": True}, "needs an unbiased kl_estimator, and k2 is biased"),
        *(({"kl_estimator": name, "kl_in": "reward"}, f"kl_estimator {name} in the reward may push away") for name in ("k2", "k3")),
        ({"kl_in": "reward", "advantage": "group_std"}, "group_std divides by the group's standard deviation"),
        ({"name": "rloo", "kl_estimator": "k1", "kl_in": "loss"}, "kl_estimator k1 in the loss has a gradient of mean 0"),
        ({"name": "ppo", "kl_estimator": "k1", "kl_in": "loss"}, "kl_estimator k1 in the loss has a gradient of mean 0"),
    ],
)
def test_kl_terms_without_their_gradient_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        AlgorithmConfig(**KL | settings)


WITHOUT_EFFECT: dict[str, tuple[Any, dict[str, Any]]] = {
    "gamma": (0.9, {}),
    "lam": (0.9, {}),
    "advantage_std": ("population", {"advantage": "group_mean"}),
    "clip_low": (0.1, {"loss": "kl_cov", "updates_per_step": 2}),
    "clip_high": (0.3, {"loss": "kl_cov", "updates_per_step": 2}),
    "dual_clip": (3.0, {}),
    "cov_ratio": (0.1, {}),
    "clip_cov_low": (0.5, {"loss": "kl_cov", "updates_per_step": 2}),
    "clip_cov_high": (6.0, {"loss": "ppo"}),
    "kl_cov_coef": (0.5, {"loss": "clip_cov"}),
    "kl_in": ("reward", {}),
    "kl_estimator": ("k2", {}),
    "kl_bias_correction": (True, {"name": "rloo", "kl_coef": 0.1}),
    "off_policy_mask_threshold": (0.1, {}),
    "accuracy_low": (0.2, {}),
    "accuracy_high": (0.8, {"dynamic_sampling_max_rounds": 0}),
    "overlong_penalty": (0.5, {}),
    "correction_cap": (3.0, {"correction": "icepop"}),
    "correction_low": (0.6, {"correction": ["tis", "token_veto"]}),
    "correction_high": (3.0, {}),
    "correction_veto": (1e-3, {"correction": "tis"}),
}
"""Field -> (a value, settings that do not use it)."""


@pytest.mark.parametrize("field", _USERS)
def test_a_field_without_effect_is_refused(field):
    value, settings = WITHOUT_EFFECT[field]
    AlgorithmConfig(**settings)
    with pytest.raises(ValueError, match=f"{field} = {value} has no effect, because it only applies to"):
        AlgorithmConfig(**settings | {field: value})


def test_a_loss_that_only_acts_on_ratios_is_refused_where_all_are_1():
    with pytest.raises(ValueError, match="loss kl_cov only differs from an unclipped loss with updates_per_step above 1"):
        AlgorithmConfig(loss="kl_cov")
    with pytest.raises(ValueError, match="dual_clip = 3.0 has no effect"):
        AlgorithmConfig(loss="gspo", updates_per_step=2, dual_clip=3.0)


def test_a_preset_and_a_term_turned_off_by_hand_keep_their_settings():
    AlgorithmConfig(name="dapo", loss="kl_cov", updates_per_step=2)  # the preset's clip_high
    AlgorithmConfig(kl_coef=0.0, kl_estimator="k2")
    for settings in (KL, {"name": "ppo"}, {"correction": "geometric_mask"}):
        assert AlgorithmConfig(**AlgorithmConfig(**settings).model_dump()) == AlgorithmConfig(**settings)


DECIDES_NO_GRADIENT = {
    "calibrate_every": "moves clip_low and clip_high: test_corrections.py",
    "dynamic_sampling_max_rounds": "which groups are trained on: tests/unit/rollout",
    "accuracy_low": "the same",
    "accuracy_high": "the same",
    "mask_truncated_completions": "sets TrainingSample.masked, which MASK_ROWS cover",
    "old_logprobs": "equal log-probs of a pass or of the engine: tests/engine/test_old_logprobs_runs.py",
    "routing_replay": "the experts of a forward pass: tests/distributed",
}


def test_every_field_and_every_choice_has_a_row():
    configs = [AlgorithmConfig(**row.step.settings) for row in ROWS.values()]
    given = {field for row in ROWS.values() for field in row.step.settings}
    assert given | set(DECIDES_NO_GRADIENT) == set(AlgorithmConfig.model_fields)
    for name in ("name", "aggregate", "kl_estimator", "kl_in", "old_policy", "multi_objective_aggregation", "advantage_std"):
        assert {getattr(config, name) for config in configs} == set(get_args(AlgorithmConfig.model_fields[name].annotation))
    assert {config.advantage for config in configs} >= {*ADVANTAGES.builtin, "gae"}
    assert {config.loss for config in configs} >= {*LOSSES.builtin}
    assert {kind for config in configs for kind in config.correction} == set(get_args(Correction))
    teachers = [TeacherConfig(path=Path("teacher"), **row.step.teacher) for row in ROWS.values() if row.step.teacher]
    for name in ("kl_in", "kl_estimator"):
        assert {getattr(teacher, name) for teacher in teachers} == set(get_args(TeacherConfig.model_fields[name].annotation))
