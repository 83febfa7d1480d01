"""Layers without rotary positions in SGLang's Llama, which serves SmolLM3: SGLang has no class for it."""

from collections.abc import Callable
from typing import Any

import torch


class Unrotated(torch.nn.Module):
    """Takes the place of a layer's rotary embedding."""

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def leave_out(original: Callable[..., None], self: Any, config: Any, layer_id: int = 0, *args: Any, **named: Any) -> None:
    """Wrap `LlamaDecoderLayer.__init__`: layers for which `no_rope_layers` of config.json has 0 do not rotate."""
    original(self, config, layer_id, *args, **named)
    if (rotated := getattr(config, "no_rope_layers", None)) is not None and not rotated[layer_id]:
        self.self_attn.rotary_emb = Unrotated()
