"""Routing records: the experts that the engine chose for each token, which the trainer replays.

A record is [t, layers, k]: for every token of a sequence but the last, and every decoder layer, the k chosen experts. Rows of layers
without experts are never read. The dtype is uint8, or int16 if there are more than 256 experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import numpy as np

from megatron_rl.errors import RunError
from parallel.model_geometry import ModelGeometry


@dataclass(frozen=True)
class RoutingShape:
    """Dimensions of a model's routing records."""

    num_layers: int  # decoder layers, with and without experts
    moe_layers: tuple[int, ...]  # numbers of the layers with experts
    num_experts: int  # experts per layer
    top_k: int

    @classmethod
    def from_hf_config(cls, hf_config: Mapping[str, Any]) -> Self:
        """Read the dimensions from the config.json of a model with experts."""
        geometry = ModelGeometry.from_hf_config(hf_config)
        assert geometry.experts is not None
        layers = tuple(layer for layer in range(geometry.layers) if geometry.has_experts(layer))
        return cls(geometry.layers, layers, geometry.experts.count, geometry.experts.top_k)

    @property
    def dtype(self) -> type[np.integer]:
        return np.uint8 if self.num_experts <= 256 else np.int16

    def check(self, experts: np.ndarray | None, tokens: int, whose: str) -> None:
        """Raise RunError unless `experts` is a valid record of a sequence of `tokens` tokens. `whose` starts the message."""
        self.check_shape(experts, tokens, whose)
        assert experts is not None
        used = experts[:, list(self.moe_layers)]
        if used.size and not 0 <= int(used.min()) <= int(used.max()) < self.num_experts:
            wrong = int(used.max()) if int(used.max()) >= self.num_experts else int(used.min())
            raise RunError(f"{whose} has a routing that names expert {wrong} of {self.num_experts}")
        chosen = np.ascontiguousarray(used.reshape(-1, self.top_k).T)  # comparing rows is ten times faster than sorting per token
        if any((one == other).any() for one, other in combinations(chosen, 2)):
            raise RunError(f"{whose} has a routing that sends a token to one expert twice")

    def check_shape(self, experts: np.ndarray | None, tokens: int, whose: str) -> None:
        """Run the cheap part of `check`."""
        wanted = (tokens - 1, self.num_layers, self.top_k)
        if experts is None:
            raise RunError(f"{whose} comes without the routing of its tokens")
        if experts.shape != wanted or experts.dtype != self.dtype:
            actual = f"{list(experts.shape)} in {experts.dtype}"
            raise RunError(f"{whose} has a routing of shape {actual}; its {tokens} tokens need {list(wanted)} in {np.dtype(self.dtype)}")


def extend_routing_record(known: np.ndarray | None, longer: np.ndarray | None) -> np.ndarray | None:
    """Return the record after another turn. Earlier tokens keep the experts of the turn that sampled or first read them."""
    if known is None or longer is None:
        return longer
    return np.concatenate([known, longer[len(known) :]])
