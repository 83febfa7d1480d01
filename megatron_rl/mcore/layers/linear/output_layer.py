"""Output layers: Megatron's, which can score positions instead of returning logits, and a critic's value head with the same interface.

They run inside the model's forward pass, so their hooks run as well: Megatron's DDP gathers weights in hooks.
"""

from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_rl.batch.packing import VALUE_ROWS
from megatron_rl.mcore.base import two_batch
from megatron_rl.mcore.base.names import override
from megatron_rl.mcore.base.weight_gradient import WeightGradient
from megatron_rl.mcore.passes.logprobs import Targets, score_tokens, token_logprobs


class Entropy(Enum):
    """Whether tokens are scored with the entropy of their distribution."""

    NONE = "not computed"
    VALUE = "without gradient"
    GRADIENT = "with gradient"


class OutputLayer(ColumnParallelLinear):
    """Returns logits [t, b, vocab / tp]; within `score_positions` log-probs [n, 1], or log-probs and entropies [n, 1, 2]."""

    _scored = two_batch.PerMicroBatch()  # (positions, targets, `Entropy`)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, no bias) for input_ [t, b, h], or [t / tp, b, h] under sequence parallelism. Scoring needs b = 1. `weight` is the
        embedding's if the two are tied."""
        if self._scored is None:
            return super().forward(input_, weight, runtime_gather_output)
        positions, targets, entropy = self._scored
        spread = gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        hidden = spread(input_, group=self.tp_group)[:, 0].index_select(0, positions)
        weight = self.weight if weight is None else weight
        keep_logits = self.config.recompute_granularity is None
        if entropy is not Entropy.NONE:
            logprobs, entropies = score_tokens(hidden, weight, targets, keep_logits)
            # a gradient of zeros would be differentiated, too
            return torch.stack([logprobs, entropies if entropy is Entropy.GRADIENT else entropies.detach()], -1).unsqueeze(1), None
        return token_logprobs(hidden, weight, targets, keep_logits).unsqueeze(1), None


def score_positions(model: GPTModel, positions: torch.Tensor, targets: Targets, entropy: Entropy) -> AbstractContextManager[None]:
    """Return a context manager in which the model's last stage returns log-probs [1, n] of `targets` at `positions` int64 [n], with
    gradient; unless `entropy` is NONE, log-probs and entropies [1, n, 2]."""
    return override([model.output_layer] if model.post_process else [], "_scored", (positions, targets, entropy))


class ValueHead(MegatronModule):
    """A critic's output layer: FP32 values [t, b, 1]; within `score_positions` [n, 1], or [n, 1, 2] with zeros as entropies. The value of a
    token predicts the return from the text before it. The weight is whole on every rank."""

    _scored = two_batch.PerMicroBatch()

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(config=config)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, input_: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[torch.Tensor, None]:
        """Return (values, no bias) for input_ [t, b, h], or [t / tp, b, h] under sequence parallelism. Scoring needs b = 1. Every tensor-
        parallel rank computes all values, so gradients need no sum over ranks."""
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=self.tp_group)
        if self._scored is None:
            return _Values.apply(input_.flatten(0, 1), self.weight).view(*input_.shape[:2], 1), None
        positions, _, entropy = self._scored
        values = _Values.apply(input_[:, 0].index_select(0, positions), self.weight)
        if entropy is not Entropy.NONE:
            return torch.stack([values, torch.zeros_like(values)], -1).unsqueeze(1), None
        return values.unsqueeze(1), None


class _Values(torch.autograd.Function):
    """[n, h] . [1, h]^T -> float32 [n]. Rows are independent, so their bits do not depend on other rows."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.cat([(rows.float() * weight.float()).sum(-1) for rows in hidden.split(VALUE_ROWS)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        dhidden = gradient.to(hidden.dtype).unsqueeze(-1) * weight
        if not ctx.needs_input_grad[1]:
            return dhidden, None
        dweight = WeightGradient(weight)
        for rows, of_rows in zip(hidden.split(VALUE_ROWS), gradient.split(VALUE_ROWS), strict=True):
            dweight.add(of_rows.unsqueeze(-1), rows.float())
        return dhidden, dweight.finish()
