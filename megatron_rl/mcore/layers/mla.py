"""Multi-latent attention (DeepSeek-V3) with down projections replicated on every tensor-parallel rank.

Megatron's local spec would split them by rows, through the middle of FP8 blocks; its Transformer Engine spec replicates them, as here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class ReplicatedLinear(MegatronModule):
    """y = x W^T with the whole W on every tensor-parallel rank; `weight` [N, K]. Returns (y, None), as Megatron's linear layers do.

    Under sequence parallelism each rank sees a part of the tokens; the weight's tag makes Megatron sum its gradient over the ranks.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = parallel_state.get_tensor_model_parallel_group()
        return self._forward_impl(x, self.weight, allreduce_dgrad=False, sequence_parallel=False, tp_group=group), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.linear(input, weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None) -> Any:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


class LatentAttention(MLASelfAttention):
    """Megatron's MLA. Its constructor accepts only Megatron's classes as down projections, so they are replaced afterwards."""

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, *args: Any, **kwargs: Any) -> None:
        plain = replace(submodules, linear_q_down_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear)
        super().__init__(config, plain, *args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):  # queries may be projected directly
                built = getattr(self, name)
                setattr(self, name, getattr(submodules, name)(built.input_size, built.output_size, config=config))
