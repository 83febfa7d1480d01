"""The critic's loss: the squared error of its values, clipped as in PPO, verl, and TRL.

    loss = sum over response tokens of  weight_t max((V_t - R_t)^2, (clip(V_t, V_old_t - c, V_old_t + c) - R_t)^2) / 2

V_old are the values before the step's updates, R the returns (`algorithm.gae`), and c is `critic.cliprange_value`. The weights are those of
the policy loss (`loss_weights`), so both losses are means over the same tokens.
"""

from dataclasses import dataclass

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.metrics import declare

_LOSS = declare("critic/loss", "value loss", "small", "value loss", label="value loss")
_CLIPPED = declare("critic/clip_fraction", "share of tokens whose value loss the clip raises", "share", "values clipped", label="clipped")


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss with clip range c."""

    cliprange: float

    def __call__(self, values: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (sum of weighted token losses, sums of metrics). `values` float32 [1, t], aligned with `batch.targets`."""
        values = values.masked_fill(batch.mask == 0, 0.0)
        change = (values - batch.values).clamp(-self.cliprange, self.cliprange)
        squares, of_clipped = (values - batch.returns).square(), (batch.values + change - batch.returns).square()
        loss = (torch.maximum(squares, of_clipped) / 2 * batch.loss_weights).sum()
        clipped = of_clipped > squares
        return loss, {_LOSS: loss.detach(), _CLIPPED: clipped.to(batch.mask.dtype).mul(batch.mask).sum()}
