"""Configuration of a run: reads TOML into validated pydantic models, one file per section. Does not import torch.

Each field is documented by the string below it. An unknown key is an error that suggests the nearest known name. An invalid value raises
`UserError` with one line: field, value, what is wrong, and what to do.
"""

from megatron_rl.config.loading import load_config
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.run import Config
from megatron_rl.config.train import TrainConfig
