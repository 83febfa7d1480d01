"""Which runs leave the columns of completions at the engines, until the replicas that train on them fetch them (`types.RemoteColumns`).

Rank 0 then gets the text, the length, and little else of a completion. All other runs need its columns on rank 0."""

from megatron_rl.config import Config
from megatron_rl.plugs import REWARDS
from megatron_rl.types import ColumnPlace


def choose_place(config: Config) -> ColumnPlace:
    """Return where the columns of a run's completions go."""
    needs_columns = (
        config.train.layout.dp == 1  # rank 0 is the first rank of the only replica
        or config.environment is not None  # tokens are the next turn's prompt
        or config.agent is not None
        or config.replay is not None  # the buffer is part of checkpoints
        or config.rollout.over_sampling_prompts > 0  # aborted groups renumber the others, so that none can be sampled again
    )
    if needs_columns:
        return "here"
    return "but_ids" if any(REWARDS.is_own(part.name) for part in config.reward.parts.values()) else "remote"  # they may ask for ids
