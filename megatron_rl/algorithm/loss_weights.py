"""Token weights that turn the summed loss into a mean, assigned before the batch is cut into micro-batches.

The trainer divides a sum over the N response tokens of n sequences by N. A token of a sequence with T response tokens gets the weight
below. Tokens written by an environment get 0 and are not counted.

    token     1                 the mean over all tokens (DAPO, arXiv 2503.14476)
    sequence  N / (n T)         the mean over sequences of their means (GRPO as published, arXiv 2402.03300; GSPO)
    constant  N / (n L)         sum / (n L), L = the longest response allowed (Dr. GRPO, arXiv 2503.20783)

Excluded and masked sequences get weight 0 and do not count in n and T. With `token`, the other sequences get N / (N - excluded tokens).
"""

from megatron_rl.batch.training_sample import TrainingSample


def assign_loss_weights(samples: list[TrainingSample], aggregate: str, longest: int) -> None:
    """Set `loss_weight` of all samples of one optimizer step, of all ranks. `longest` is L."""
    tokens = sum(sample.sampled_count for sample in samples)
    counted = [sample for sample in samples if not (sample.excluded or sample.masked)]
    counted_tokens = sum(sample.sampled_count for sample in counted)
    for sample in samples:
        length = 0 if sample.excluded or sample.masked else sample.sampled_count
        divisor = {"token": counted_tokens, "sequence": len(counted) * length, "constant": len(counted) * longest}[aggregate]
        sample.loss_weight = tokens / divisor if length else 0.0
