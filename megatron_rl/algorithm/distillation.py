"""On-policy distillation: the policy samples, a teacher says of each token how much likelier it finds it.

    A_t = reward_coef A_t + kl_coef (log p_teacher(t) - log p(t))

or, with `kl_in = "loss"`, A_t = reward_coef A_t, and `policy_loss` adds kl_coef times an estimate of the KL with a gradient of its own.

Both log-probs are of the trainer, in the advantage before the step's updates, at the temperature and over the tokens that the engine drew
from. The mean of log p - log p_teacher over the policy's tokens estimates the reverse KL, KL(policy || teacher), per token. What follows a
token does not count for it (a discount of 0), as at https://thinkingmachineslab.com/blog/on-policy-distillation and in slime. Nothing is
normalised: a token's bits do not depend on the others.
"""

from __future__ import annotations

from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.metrics import declare

_KL = declare(
    "teacher/kl", "estimate of KL(policy || teacher) per token, before the step's updates", "nats", "KL to the teacher (nats per token)"
)
_LARGEST = declare("teacher/kl_max", "largest log p - log p of the teacher of a token", "nats")


def assign_distilled_advantages(
    samples: list[TrainingSample], config: TeacherConfig | None, combine: Combine = combine_alone
) -> dict[str, float]:
    """Weigh the advantages of this replica's samples, once they have those of the rewards, and add the teacher's part where it goes into
    them; return metrics of all replicas. Needs `old_logprobs` and `teacher_logprobs`. Collective. Without a teacher do nothing."""
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
