"""Reads which experts served each token from SGLang's answers (`return_routed_experts`).

SGLang keeps the router's choice beside every slot of its key-value cache, so that it is there for a prompt's tokens and for those that came
from the cache as well: a prefix has the routing of the request that computed it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.routing_record import RoutingShape


@dataclass(frozen=True)
class RoutedExpertsReader:
    """How SGLang writes it: int32 in base64, all layers of the model, row by row."""

    shape: RoutingShape

    @classmethod
    def from_checkpoint(cls, folder: Path) -> RoutedExpertsReader:
        return cls(RoutingShape.from_hf_config(read_config(folder)))

    def read(self, answer: dict[str, Any], tokens: int) -> np.ndarray:
        """The record (`megatron_rl.hf.routing_record`) of an answer with that many tokens, the prompt's included.

        Raises RunError where it has another size, or names what is no expert.
        """
        text = answer["meta_info"].get("routed_experts")
        if text is None:
            raise RunError("the engine answered without the routing that it was asked for (--enable-return-routed-experts)")
        values = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        rows = tokens - 1
        if values.size != rows * self.shape.num_layers * self.shape.top_k:
            wanted = f"{rows} rows of {self.shape.num_layers} layers and {self.shape.top_k} experts"
            raise RunError(f"the engine's routing of {tokens} tokens has {values.size} numbers, not {wanted}")
        if values.size and not 0 <= values.min() <= values.max() < self.shape.num_experts:  # before it is cut to bytes
            raise RunError(f"the engine's routing names experts {values.min()} to {values.max()} of {self.shape.num_experts}")
        return values.reshape(rows, self.shape.num_layers, self.shape.top_k).astype(self.shape.dtype)
