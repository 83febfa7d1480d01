"""The configuration: TOML in, validated pydantic models out, one file a section. Imports without torch.

Every field carries its documentation below it. Unknown keys are errors that suggest the nearest name. A bad value raises
`UserError` with one line: the field, the value, the rule and the fix.
"""

from megatron_rl.config.algorithm import Algorithm
from megatron_rl.config.data import Data
from megatron_rl.config.loading import apply_overrides, load_config
from megatron_rl.config.model import Architecture, Model, WarmStart
from megatron_rl.config.placement import Placement
from megatron_rl.config.precision import Precision
from megatron_rl.config.rollout import Rollout
from megatron_rl.config.run import Config
from megatron_rl.config.sync import Sync
from megatron_rl.config.train import Train, TrainLayout

__all__ = [
    "Algorithm",
    "Architecture",
    "Config",
    "Data",
    "Model",
    "Placement",
    "Precision",
    "Rollout",
    "Sync",
    "Train",
    "TrainLayout",
    "WarmStart",
    "apply_overrides",
    "load_config",
]
