"""The configuration: TOML in, validated pydantic models out, one file a section. Imports without torch.

Every field carries its documentation below it. Unknown keys are errors that suggest the nearest name. A bad value raises
`UserError` with one line: the field, the value, the rule and the fix.
"""

from megatron_rl.config.loading import load_config
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.precision import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.run import Config
from megatron_rl.config.train import TrainConfig
