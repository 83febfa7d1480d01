"""Which runs leave the columns of completions at the engines, until the replicas that train on them fetch them (`types.RemoteColumns`).

Rank 0 then gets the text, the length, and little else of a completion. All other runs need the tokens of completions on rank 0, and all
columns come with the answers."""

from megatron_rl.config import Config
from megatron_rl.config.hosts import is_loopback
from megatron_rl.plugs import REWARDS
from parallel.transport.process_group import runs_on_one_node


def may_stay_remote(config: Config) -> bool:
    """Return whether no part of a run needs the tokens of completions on rank 0, and all ranks reach the engines."""
    needs_tokens = (
        config.train.layout.dp == 1  # rank 0 is the first rank of the only replica
        or config.environment is not None  # tokens are the next turn's prompt
        or config.agent is not None
        or config.replay is not None  # the buffer is part of checkpoints
        or config.rollout.over_sampling_prompts > 0  # aborted groups renumber the others, so that none can be sampled again
        or any(REWARDS.is_own(part.name) for part in config.reward.parts.values())  # may ask for token ids
    )
    return not needs_tokens and (runs_on_one_node() or not any(map(is_loopback, config.rollout.hosts)))
