"""Calls a user's advantage and loss on a toy batch before anything starts."""

import torch

from megatron_rl.algorithm.advantages import call_own_advantage
from megatron_rl.algorithm.policy_loss import PolicyLoss, call_own_loss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import ADVANTAGES, LOSSES
from parallel.plug import describe_error


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise UserError for an advantage or a loss that cannot be imported, refuses its settings, or returns something invalid."""
    checks = [(LOSSES, config.loss, _check_loss)]
    if not config.has_critic:
        checks.insert(0, (ADVANTAGES, config.advantage, _check_advantage))
    for plug, name, run in checks:
        with as_user_error():
            plug.load(name)
        try:
            run(config)
        except Exception as error:  # user code may raise anything
            raise UserError(plug.field, name, f"failed on a toy batch ({describe_error(error)})", "see docs/extending.md") from None


def _check_advantage(config: AlgorithmConfig) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, -9.0]], dtype=torch.float64)
    counted = torch.tensor([[True, True, True], [True, True, False]])
    call_own_advantage(ADVANTAGES.load(config.advantage), rewards, counted)


def _check_loss(config: AlgorithmConfig) -> None:
    old = torch.tensor([-1.0, -0.5])
    prompt, answer = torch.tensor([1]), torch.tensor([2, 3])
    samples = [TrainingSample(prompt, answer, advantage, old_logprobs=old, reference_logprobs=old) for advantage in (1.0, -1.0)]
    (batch,) = make_micro_batches(samples, 8)
    logprobs = torch.full_like(batch.mask, -0.9, requires_grad=True)
    losses, _ = call_own_loss(LOSSES.load(config.loss), logprobs, batch, config)
    loss = PolicyLoss(config)
    entropies = torch.ones_like(logprobs) if loss.with_entropy else None
    loss(logprobs, batch, entropies)[0].backward()  # raises if the losses have no gradient
    sampled = batch.mask == 1
    if not losses[sampled].isfinite().all() or logprobs.grad is None or not logprobs.grad[sampled].isfinite().all():
        raise ValueError("must return finite losses with finite gradients on a ratio of 0.7 to 1.1")
