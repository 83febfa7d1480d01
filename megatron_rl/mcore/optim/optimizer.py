"""The optimizer of an actor and its learning rate schedule, both Megatron's own."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import TrainConfig


class LearningRateSchedule:
    """Warm-up, then `train.decay_style`. A function of the number of completed steps, so there is no state to checkpoint.
    `train.decay_steps` must be set (`TrainConfig.decay_over`) unless the rate is constant."""

    def __init__(self, optimizer: Any, train: TrainConfig) -> None:
        self._warmup_steps = train.warmup_steps
        self._schedule = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=train.learning_rate,
            min_lr=train.min_learning_rate,
            lr_warmup_steps=train.warmup_steps,
            lr_decay_steps=max(train.decay_steps, train.warmup_steps + 1),
            lr_decay_style=train.decay_style,
            start_wd=train.weight_decay,
            end_wd=train.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=train.wsd_decay_steps,
            lr_wsd_decay_style="linear",
        )

    def __call__(self, done: int) -> float:
        """Return the learning rate of the step after `done` completed steps."""
        self._schedule.num_steps = done + (done < self._warmup_steps)  # Megatron's first warm-up step would have rate 0
        return float(self._schedule.get_lr({}))
