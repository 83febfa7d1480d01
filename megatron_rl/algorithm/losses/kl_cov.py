"""KL-Cov (arXiv 2505.22617, section 4.2): an unclipped ratio, with a penalty on leaving the old policy for the tokens whose log-prob and
advantage are both high, since these lower the entropy most. `algorithm.covariance` selects them.

loss_t = -rho_t A + [selected] kl_cov_coef |logp_t - old_t|,    rho_t = exp(logp_t - old_t), with the exponent clamped to +-20
"""

import torch

from megatron_rl.algorithm.ratios import exp_log_ratio
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.config.algorithm import AlgorithmConfig


def token_losses(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (losses [1, t], tokens with the penalty bool [1, t]). `logprobs` [1, t] with gradient."""
    log_ratio, chosen = logprobs - batch.old_logprobs, batch.high_covariance > 0
    penalty = config.kl_cov_coef * log_ratio.abs().masked_fill(~chosen, 0.0)
    return -exp_log_ratio(log_ratio) * batch.advantages + penalty, chosen
