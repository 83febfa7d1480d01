"""Why trainer and engine disagree: a ladder of log-probs of the same tokens, each rung one change away from the one below it.

    engine        what the engine returned when it sampled
      kernels     the trainer's model with the engine's weights and the engine's quantised inputs: other kernels, other order of sums
      activations the same weights, inputs in the trainer's precision
      weights     the trainer's own weights: what quantising them for the engine changes
      version     the newest weights, after the optimizer steps on these tokens: what one version of age changes
    newest

The differences d of neighbours add up to the whole, token by token, so their means do; so do the rises of the k3 estimate of
KL(engine || rung). In `fp8_unified` trainer and engine compute with the same blocks and the same inputs: activations and weights are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.engine_emulation import emulate_engine

CAUSES = ("kernels", "activations", "weights", "version")
"""Each names the change between two neighbouring rungs, from the engine upwards."""


class MismatchAttribution:
    """Climbs the ladder for one policy. Call `measure` before its weights change, then `finish` when they have. Collective."""

    def __init__(self, policy: Policy, read_named_tensors: Callable[[], Mapping[str, torch.Tensor]], activations: str | None) -> None:
        """`read_named_tensors` gives what the engine was given of the weights (`mcore.weights.collect_named_tensors`), `activations` is
        the format of the
        engine's inputs (`PrecisionContract.activation_format`)."""
        self._policy, self._read_named_tensors, self._activations = policy, read_named_tensors, activations
        self._answers: list[TrainingSample] = []
        self._rungs: list[torch.Tensor] = []

    def measure(self, answers: list[TrainingSample]) -> None:
        """All rungs of the version that sampled; two forward passes. `rollout_logprobs` and `old_logprobs`, by the engine and by the
        trainer, must be known."""
        named_tensors = self._read_named_tensors()
        self._answers = answers
        self._rungs = [torch.cat([answer.rollout_logprobs for answer in answers])]
        for activations in (self._activations, None):
            with emulate_engine(self._policy.model, named_tensors, activations):
                self._rungs.append(self._logprobs())
        self._rungs.append(torch.cat([answer.old_logprobs for answer in answers]))

    def finish(self) -> dict[str, float]:
        """The last rung, one forward pass, and the metrics of all; see `attribute`."""
        return attribute_mismatch([*self._rungs, self._logprobs()])

    def _logprobs(self) -> torch.Tensor:
        return torch.cat(self._policy.compute_logprobs(self._answers)[0])


def attribute_mismatch(rungs: Sequence[torch.Tensor]) -> dict[str, float]:
    """Metrics `mismatch/cause/CAUSE/WHAT` of the rungs, float32 [tokens] each: one more than there are causes.

    WHAT: `abs_mean` and `abs_max` of |d|; `mean` of d; `k3`, by how much the estimate of KL(engine || rung) rises. The CAUSE `total`
    spans the ladder; its `mean` and `k3` are the sums of those of the causes.
    """
    exact = [rung.double() for rung in rungs]
    kl = [float(k3(rung - exact[0]).mean()) for rung in exact]
    found: dict[str, float] = {}
    for cause, below, above in [*((cause, at, at + 1) for at, cause in enumerate(CAUSES)), ("total", 0, len(CAUSES))]:
        difference = exact[above] - exact[below]
        values = {
            "abs_mean": float(difference.abs().mean()),
            "abs_max": float(difference.abs().max()),
            "mean": float(difference.mean()),
            "k3": kl[above] - kl[below],
        }
        found |= {f"mismatch/cause/{cause}/{what}": value for what, value in values.items()}
    return found
