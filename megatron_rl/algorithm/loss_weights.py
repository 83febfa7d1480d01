"""Means over a batch as weights of tokens, given before the batch is cut.

The trainer divides a sum over N answer tokens of n sequences by N. A token of a sequence of T answer tokens weighs
as below; an environment's tokens weigh nothing and are not counted.

    token     1                 the mean over all tokens (DAPO, arXiv 2503.14476)
    sequence  N / (n T)         the mean of the sequences' means (GRPO as published, arXiv 2402.03300; GSPO)
    constant  N / (n L)         sum / (n L), L = the longest answer allowed (Dr. GRPO, arXiv 2503.20783)

Excluded sequences weigh 0 and are not counted: n and T are of the others, whose tokens then weigh N / (N - excluded tokens) in `token`.
"""

from __future__ import annotations

from megatron_rl.batch.training_sample import TrainingSample


def assign_loss_weights(sequences: list[TrainingSample], aggregate: str, longest: int) -> None:
    """Sets the weights of one optimizer step's sequences, all of them whoever computes them; `longest` is L."""
    tokens = sum(sequence.sampled_count for sequence in sequences)
    counted = [sequence for sequence in sequences if not sequence.excluded]
    counted_tokens = sum(sequence.sampled_count for sequence in counted)
    for sequence in sequences:
        length = 0 if sequence.excluded else sequence.sampled_count
        divisor = {"token": counted_tokens, "sequence": len(counted) * length, "constant": len(counted) * longest}[aggregate]
        sequence.loss_weight = tokens / divisor if length else 0.0
