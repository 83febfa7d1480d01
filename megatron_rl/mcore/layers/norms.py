"""RMSNorm, and the norms of what attention and MLP add to the residual stream (GLM-4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_rl.kernels import batch_invariant
from megatron_rl.mcore.layers.linear.weight_gradient import take_weights

AddFn = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]
"""((output, bias), residual stream, dropout) -> residual stream."""


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works under sequence parallelism: its weight is tagged so that Megatron sums its gradient over the TP group."""

    fusion: Any = None
    """With the layer behind it, if it has one (`norm_fusion`)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Any) -> Any:
        """Return the norm of x, `Normed` where it is quantized as it is computed. Of `norm_fusion.Summands` return the sum; of None
        the weight, for which Megatron's hook has waited."""
        with take_weights(self):
            if x is None:
                return self.weight
            if isinstance(x, tuple):
                return self.fusion.add(self, x)
            if self.fusion is not None and self.fusion.applies(self, x):
                return self.fusion.take(self, x)
            return super().forward(x) if x.is_cuda else batch_invariant.rms_norm(x, self.weight, cast(float, self.eps))


class NormedAdd(MegatronModule):
    """Takes the place of Megatron's `get_bias_dropout_add` in a layer's spec: norms the output, then adds it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> AddFn:
        add = get_bias_dropout_add(training, fused)
        return lambda output, residual, dropout: add((self.norm(output[0]), output[1]), residual, dropout)
