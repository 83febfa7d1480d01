"""Attributes the mismatch to its causes: log-probs of the same tokens are computed in variants that differ in one thing at a time.

    engine        the log-probs that the engine returned
      kernels     the trainer's kernels with the engine's weights and quantized inputs
      activations inputs in the trainer's precision
      weights     the trainer's weights instead of those quantized for the engine
      kv          keys and values as the trainer's attention reads them instead of the engine's cache (`precision.kv`)
      version     the weights after this step's optimizer steps
    newest

The differences of neighboring variants add up to the total, token by token. So do their means, and the increases of the k3 estimate of
KL(engine || variant). In `fp8_unified`, both sides compute with the same blocks, inputs, keys, and values, so the causes activations,
weights, and kv are 0.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.engine_emulation import emulate_cache, emulate_engine
from megatron_rl.mcore.passes import reduce
from megatron_rl.metrics import declare
from parallel.formats import TensorFormat

CAUSES = ("kernels", "activations", "weights", "kv", "version")
_ABS_MEAN = declare("mismatch/cause/{}/abs_mean", "mean |Δ log p| by the cause “{}”", "nats", "|Δ log p| by cause (nats)", label="{}")
_ABS_MAX = declare("mismatch/cause/{}/abs_max", "largest |Δ log p| of a token by the cause “{}”", "nats")
_MEAN = declare("mismatch/cause/{}/mean", "mean Δ log p by the cause “{}”, of either sign", "nats")
_K3 = declare("mismatch/cause/{}/k3", "what the cause “{}” adds to the k3 estimate of KL(rollout || trainer)", "nats")


class MismatchAttribution:
    """Attributes the mismatch of one policy. Call `measure` before the optimizer steps and `finish` after them. Collective."""

    def __init__(
        self,
        policy: Policy,
        read_named_tensors: Callable[[], Mapping[str, torch.Tensor]],
        engine_format: TensorFormat,
        engine_alone_quantizes_kv: bool = False,
    ) -> None:
        """Create the attribution. `read_named_tensors` returns the weights as the engine has them (`collect_named_tensors`); the
        other arguments are as in `PrecisionContract`."""
        self._policy, self._read_named_tensors, self._format = policy, read_named_tensors, engine_format
        self._emulates_cache = engine_alone_quantizes_kv
        self._samples: list[TrainingSample] = []
        self._variants: list[torch.Tensor] = []

    def measure(self, samples: list[TrainingSample]) -> None:
        """Compute the variants of the policy version that sampled: two forward passes, or three if the engine's cache differs. `samples`
        are this replica's and must have `rollout_logprobs` and `old_logprobs`."""
        named_tensors = self._read_named_tensors()
        self._samples = samples
        self._variants = [_join([sample.rollout_logprobs for sample in samples])]
        own = _join([sample.old_logprobs for sample in samples])
        with emulate_cache(self._policy.model) if self._emulates_cache else nullcontext():
            for inputs in (True, False):
                with emulate_engine(self._policy.model, named_tensors, self._format, inputs):
                    self._variants.append(self._compute_logprobs())
            self._variants.append(self._compute_logprobs() if self._emulates_cache else own)
        self._variants.append(own)

    def finish(self) -> dict[str, float]:
        """Compute the last variant with one forward pass and return the metrics over all replicas; see `attribute_mismatch`."""
        return attribute_mismatch([*self._variants, self._compute_logprobs()], reduce.combine)

    def _compute_logprobs(self) -> torch.Tensor:
        return _join(self._policy.compute_logprobs(self._samples)[0])


def _join(logprobs_B: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *logprobs_B])


def attribute_mismatch(variants: Sequence[torch.Tensor], combine: Combine = combine_alone) -> dict[str, float]:
    """Return metrics `mismatch/cause/CAUSE/WHAT`, given log-probs float32 [tokens] of each variant, one more than there are causes.

    WHAT is `abs_mean` or `abs_max` of |d|, `mean` of d, or `k3`, the increase of the estimate of KL(engine || variant). The CAUSE `total`
    spans all variants; its `mean` and `k3` are the sums over the causes.
    """
    logprobs = [variant.double() for variant in variants]
    steps = [*((cause, index, index + 1) for index, cause in enumerate(CAUSES)), ("total", 0, len(CAUSES))]
    totals, metrics = Totals(), dict[str, float]()
    for number, variant in enumerate(logprobs):
        totals.add(f"k3 {number}", k3(variant - logprobs[0]))
    for cause, before, after in steps:
        difference = logprobs[after] - logprobs[before]
        totals.add(f"mean {cause}", difference)
        totals.add(f"abs {cause}", difference.abs())
    totals = combine(totals)
    for cause, before, after in steps:
        metrics[_ABS_MEAN.format(cause)] = totals.mean(f"abs {cause}")
        metrics[_ABS_MAX.format(cause)] = totals.largest(f"abs {cause}")
        metrics[_MEAN.format(cause)] = totals.mean(f"mean {cause}")
        metrics[_K3.format(cause)] = totals.mean(f"k3 {after}") - totals.mean(f"k3 {before}")
    return metrics
