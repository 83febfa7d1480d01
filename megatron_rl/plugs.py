"""All kinds of plugs, with the configuration fields that name them (docs/extending.md). Transports are in `parallel.transport.TRANSPORTS`.

Every worker imports this module, so it must stay light.
"""

from parallel.plug import Plug

LOSSES = Plug(
    "algorithm.loss",
    {name: f"megatron_rl.algorithm.losses.{name}:token_losses" for name in ("ppo", "gspo", "cispo", "gmpo", "clip_cov", "kl_cov")}
    | {f"dppo_{name}": f"megatron_rl.algorithm.losses.dppo:{name}_losses" for name in ("tv", "kl")},
)
"""Losses (`megatron_rl.algorithm.policy_loss.TokenLossFunction`)."""

ADVANTAGES = Plug(
    "algorithm.advantage",
    {
        name: f"megatron_rl.algorithm.advantages:{name}"
        for name in ("group_std", "group_mean", "leave_one_out", "token_std", "batch_std", "max_rl")
    },
)
"""Advantages (`megatron_rl.algorithm.advantages.AdvantageFunction`)."""

REWARDS = Plug(
    "reward.function",
    {
        "math": "megatron_rl.rewards.math:reward",
        "exact": "megatron_rl.rewards.match:match_answer",
        "format": "megatron_rl.rewards.match:match_format",
        "length": "megatron_rl.rewards.scorer:compute_length_reward",
        "http": "megatron_rl.rewards.http:HttpRewardClient",
    },
    takes=("text", "problem"),
)
"""Reward functions (`megatron_rl.types.RewardFunction`). `rewards.scorer` calls `length` and `http` differently."""

ENVIRONMENTS = Plug("environment.name", {}, takes=("problem",))
"""Environments (`megatron_rl.rollout.environments.base.EnvironmentClass`)."""

AGENTS = Plug("agent.name", {}, takes=("problem",))
"""Agents: functions of a problem that run in separate processes (`megatron_rl.rollout.agents`)."""

DATA_SOURCES = Plug("data.train", {})
"""Custom sources of problems (`megatron_rl.data.own_source`)."""

DATA_FORMATS = Plug(
    "data.format", {name: f"megatron_rl.data.formats:{name}" for name in ("gsm8k", "math", "deepmath", "aime")}, takes=("row",)
)
"""Row formats (`megatron_rl.data.formats.RowReader`)."""

TRACKERS = Plug(
    "log.trackers",
    {
        "tensorboard": "megatron_rl.observability.trackers:TensorBoard",
        "wandb": "megatron_rl.observability.trackers:WandB",
        "mlflow": "megatron_rl.observability.trackers:MLflow",
    },
    takes=("folder", "config", "resume_step"),
)
"""Trackers (`megatron_rl.observability.trackers.Tracker`)."""
