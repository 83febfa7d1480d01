"""The `[checkpoint]` section. See docs/guides/checkpoints.md."""

from typing import Annotated

from pydantic import Field, field_validator

from megatron_rl.config.base import MAX_STEPS, ConfigSection
from megatron_rl.config.change import NO_RESULT
from megatron_rl.config.reading import check_path


class CheckpointConfig(ConfigSection):
    """When checkpoints are written, and which run is resumed."""

    on_resume = NO_RESULT

    every: int = Field(0, ge=0, le=MAX_STEPS)
    """RL steps between checkpoints. 0 writes one checkpoint, at the end of the run."""
    keep: int = Field(3, ge=0, le=MAX_STEPS)
    """Number of most recent checkpoints to keep. 0 keeps all checkpoints."""
    resume: str = "never"
    """`never` starts a new run. `auto` resumes the latest run under `log.dir` unless it is finished, or starts a new run if there is none.
    Any other value is the folder of the run to resume, finished or not."""
    allow_changes: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Fields that decide results and may still differ from the resumed run, such as `["rollout.max_new_tokens"]`. Weights, optimizer,
    reference, step, and position in the data are kept. See docs/reference/resume.md."""

    @field_validator("resume")
    @classmethod
    def _names_a_folder(cls, resume: str) -> str:
        check_path(resume)
        return resume
