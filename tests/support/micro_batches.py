"""Where the sampled tokens of a packed micro-batch lie."""

import torch


def iter_target_positions(batch, samples):
    """Yield (index of the sample, int64 [A]: positions in the row whose targets are its sampled tokens)."""
    return batch.split_by_sample(torch.arange(batch.mask.shape[1]).unsqueeze(0), samples)
