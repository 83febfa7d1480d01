"""The critic of PPO: an actor whose output layer gives values (`mcore.layers.linear.value_head`).

It trains by the same passes, optimizer and FP8 blocks. No engine ever gets it.
"""

from __future__ import annotations

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import TrainConfig
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.names import ModelChunks


class Critic(Actor):
    """A model built from `parallel.model_geometry.as_critic`; `train` is `CriticConfig.to_train`."""

    def __init__(self, model: ModelChunks, train: TrainConfig) -> None:
        super().__init__(model, train, temperature=1.0)
        self.routing.replay_enabled = False  # what was recorded is the policy's

    def compute_values(self, samples: list[TrainingSample]) -> list[torch.Tensor]:
        """Return the value before each sampled token of this replica's samples, float32 [A] each; no gradient. Collective."""
        return self.compute_logprobs(samples)[0]
