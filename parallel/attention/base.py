"""What every kind of attention answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from parallel.shards import GeometryError, HFTensor, Weight

if TYPE_CHECKING:
    from parallel.formats import TensorFormat
    from parallel.hf_config import Rope


class AttentionKind:
    """Attention of a layer. Subclasses are frozen dataclasses, equal for layers that are alike."""

    module: ClassVar[str] = "self_attn"
    """Name of the layer's module in checkpoints."""
    has_cache_by_position: ClassVar[bool] = True
    """Whether an engine caches keys and values of each token. If not, it keeps a state of constant size for each request."""
    unquantized_modules: ClassVar[tuple[str, ...]] = ()
    """Names of linear layers in high precision, in checkpoints and in SGLang."""
    rope: Rope | None = None

    @property
    def can_widen(self) -> bool:
        """Whether heads whose weights are zero can be added (`megatron_rl.hf.align`)."""
        return True

    @property
    def most_tokens(self) -> int | None:
        """Longest sequence for which trainer and engine compute this attention, or None for any length."""
        return None

    @property
    def output(self) -> tuple[str, int]:
        """Name of the output projection in the checkpoint's layer, and the number of values that it sums."""
        raise NotImplementedError

    @property
    def rotated(self) -> tuple[str, float]:
        """Field of config.json with the width of a head's part with positions, and how many of its elements are rotated."""
        return "head_dim", 0

    @property
    def flops_per_position(self) -> int:
        """Forward FLOPs of a token for each position of its sequence, over a sequence on average: h (d_qk + d_v) of causal attention."""
        return 0

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of a token that are neither products with linear layers nor grow with the sequence."""
        return 0

    @property
    def head_counts(self) -> dict[str, int]:
        """Numbers of heads by their name in config.json, of which every rank must have equally many."""
        raise NotImplementedError

    @property
    def adapted(self) -> tuple[str, ...]:
        """Megatron's names of the linear layers that may have adapters (`parallel.adapters.TARGETS`)."""
        return ("linear_qkv", "linear_proj")

    @property
    def moved_heads(self) -> int:
        """Width of what context-parallel ranks exchange for a token: queries, keys, values and the result."""
        raise NotImplementedError

    def count_positions(self, length: float) -> float:
        """Return what multiplies `flops_per_position` for sequences of a length."""
        return length

    def refuse_engine_format(self, format: TensorFormat) -> str:
        """Return why SGLang cannot serve the kind with weights in a format, or ""."""
        return ""

    def refuse_kv_scales_by_layer(self) -> str:
        """Return why the keys and values of a layer cannot share a scale, or ""."""
        return ""

    def list_weights(self, hidden: int, hf: str, megatron: str, kv_scales: bool = False) -> list[Weight]:
        """Return the weights of a layer of width `hidden`, given the name prefixes of the checkpoint's module and of Megatron's, with one
        of its own if a layer has scales of cached keys and values."""
        raise NotImplementedError

    def list_kept(self, layer: int, hidden: int, hf: str) -> list[HFTensor]:
        """Return the tensors of a layer that neither trainer nor engine has, given the name prefix of the checkpoint's module. Checkpoints
        and exports keep them."""
        return []

    def check_ranks(self, tp: int, field: str) -> None:
        """Raise GeometryError, naming `field`, if `tp` ranks cannot share the heads."""
        for name, count in self.head_counts.items():
            if count % tp:
                raise GeometryError(field, tp, f"must divide {name} ({count})", f"use a divisor of {count}")

    def check_context_ranks(self, tp: int, cp: int) -> None:
        """Raise GeometryError if `cp` context-parallel ranks cannot share the heads of each of `tp` ranks: a rank computes attention for
        some heads and all tokens."""
        for name, count in self.head_counts.items():
            if cp > 1 and count % (tp * cp):
                rule = f"tp * cp = {tp} * {cp} must divide {name} ({count})"
                raise GeometryError("train.layout.cp", cp, rule, "use a smaller size")

    def count_cache_bytes(self, tp: int, bytes_of: Callable[[int], int]) -> int:
        """Return the bytes that one of `tp` engine ranks caches per token. `bytes_of`: bytes of a cached vector of this width."""
        return 0

    def count_state_bytes(self, tp: int, high_bytes: int) -> int:
        """Return the bytes that one of `tp` engine ranks keeps per request, whatever its length."""
        return 0
