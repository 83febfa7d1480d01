"""The `[checkpoint]` section. See docs/guides/checkpoints.md."""

from pydantic import Field

from megatron_rl.config.base import ConfigSection


class CheckpointConfig(ConfigSection):
    """When checkpoints are written, and which run is resumed."""

    every: int = Field(0, ge=0)
    """RL steps between checkpoints. 0 writes one checkpoint, at the end of the run."""
    keep: int = Field(3, ge=0)
    """Number of most recent checkpoints to keep. 0 keeps all checkpoints."""
    resume: str = "never"
    """`never` starts a new run. `auto` resumes the latest run under `log.dir` unless it is finished, or starts a new run if there is none.
    Any other value is the folder of the run to resume, finished or not."""
