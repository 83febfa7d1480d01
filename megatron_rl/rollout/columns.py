"""Which runs leave the columns of completions at the engines, until the replicas that train on them fetch them (`types.RemoteColumns`).

Rank 0 then gets the length, the reward, and little else of a completion. All other runs need its columns on rank 0."""

from megatron_rl.config import Config
from megatron_rl.plugs import REWARDS
from megatron_rl.types import ColumnPlace


def choose_place(config: Config) -> ColumnPlace:
    """Return where the columns of a run's completions go."""
    names = {part.name for part in config.reward.parts.values()}
    needs_columns = (
        config.train.layout.dp == 1  # rank 0 is the first rank of the only replica
        or config.environment is not None  # tokens are the next turn's prompt
        or config.agent is not None
        or config.replay is not None  # the buffer is part of checkpoints
        or config.rollout.over_sampling_prompts > 0  # aborted groups renumber the others, so that none can be sampled again
        or ("http" in names and any(map(REWARDS.is_own, names)))  # own functions may ask for ids
    )
    if needs_columns:
        return "here"
    return "but_text" if "http" in names else "remote"  # a server's address may be rank 0's own node
