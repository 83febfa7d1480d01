"""Records the results of the trainer's operators for one sequence, in the engine's order of columns, in any layout of the trainer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.base.names import global_name, override
from megatron_rl.precision.activation_hooks import TRAINER, HookPoint, RankHeads, attach_hooks, list_hook_points, number_columns
from megatron_rl.precision.sketch import RowRecorder


class ActivationRecorder:
    """Records this rank's part of a sequence, which is the only sample of a pass. Ranks that hold copies of a value record it once."""

    def __init__(self, policy: Policy, noise: bool = False) -> None:
        """With `noise`, every result of a module changes by a random number of up to one unit in the last place of its dtype, relative to
        the larger of its magnitude and its row's root mean square."""
        config = policy.chunks[0].config
        latent = bool(config.multi_latent_attention)
        keys = 1 if latent else config.num_query_groups
        self._others: tuple[str, ...] = (".q_norm",) if latent else (".q_a", ".q_a_norm")
        group = parallel_state.get_tensor_model_parallel_group()
        self._per_head = 1 + bool(config.attention_output_gate)  # with a gate, a head has twice the rows of queries
        self.heads = RankHeads(group.rank(), group.size(), config.num_attention_heads * self._per_head, keys)
        self.rows, self._noise, self._group = RowRecorder(), noise, group
        self._is_copy = parallel_state.get_data_parallel_rank() > 0
        self._tokens = torch.empty(0, dtype=torch.long)  # of this rank's positions; -1 for padding

    def begin_pass(self, tokens: torch.Tensor) -> None:
        """Begin a pass of this rank's positions, int64 `[t / cp]`."""
        self._tokens = tokens.cpu()
        self.rows.total = 0  # one pass at most, but with one call per virtual stage
        self.rows.begin_pass(int(parallel_state.get_context_parallel_world_size()) * len(tokens))

    def record(self, op: str, point: HookPoint, tensor: torch.Tensor) -> torch.Tensor | None:
        """Record a result `[t, 1, ...]`, `[t, ...]`, or under sequence parallelism its part `[t / tp, ...]`."""
        if op == "layers.0.input" or op.endswith(self._others):
            return None  # the embedding, and operators of the other kind of attention, whose modules have the same names
        kind, rank = "whole" if point.columns == "sum" else point.columns, self.heads.rank
        parts = len(self._tokens) // max(len(tensor), 1)
        own = self._tokens.chunk(parts)[rank] if parts > 1 else self._tokens
        x = tensor.flatten(1)
        heads = self.heads if parts <= 1 else self.heads._replace(rank=0)  # under sequence parallelism, every rank has rows of its own
        columns = self._number_mixed(x.shape[1]) if kind == "qkv" else number_columns(kind, x.shape[1], heads)
        if columns is not None:
            self._add(op, own, x, columns)
        return self._disturb(op, tensor) if self._noise and point.place == "out" and tensor.dim() and not op.endswith("router") else None

    def record_logits(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the logits of the scored positions, which the output layer computes again."""
        if layer._scored is None:
            return
        positions, *_ = layer._scored
        hidden = gather_from_sequence_parallel_region(inputs[0], group=self._group) if layer.sequence_parallel else inputs[0]
        weight = inputs[1] if len(inputs) > 1 and inputs[1] is not None else layer.weight
        logits = invariant_matmul(hidden[:, 0].index_select(0, positions), weight)
        columns = number_columns("split", logits.shape[1], self.heads)
        assert columns is not None
        self._add("lm_head", self._tokens[positions.cpu()], logits, columns)

    def _add(self, op: str, tokens: torch.Tensor, x: torch.Tensor, columns: torch.Tensor) -> None:
        kept = tokens >= 0
        if not self._is_copy:
            self.rows.add(op, tokens[kept], x.detach()[kept.to(x.device)], columns)

    def _number_mixed(self, width: int) -> torch.Tensor:
        """Return the numbers of this rank's columns of qkv. Megatron holds [q heads | gates | k | v] of each key-value head, and
        the engine each gate after its q head."""
        _, size, queries, keys = self.heads
        order = torch.arange(width * size).unflatten(0, (queries + 2 * keys, -1))
        q, k, v = order.split([queries, keys, keys])
        q = q.unflatten(0, (keys, -1, self._per_head)).transpose(1, 2).flatten(1, 2)
        mixed = torch.cat([q, k.unsqueeze(1), v.unsqueeze(1)], 1)
        return mixed.flatten().chunk(size)[self.heads.rank]

    def _disturb(self, op: str, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(op.encode()))  # ranks that hold copies of a value disturb it equally
        draws = torch.rand(x.shape, generator=generator).to(x.device) * 2 - 1
        scale = torch.maximum(x.abs().float(), x.float().square().mean(-1, keepdim=True).sqrt())
        return (x.float() + draws * scale * torch.finfo(x.dtype).eps).to(x.dtype)


@contextmanager
def record_activations(policy: Policy, noise: bool = False) -> Iterator[ActivationRecorder]:
    """Context manager that records the next pass of a policy over one sample. Under model parallelism, every rank records its part."""
    recorder, forward = ActivationRecorder(policy, noise), policy._forward

    def begin_and_forward(chunk: Any, batch: Any, shard: Any, *rest: Any) -> torch.Tensor:
        recorder.begin_pass(shard.select(batch.token_indices)[0])
        return forward(chunk, batch, shard, *rest)

    with ExitStack() as hooks, override([policy], "_forward", begin_and_forward), policy.routing.disable_replay(), torch.no_grad():
        for chunk in policy.chunks:
            names = [name for name, _ in chunk.named_modules() if not name.startswith("mtp") and "local_experts" not in name]
            modules = [(global_name(chunk, name), chunk.get_submodule(name)) for name in names if name != "decoder.layers"]
            for hook in attach_hooks(modules, list_hook_points(TRAINER), recorder.record):
                hooks.callback(hook.remove)
            if chunk.post_process:
                hooks.callback(chunk.output_layer.register_forward_hook(recorder.record_logits).remove)
        yield recorder
