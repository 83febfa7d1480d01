"""Softmax attention with a sink per head and, in some layers, a sliding window (gpt-oss): a softmax over the scores of the keys and one
learned logit, whose weight is dropped. All projections have biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel.attention.softmax import SoftmaxAttention
from parallel.shards import HFTensor, Weight, make_vector, make_weight

if TYPE_CHECKING:
    from parallel.formats import TensorFormat


@dataclass(frozen=True)
class SinkAttention(SoftmaxAttention):
    can_widen: ClassVar[bool] = False
    window: int = 0  # number of keys that a token attends to, itself included; 0: all before it

    def count_positions(self, length: float) -> float:
        """Return the length of sequences whose causal attention has as many keys as those of `length` tokens have within the window."""
        return 2 * self.window - self.window**2 / length if 0 < self.window < length else length

    def refuse_engine_format(self, format: TensorFormat) -> str:
        return f"attention with sinks, whose models have no form in {format.name.upper()}" if format.quantized else ""

    def list_weights(self, hidden: int, hf: str, megatron: str, kv_scales: bool = False) -> list[Weight]:
        sinks = HFTensor(hf + "sinks", self.heads, 1, "sinks", vector=True)
        return [
            *super().list_weights(hidden, hf, megatron, kv_scales),
            make_vector(hf + "o_proj.bias", hidden, megatron + "linear_proj.bias", "bias"),
            make_weight(sinks, megatron + "core_attention.softmax_offset", "rows"),
        ]
