"""Log-probs of sampled tokens and their entropies, collected from the micro-batches of a pass, with or without gradient."""

from itertools import accumulate

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.mcore.passes import reduce


class SampledScores:
    """Scores of this replica's samples. Ranks of other pipeline stages than the last add nothing."""

    def __init__(self, samples: list[TrainingSample], device: torch.device) -> None:
        self._samples, self._device = samples, device
        self._lengths = [sample.sampled_count for sample in samples]
        self._firsts = list(accumulate(self._lengths, initial=0))
        self._logprobs = torch.zeros(self._firsts[-1], device=device)
        self._entropy_and_tokens = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Add a micro-batch: log-probs and entropies, float32 [1, t] without gradient, aligned with `batch.targets`."""
        own = [torch.arange(self._firsts[index], self._firsts[index + 1]) for index in batch.sample_indices]
        if own:  # indices come from the host, so nothing waits for the device
            places, targets = (copy_to_device(x, self._device) for x in (torch.cat(own), batch.find_targets(self._samples)))
            self._logprobs.index_copy_(0, places, logprobs[0].index_select(0, targets))
        self._entropy_and_tokens.add_(torch.stack([(entropies * batch.mask).sum(), batch.mask.sum()]))

    def gather(self) -> tuple[list[torch.Tensor], float]:
        """Return (log-probs of each sample's sampled tokens, float32 [A] on the CPU; mean entropy in nats per response token over all
        replicas). Collective."""
        reduce.sum_stages(self._logprobs)
        reduce.sum_values(self._entropy_and_tokens)
        entropy, tokens = self._entropy_and_tokens.tolist()
        return list(self._logprobs.cpu().split(self._lengths)), entropy / max(tokens, 1)
