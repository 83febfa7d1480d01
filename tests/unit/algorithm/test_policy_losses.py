"""Advantages of single groups, the length penalty, presets, and what is refused before anything starts."""

import math
from statistics import fmean, pstdev, stdev, variance

import pytest
import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.algorithm.plug_check import check_algorithm
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.plugs import ADVANTAGES, LOSSES

SAPO = "examples.plugs.sapo:token_losses"
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
        ({"dual_clip": 1.1, "updates_per_step": 2}, "must be greater than 1 [+] clip_high"),
        ({"correction": "tis", "old_policy": "engine"}, "needs old_policy = .trainer."),
        ({"correction": ["tis", "icepop"]}, "tis and icepop all weight tokens"),
        ({"correction": ["icepop", "geometric_mask"]}, "icepop and geometric_mask all use correction_low"),
        ({"accuracy_low": 0.5, "accuracy_high": 0.5, "dynamic_sampling_max_rounds": 2}, "must be less than accuracy_high"),
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
        check_algorithm(AlgorithmConfig(loss=name, advantage=advantage, kl_coef=0.1, updates_per_step=2))


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
        ({"loss": "own_algorithm:constant"}, "ValueError: must return losses with a gradient"),
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
