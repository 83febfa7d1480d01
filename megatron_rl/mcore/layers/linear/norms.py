"""RMSNorm, its fusion with the following quantized layer on a GPU, and norms of the outputs of attention and MLP (GLM-4).

Megatron first adds to the residual stream, then calls the norm. Here `AddBeforeNorm` passes both summands to the norm, which returns
their sum and keeps its own result until Megatron calls it with that sum. If the norm is called with another input, such as in a
recomputed layer, it computes its result then.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.linear.base import NormBackend
from megatron_rl.kernels.linear.gather import can_gather
from megatron_rl.kernels.norm import heads as all_heads
from megatron_rl.kernels.norm import reference as rms
from megatron_rl.kernels.norm.heads import SharedHeads
from megatron_rl.mcore.base.exchange import make_placeholder
from megatron_rl.mcore.base.weight_gradient import take_weights
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedColumnParallelLinear
from megatron_rl.mcore.layers.linear.quantized_matmul import Normed
from parallel.formats import BLOCK

AddFn = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]
"""((output, bias), residual stream, dropout) -> residual stream."""


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm for sequence parallelism: its weight is tagged so that Megatron sums its gradient over the TP group."""

    fusion: Any = None  # the `NormFusion` with the following layer, or a `SumFusion`, if any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.zero_centered_norms
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Any) -> Any:
        """Return the norm of x, as `Normed` if fused. Return the sum of `Summands`. Return the scale for None, after Megatron's hooks."""
        with take_weights(self):
            if x is None:
                return self.scale
            if isinstance(x, tuple):
                return self.fusion.add(self, x)
            if self.fusion is not None and self.fusion.applies(self, x):
                return self.fusion.take(self, x)
            if x.is_cuda:
                return rms.Norm.apply(x, None, self.scale, self.eps)[1]
            return batch_invariant.rms_norm(x, self.scale, cast(float, self.eps))

    @property
    def scale(self) -> torch.Tensor:
        """What multiplies the normalized values: the weight, or float32 1 + weight if the model's norms are zero-centered."""
        return 1.0 + self.weight.float() if self.zero_centered else self.weight


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all query heads, or all key heads, of a token. Every rank has the whole weight, and the gradient of its own heads'."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, heads: int = 1) -> None:
        super().__init__(config, heads * hidden_size, eps)
        self.ranks = SharedHeads(heads, parallel_state.get_tensor_model_parallel_group())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of this rank's heads [..., own, d]."""
        with take_weights(self):
            own = self.ranks.cut(self.scale)
            return all_heads.AllHeadsNorm.apply(x.flatten(0, -3), own, cast(float, self.eps), self.ranks).view(x.shape)


class NormedAdd(MegatronModule):
    """Replaces Megatron's `get_bias_dropout_add` in a layer spec: normalizes the output, then adds it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> AddFn:
        add = get_bias_dropout_add(training, fused)
        return lambda output, residual, dropout: add((self.norm(output[0]), output[1]), residual, dropout)


def is_fused(x: torch.Tensor) -> bool:
    """Return whether norms on this device can add and quantize."""
    return x.is_cuda


class Summands(NamedTuple):
    """Input of a norm that also adds to the residual stream."""

    output: torch.Tensor
    residual: torch.Tensor


class QuantizingNorm(torch.autograd.Function):
    """Returns (x + residual, placeholder of the norm, its operand). If `residual` is None, x is the stream and the sum is None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, backend: NormBackend, columns: bool
    ) -> tuple[Any, ...]:
        total, statistic, operand = backend.quantize_norm(x, residual, weight, eps, columns=columns)
        ctx.save_for_backward(total, statistic, weight)
        ctx.set_materialize_grads(False)
        return None if residual is None else total, make_placeholder(x, *x.shape), operand

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor | None, gradient: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
        return *rms.differentiate_sum(ctx, of_total, gradient), None, None, None


class SumFusion:
    """Fusion of a zero-centered norm with the addition before it. Not a module, since both are parts of the model."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, Any] | None = None

    def applies(self, norm: RMSNorm, x: torch.Tensor) -> bool:
        """Return whether this pass fuses the norm of x, which requires that no hook observes the result."""
        return is_fused(x) and not norm._forward_hooks

    def add(self, norm: RMSNorm, summands: Summands) -> torch.Tensor:
        """Return the residual stream and keep its norm."""
        total, normed = self._run(norm, *summands)
        self._kept = total, normed
        return total

    def take(self, norm: RMSNorm, x: torch.Tensor) -> Any:
        """Return the norm of the stream x, which `add` may have kept."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is x else self._run(norm, x, None)[1]

    def _run(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, Any]:
        total, normed = rms.Norm.apply(x, residual, norm.scale, norm.eps)
        return total, normed


class NormFusion(SumFusion):
    """Fusion of a norm with the only layer that reads its result, which is `Normed`, and with the addition before it."""

    def __init__(self, layer: QuantizedColumnParallelLinear) -> None:
        super().__init__()
        self.layer = layer

    def applies(self, norm: RMSNorm, x: torch.Tensor) -> bool:
        """Return whether this pass fuses the norm of x. This also requires a backend that can. Under sequence parallelism, ranks must
        gather bytes."""
        layer, tokens = self.layer, x.shape[:-1].numel()
        gathers = layer.sequence_parallel and layer.tp_group.size() > 1
        return (
            super().applies(norm, x)
            and x.dtype == norm.weight.dtype == torch.bfloat16
            and hasattr(layer.backend, "quantize_norm")
            and layer.can_fuse
            and (not gathers or (can_gather(layer.backend, tokens) and (tokens % BLOCK == 0 or not self._trains)))
        )

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.layer.weight.requires_grad

    def _run(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, Normed]:
        backend: Any = self.layer.backend
        total, activation, operand = QuantizingNorm.apply(x, residual, norm.scale, norm.eps, backend, self._trains)
        return total, Normed(activation, operand)


class AddBeforeNorm(MegatronModule):
    """Replaces Megatron's `get_bias_dropout_add` in a layer spec: lets the following norm add if it can."""

    _norm: tuple[RMSNorm, ...] = ()  # in a tuple, so that it is not a submodule

    def forward(self, training: bool, fused: bool) -> AddFn:
        plain = get_bias_dropout_add(training, fused)

        def add(output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
            x, bias = output
            for norm in self._norm if bias is None and not dropout and x.dtype == residual.dtype else ():
                if norm.fusion is not None and norm.fusion.applies(norm, residual):
                    return norm(Summands(x, residual))
            return plain(output, residual, dropout)

        return add


def connect_norms(model: GPTModel) -> None:
    """Set the following layer of each norm in a built model, and the following norm of each addition to the residual stream. A recomputed
    layer ends with its own stream, so its last addition has no norm."""
    layers: list[Any] = list(model.decoder.layers)
    for number, layer in enumerate(layers):
        # Megatron enables gradients even in no_grad passes, which would keep a graph of all layers
        layer.bias_dropout_add_exec_handler = nullcontext
        if model.config.zero_centered_norms:
            layer.input_layernorm.fusion, layer.pre_mlp_layernorm.fusion = SumFusion(), SumFusion()
        if isinstance(layer.self_attention, SelfAttention) and isinstance(layer.self_attention.linear_qkv, QuantizedColumnParallelLinear):
            layer.input_layernorm.fusion = NormFusion(layer.self_attention.linear_qkv)
        if isinstance(layer.mlp, MLP) and isinstance(layer.mlp.linear_fc1, QuantizedColumnParallelLinear) and not layer.recompute_mlp:
            layer.pre_mlp_layernorm.fusion = NormFusion(layer.mlp.linear_fc1)
        behind = layers[number + 1 : number + 2] if model.config.recompute_granularity != "full" else []
        for add, norms in ((layer.self_attn_bda, [layer.pre_mlp_layernorm]), (layer.mlp_bda, [each.input_layernorm for each in behind])):
            if isinstance(add, AddBeforeNorm):
                add._norm = tuple(norms)
