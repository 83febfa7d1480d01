"""Megatron's embedding and linear layers in high precision."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.mcore.base.weight_gradient import WeightGradient, multiply, take_weight, take_weights


class PlainColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel layer in which each of two concurrent micro-batches adds its gradient to the buffer itself, on a GPU within its
    product."""

    def forward(self, *args: Any, **options: Any) -> Any:
        with take_weights(self):
            return super().forward(*args, **options)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return multiply(super()._forward_impl, input, self._parameters["weight"], *args, **options)


class Embedding(VocabParallelEmbedding):
    """The same for the embedding. On a GPU, only the rows of tokens that occur are added."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if not (input_.is_cuda and torch.is_grad_enabled() and self.weight.requires_grad):
            with take_weights(self):
                result: torch.Tensor = super().forward(input_)
                return result
        own = _Lookup.apply(self.weight, input_ - self.vocab_start_index)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(own.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(own, group=self.tp_group)


class _Lookup(torch.autograd.Function):
    """Rows [..., h] of a rank's part of an embedding; zeros for tokens out of range."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        elsewhere = (tokens < 0) | (tokens >= len(weight))
        rows = torch.nn.functional.embedding(tokens.masked_fill(elsewhere, 0), weight)
        rows[elsewhere, :] = 0.0
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (tokens,), total = ctx.saved_tensors, WeightGradient(ctx.weight)
        total.add_rows(tokens.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return total.finish(), None


class ReplicatedLinear(MegatronModule):
    """y = x W^T with the whole W [N, K] on every tensor-parallel rank. Returns (y, None) like Megatron's linear layers. Under sequence
    parallelism, each rank sees a part of the tokens; the weight's tag makes Megatron sum its gradient over the ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = parallel_state.get_tensor_model_parallel_group()
        return self._forward_impl(x, self.weight, allreduce_dgrad=False, sequence_parallel=False, tp_group=group), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        product: Any = linear_with_grad_accumulation_and_async_allreduce if weight.requires_grad else linear_with_frozen_weight
        return multiply(product, input, weight, bias=None, **options)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None) -> Any:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


class AbsorbedLinear(ColumnParallelLinear):
    """MLA's kv_b, which the attention absorbs: `forward` returns the weight instead of a product."""

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N / tp, K], with gradient."""
        return self.read_values(dtype)

    def read_values(self, dtype: torch.dtype) -> torch.Tensor:
        return take_weight(self.weight).to(dtype)
