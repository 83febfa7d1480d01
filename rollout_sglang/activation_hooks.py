"""Records, inside a scheduler process, what the engine's operators give for the tokens that it serves. Off until it is asked for.

What was recorded is written into one file, token by token in the order of serving: `requests` (SGLang's slot of the request),
`positions` and `tokens` int64 [T]; `logit_rows`, the tokens that have logits; and operator -> [T, columns].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.precision.graph.activation_hooks import HookPoint, attach_hooks

MAX_RECORDED_BYTES = 1 << 30
"""Bytes that a scheduler process keeps at most; it stops recording before."""

_LAYER = "model.layers.*."
HOOK_POINTS = (
    HookPoint("model.embed_tokens", "embedding"),
    HookPoint(f"{_LAYER}self_attn.qkv_proj", "layers.*.input_norm", argument=0),
    HookPoint(f"{_LAYER}self_attn.qkv_proj", "layers.*.attention.qkv"),
    HookPoint(f"{_LAYER}self_attn.q_norm", "layers.*.attention.q_norm"),
    HookPoint(f"{_LAYER}self_attn.k_norm", "layers.*.attention.k_norm"),
    HookPoint(f"{_LAYER}self_attn.attn", "layers.*.attention.rope.q", argument=0),
    HookPoint(f"{_LAYER}self_attn.attn", "layers.*.attention.rope.k", argument=1),
    HookPoint(f"{_LAYER}self_attn.o_proj", "layers.*.attention.core", argument=0),
    HookPoint(f"{_LAYER}self_attn.o_proj", "layers.*.attention.output"),
    HookPoint(f"{_LAYER}mlp.gate_up_proj", "layers.*.post_attention_norm", argument=0),
    HookPoint(f"{_LAYER}mlp.gate", "layers.*.post_attention_norm", argument=0),
    HookPoint(f"{_LAYER}mlp.gate_up_proj", "layers.*.mlp.gate_up"),
    HookPoint(f"{_LAYER}mlp.down_proj", "layers.*.mlp.swiglu", argument=0),
    HookPoint(f"{_LAYER}mlp.down_proj", "layers.*.mlp.down"),
    HookPoint(f"{_LAYER}mlp", "layers.*.mlp"),
    HookPoint("logits_processor", "norm", argument=1),
)


class ActivationRecorder:
    """Hooks on one model."""

    def __init__(self, model: Any) -> None:
        self._passes: list[dict[str, torch.Tensor]] = []
        self._bytes = 0
        self._handles = [
            model.model.register_forward_pre_hook(self._begin),
            *attach_hooks(model, HOOK_POINTS, self._keep),
            model.logits_processor.register_forward_hook(lambda _, __, output: self._keep("lm_head", output.next_token_logits)),
        ]

    def _begin(self, _: Any, given: tuple[Any, ...]) -> None:
        """A forward pass: which tokens of which requests."""
        tokens, positions, batch = given[:3]
        lengths = torch.ones_like(batch.req_pool_indices) if batch.forward_mode.is_decode() else batch.extend_seq_lens
        self._passes.append({})
        self._keep("requests", batch.req_pool_indices.long().repeat_interleave(lengths.long()))
        self._keep("positions", positions.long())
        self._keep("tokens", tokens.long())
        self._keep("logit_rows", lengths.long().cumsum(0) - 1)

    def _keep(self, name: str, values: torch.Tensor) -> None:
        if not self._handles:  # stopped within this pass
            return
        if self._bytes + values.nbytes > MAX_RECORDED_BYTES:
            self.stop()
            self._passes.pop()  # half of a pass is of no use
            return
        now = self._passes[-1]
        rows = len(now["tokens"]) if "tokens" in now and name not in ("lm_head", "logit_rows") else len(values)
        now[name] = values.detach().reshape(rows, -1).squeeze(-1).cpu().clone()  # SGLang computes in place
        self._bytes += values.nbytes

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def write(self, file: Path) -> None:
        """Stops, and writes all that was recorded. Raises FileExistsError."""
        self.stop()
        if file.exists():
            raise FileExistsError(file)
        first = 0
        for one in self._passes:
            one["logit_rows"] += first
            first += len(one["tokens"])
        names = self._passes[0] if self._passes else {}
        save_file({name: torch.cat([one[name] for one in self._passes]) for name in names}, file)


_recorder: ActivationRecorder | None = None


def handle_request(request: dict[str, Any], rank: int, model: torch.nn.Module) -> dict[str, str]:
    """This rank's answer to {"verb": "tap"} and {"verb": "untap", "folder": PATH}. Raises ValueError where nothing was recorded."""
    global _recorder
    tapped, _recorder = _recorder, None
    if tapped is not None:
        tapped.stop()
    if request["verb"] == "tap":
        _recorder = ActivationRecorder(model)
        return {}
    if tapped is None:
        raise ValueError("nothing is recorded: ask for it first")
    file = Path(request["folder"]) / f"rank{rank}.safetensors"
    tapped.write(file)
    return {"file": str(file)}
