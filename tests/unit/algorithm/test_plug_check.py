"""Every loss and every advantage passes its trial, the examples too; what cannot work is refused before anything starts."""

from __future__ import annotations

import pytest

from megatron_rl.algorithm.plug_check import check_algorithm
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.plugs import ADVANTAGES, LOSSES

SAPO = "examples.plugs.sapo:token_losses"
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
