"""The critic's part of a step: values of the policy's tokens, their advantages and returns (`algorithm.gae`), then the critic's optimizer
steps on the policy's mini-batches.

Both come before the policy's update. If trainer and engine share devices, only one of the two optimizers is on the device at a time.
"""

from functools import partial
from statistics import mean

from megatron_rl.algorithm.gae import assign_token_advantages
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.config import Config
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import GRAD_NORM, LEARNING_RATE, Critic
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.weights.cache_scales import renew_scales
from megatron_rl.metrics import declare
from megatron_rl.training.samples import StepSamples

_OWN_NAMES = {
    GRAD_NORM: declare(
        "critic/grad_norm", "norm of the critic's gradient before clipping", "number", "norm before clipping", label="critic"
    ),
    LEARNING_RATE: declare("critic/learning_rate", "the critic's learning rate", "small"),
}


class CriticTrainer:
    """Trains `critic`. All methods are collective: every rank passes its replica's samples."""

    def __init__(self, config: Config, critic: Critic) -> None:
        self.critic, self._config = critic, config
        self._loss = ValueLoss(config.critic.cliprange_value)

    def assign_advantages(self, samples: StepSamples) -> dict[str, float]:
        """Set values, returns, and advantages, and return their metrics. Needs log-probs if the KL term is part of the reward."""
        own = samples.own
        for sample, values in zip(own, self.critic.compute_values(own), strict=True):
            sample.values = values
        add_up = partial(reduce.sum_samples, numbers=[sample.number for sample in own], count=samples.count)
        return assign_token_advantages(own, self._config.algorithm, add_up)

    def update(self, samples: StepSamples) -> dict[str, float]:
        """Run the critic's optimizer steps and return means over them."""
        self.critic.reload_optimizer()
        try:
            with renew_scales(self.critic.model):
                updates = [self.critic.update(mini_batch, self._loss) for mini_batch in samples.mini_batches]
        except RunError as error:
            raise RunError(f"the critic: {error}") from None
        self.leave_device()
        names = {name: _OWN_NAMES.get(name, name) for name in updates[0] if name in _OWN_NAMES or name.startswith("critic/")}
        return {shown: mean(update[name] for update in updates) for name, shown in names.items()}

    def leave_device(self) -> None:
        if self._config.placement.kind == "colocated":
            self.critic.offload_optimizer()
