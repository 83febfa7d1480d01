"""On-policy distillation: the policy samples, and a teacher scores each token.

    A_t = reward_coef A_t + kl_coef (log p_teacher(t) - log p(t))

With `kl_in = "loss"`, A_t = reward_coef A_t instead, and `policy_loss` adds kl_coef times a KL estimate with its own gradient.

Both log-probs are computed by the trainer before the step's updates, with the rollout's temperature and token filter. The mean of
log p - log p_teacher over the policy's tokens estimates the reverse KL, KL(policy || teacher), per token. Later tokens do not count (a
discount of 0), as in https://thinkingmachineslab.com/blog/on-policy-distillation and slime. Nothing is normalized.
"""

from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.metrics import declare

_KL = declare(
    "teacher/kl", "estimate of KL(policy || teacher) per token, before the step's updates", "nats", "KL to the teacher (nats per token)"
)
_LARGEST = declare("teacher/kl_max", "largest log p - log p_teacher of a token", "nats")


def assign_distilled_advantages(
    samples: list[TrainingSample], config: TeacherConfig | None, combine: Combine = combine_alone
) -> dict[str, float]:
    """Scale the reward advantages of this replica's samples, add the teacher's part, and return metrics over all replicas. Collective.

    Needs `old_logprobs` and `teacher_logprobs`. Without a teacher, do nothing and return {}.
    """
    if config is None:
        return {}
    totals = Totals()
    for sample in samples:
        gap = sample.old_logprobs - sample.teacher_logprobs
        if config.kl_in == "advantage":
            sample.token_advantages = config.reward_coef * sample.advantages - config.kl_coef * gap
            sample.advantage = float(sample.token_advantages.double().mean()) if len(gap) else 0.0
        else:
            sample.token_advantages, sample.advantage = config.reward_coef * sample.token_advantages, config.reward_coef * sample.advantage
        totals.add("gap", gap)
    totals = combine(totals)
    return {_KL: totals.mean("gap"), _LARGEST: totals.largest("gap")}
