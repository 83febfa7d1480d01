"""Everything that knows Megatron-Core: the CPU platform, the layers, the model, the optimizer, the checkpoints."""

import warnings

# On import Megatron warns several times that Transformer Engine and apex are missing; `megatron-rl doctor` says it once, with the cure.
warnings.filterwarnings("ignore", module=r"megatron\.core")
