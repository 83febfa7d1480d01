"""Records the outputs of the engine's operators inside a scheduler process, for the tokens that it serves. Off until requested.

A recording is one file with a row per token in the order of serving: `requests` (SGLang's slot of the request), `positions` and `tokens`,
int64 `[T]`; `logit_rows`, the rows of the tokens that have logits; and operator -> `[T, columns]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.precision.graph.activation_hooks import ENGINE, attach_hooks, layer_hook_points

MAX_RECORDED_BYTES = 1 << 30
"""Most bytes that a scheduler process records; recording stops before it would exceed them."""

HOOK_POINTS = (("embedding", None, "model.embed_tokens"), *layer_hook_points(ENGINE), ("norm", 1, "logits_processor"))


class ActivationRecorder:
    """Records the activations of one model with hooks."""

    def __init__(self, model: Any) -> None:
        self._passes: list[dict[str, torch.Tensor]] = []
        self._bytes = 0
        self._handles = [
            model.model.register_forward_pre_hook(self._begin),
            *attach_hooks(model, HOOK_POINTS, self._record),
            model.logits_processor.register_forward_hook(lambda _, __, output: self._record("lm_head", output.next_token_logits)),
        ]

    def _begin(self, _: Any, inputs: tuple[Any, ...]) -> None:
        """Record the tokens of a forward pass, with their requests and positions."""
        tokens, positions, batch = inputs[:3]
        lengths = torch.ones_like(batch.req_pool_indices) if batch.forward_mode.is_decode() else batch.extend_seq_lens
        self._passes.append({})
        self._record("requests", batch.req_pool_indices.long().repeat_interleave(lengths.long()))
        self._record("positions", positions.long())
        self._record("tokens", tokens.long())
        self._record("logit_rows", lengths.long().cumsum(0) - 1)

    def _record(self, name: str, values: torch.Tensor) -> None:
        if not self._handles:  # stopped within this pass
            return
        if self._bytes + values.nbytes > MAX_RECORDED_BYTES:
            self.stop()
            self._passes.pop()  # the incomplete pass
            return
        record = self._passes[-1]
        rows = len(record["tokens"]) if "tokens" in record and name not in ("lm_head", "logit_rows") else len(values)
        record[name] = values.detach().reshape(rows, -1).squeeze(-1).cpu().clone()  # SGLang computes in place
        self._bytes += values.nbytes

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def write(self, file: Path) -> None:
        """Stop recording and write `file`. Raise FileExistsError if it exists."""
        self.stop()
        if file.exists():
            raise FileExistsError(file)
        first = 0
        for record in self._passes:
            record["logit_rows"] += first
            first += len(record["tokens"])
        names = self._passes[0] if self._passes else {}
        save_file({name: torch.cat([record[name] for record in self._passes]) for name in names}, file)
