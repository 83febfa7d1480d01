"""A loss: SAPO (arXiv 2511.20347) replaces PPO's clip by a smooth gate, so that the gradient of a token never drops to 0 abruptly.

loss_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A,    rho_t = exp(logp_t - old_t),    tau = tau_positive for A > 0, else tau_negative

[algorithm]
loss = "examples.plugs.sapo:token_losses"
loss_settings = { tau_negative = 1.1 }
"""

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(
    logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses, clipped), both of shape [1, tokens]; nothing is clipped. `logprobs` has the same shape and a gradient.

    Raise ValueError if a tau is not above 0. The check before a run reports it as a configuration error.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(f"tau_positive ({tau_positive}) and tau_negative ({tau_negative}) must be above 0")
    tau = torch.where(batch.advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau * torch.sigmoid(tau * (torch.exp(logprobs - batch.old_logprobs) - 1))
    return -gate * batch.advantages, torch.zeros_like(batch.mask, dtype=torch.bool)
