"""The configuration of a whole run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.agent import AgentConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.base import ConfigSection
from megatron_rl.config.checkpoint import CheckpointConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.log import LogConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.placement import PlacementConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.config.train import TrainConfig
from megatron_rl.types import SamplingParams
from parallel.model_geometry import ModelGeometry


class Config(ConfigSection):
    """The configuration of a run: one field per section of the TOML file. Only [model] is required."""

    model: ModelConfig
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    replay: ReplayConfig | None = None
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig | None = None
    lora: LoraConfig | None = None
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    agent: AgentConfig | None = None
    placement: PlacementConfig = PlacementConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def optimizer_steps(self) -> int:
        """Number of the policy's optimizer steps in the whole run."""
        warmup = self.critic.critic_warmup if self.algorithm.has_critic else 0
        return (self.train.steps - warmup) * self.algorithm.updates_per_step

    @property
    def critic_train(self) -> TrainConfig:
        """The [train] section with the critic's optimizer settings."""
        return self.critic.to_train(self.train).decay_over(self.train.steps * self.algorithm.updates_per_step)

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens in a sequence: prompt, response and environment messages, or an agent's conversation."""
        if self.agent:
            return self.agent.max_tokens
        messages = self.environment.max_tokens if self.environment else 0
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens + messages

    def make_geometry(self, hf_config: Mapping[str, Any]) -> ModelGeometry:
        """Return the geometry of the policy for a config.json, including adapters. Raise GeometryError if the trainer does not support the
        model."""
        model = ModelGeometry.from_hf_config(hf_config)
        return model if self.lora is None else self.lora.adapt(model)

    def make_trained_geometry(self, hf_config: Mapping[str, Any]) -> ModelGeometry:
        """Return `make_geometry` plus the trained multi-token prediction layers, which are not part of a sync."""
        return replace(self.make_geometry(hf_config), trains_mtp=self.train.mtp_loss_scaling_factor > 0)

    @property
    def text_markers(self) -> tuple[str, str] | None:
        """Markers of thoughts that texts of completions keep, or None for the chat template's own."""
        return None if self.agent is not None or isinstance(self.reward.thinking, str) else self.reward.thinking

    def to_eval_sampling(self) -> SamplingParams:
        """Return the sampling options for held-out problems."""
        return replace(self.rollout.to_sampling(), record_kept_tokens=False, **self.eval.model_dump(exclude={"samples"}, exclude_none=True))
