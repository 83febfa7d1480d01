"""A trial of the loss and the advantages on a toy batch, before anything starts: what a user brings is called as the loop will call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.plugs import ADVANTAGES, LOSSES
from parallel.plug import InputError, Plug


def try_algorithm(config: AlgorithmConfig) -> None:
    """Raise UserError for a loss or an advantage that cannot be imported, refuses its settings, or returns what it must not."""
    rewards = torch.tensor([[1.0, 0.0, 0.5], [2.0, -1.0, 9.0]], dtype=torch.float64)
    counted = torch.tensor([[True, True, True], [True, True, False]])
    with _trial(ADVANTAGES, config.advantage):
        advantages = ADVANTAGES.load(config.advantage)(rewards, counted)
        if advantages.shape != rewards.shape or not advantages.isfinite().all() or advantages[~counted].any():
            raise ValueError("must return finite values of the rewards' shape, 0 where counted is False")
    logprobs = torch.tensor([-1.0, -0.5])
    samples = [TrainingSample([1], [2, 3], advantage, old_logprobs=logprobs, reference_logprobs=logprobs) for advantage in (1.0, -1.0)]
    (batch,) = make_micro_batches(samples, 8)
    current = torch.full_like(batch.mask, -0.9, requires_grad=True)
    with _trial(LOSSES, config.loss):
        losses, clipped = LOSSES.load(config.loss)(current, batch, config, **config.loss_settings)
        if losses.shape != current.shape or clipped.shape != current.shape or clipped.dtype != torch.bool:
            raise ValueError("must return (losses, clipped), of the log-probs' shape, clipped as bool")
        PolicyLoss(config)(current, batch)[0].backward()  # raises where the losses have no gradient


@contextmanager
def _trial(plug: Plug, name: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None
    except Exception as error:  # whatever it raises
        raise UserError(plug.field, name, f"failed on a toy batch ({type(error).__name__}: {error})", "see docs/extending.md") from None
