"""The whole configuration of a run, section by section. Imports without torch."""

from __future__ import annotations

from megatron_rl.config.algorithm import Algorithm
from megatron_rl.config.base import Section
from megatron_rl.config.checkpoint import Checkpoint
from megatron_rl.config.data import Data
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.log import Log
from megatron_rl.config.model import Model
from megatron_rl.config.placement import Placement
from megatron_rl.config.precision import Precision
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.rollout import Rollout
from megatron_rl.config.sync import Sync
from megatron_rl.config.train import Train


class Config(Section):
    """A whole run."""

    model: Model
    precision: Precision = Precision()
    train: Train = Train()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    data: Data = Data()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    placement: Placement = Placement()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
