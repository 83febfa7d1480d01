"""Records what the operators of a live engine compute, on demand, in its scheduler processes (`megatron_rl.diagnosis.locate`).

Requests, as in `rollout_sglang.rank_handler`:

    {"verb": "record"}                                  starts recording on this rank; a previous recording is dropped
    {"verb": "recording", "ids": [...], "prompt": N}    -> "recording": sketches of this sequence's tokens, in base64
    {"verb": "recorded values", "op": OP, "token": N}   -> "columns", "values": this rank's part of a token of that sequence, as JSON
    {"verb": "stop recording"}
    {"verb": "stale"}                                   -> name of a derived tensor: how it differs from one that is derived anew
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl.precision.activation_hooks import ENGINE, HookPoint, RankHeads, attach_hooks, list_hook_points, number_columns
from megatron_rl.precision.sketch import Recording, RowRecorder, Values, add_recordings, name_copy, pack_recording, unpack_recording
from rollout_sglang import derived_tensors
from rollout_sglang.hooks import tree_reduction

VERBS = ("record", "recording", "recorded values", "stop recording", "stale")


class ActivationRecorder:
    """Records every forward pass of one rank's model until `stop`."""

    def __init__(self, model: Any, rank: int, size: int) -> None:
        config = model.config
        keys = 1 if getattr(config, "kv_lora_rank", None) else config.num_key_value_heads
        per_head = 1 + any(getattr(module, "attn_output_gate", False) for module in model.modules())
        self._heads = RankHeads(rank, size, config.num_attention_heads * per_head, keys)
        self._sums_are_whole = size == 1 or tree_reduction.sums_by_tree() or tree_reduction.count_slices(size) > 0
        self._rows = RowRecorder()
        self._tokens: list[tuple[int, int, int]] = []  # of every row: SGLang's slot of the request, position, token
        self._sequence = torch.empty(0, dtype=torch.long)  # rows of the sequence that was asked for last
        self._handles = [
            model.model.register_forward_pre_hook(self._begin),
            *attach_hooks(model.named_modules(), list_hook_points(ENGINE), self._record),
            model.logits_processor.register_forward_hook(self._record_logits),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: Any, inputs: tuple[Any, ...]) -> None:
        """Begin a forward pass: note its tokens, with their requests and positions."""
        tokens, positions, batch = inputs[:3]
        lengths = torch.ones_like(batch.req_pool_indices) if batch.forward_mode.is_decode() else batch.extend_seq_lens
        requests = batch.req_pool_indices.repeat_interleave(lengths.long())
        self._tokens += zip(requests.tolist(), positions.tolist(), tokens.tolist(), strict=False)
        self._rows.begin_pass(len(requests))
        self._count, self._last = len(requests), lengths.long().cumsum(0).cpu() - 1

    def _record(self, op: str, point: HookPoint, tensor: torch.Tensor) -> None:
        kind = point.columns if point.columns != "sum" else "whole" if self._sums_are_whole else ""
        if not kind or not self._count:
            return
        x = tensor.detach().reshape(self._count, -1)
        columns = number_columns(kind, x.shape[1], self._heads)
        if columns is None and point.columns == "whole":  # rank 0 has the same values, unless something is wrong
            op, columns = name_copy(op, self._heads.rank), torch.arange(x.shape[1])
        if columns is not None:
            self._rows.add(op, torch.arange(self._count), x[:, : len(columns)], columns)

    def _record_logits(self, _: Any, __: Any, output: Any) -> None:
        logits = output.next_token_logits
        if logits is not None and self._heads.rank == 0:
            self._rows.add("lm_head", self._last, logits.detach(), torch.arange(logits.shape[1]))

    def read(self, ids: Sequence[int], prompt_tokens: int) -> Recording:
        """Return the recording of the tokens that were computed for a sequence, whose last token is no input. Tokens from the prefix cache
        and of CUDA graphs, which run no hooks, have none. Raise ValueError if no request had these tokens."""
        rows_of: dict[int, dict[int, int]] = {}
        streams = list[dict[int, int]]()
        for row, (request, position, _) in enumerate(self._tokens):
            if request not in rows_of or position <= max(rows_of[request]):  # a new request in the slot
                rows_of[request] = {}
                streams.append(rows_of[request])
            rows_of[request][position] = row
        for stream in reversed(streams):
            places = [position for position in stream if position < len(ids) - 1]
            if prompt_tokens - 1 in stream and all(self._tokens[stream[position]][2] == ids[position] for position in places):
                self._sequence = torch.tensor([stream.get(position, self._rows.total) for position in range(len(ids) - 1)])
                return self._rows.select(self._sequence)
        raise ValueError("no request with these tokens was recorded")

    def get_values(self, op: str, token: int) -> Values:
        return self._rows.get_values(op, int(self._sequence[token]))


class RecordingRank:
    """Answers one rank's requests about recordings."""

    _recorder: ActivationRecorder | None = None

    def answer(self, request: dict[str, Any], rank: int, runner: Any) -> dict[str, str]:
        """Return the rank's answer. Raise ValueError if nothing is recorded."""
        verb = request["verb"]
        if verb == "stale":
            return derived_tensors.find_stale(runner.model)
        if verb in ("record", "stop recording"):
            if self._recorder is not None:
                self._recorder.stop()
            self._recorder = (
                ActivationRecorder(runner.model, rank, runner._weight_checker._placement["tp_size"]) if verb == "record" else None
            )
            return {}
        if self._recorder is None:
            raise ValueError("nothing is recorded: send record first")
        if verb == "recording":
            return {"recording": base64.b64encode(pack_recording(self._recorder.read(request["ids"], request["prompt"]))).decode()}
        values = self._recorder.get_values(request["op"], request["token"])
        return {"columns": json.dumps(values.columns), "values": json.dumps(values.values)}


class RecordingRequests:
    """The methods of `megatron_rl.rollout.engine.RecordingEngine`. A subclass implements the transfer of requests to the ranks."""

    _ask_ranks: Callable[..., list[dict[str, str]]]

    def start_recording(self) -> None:
        self._ask_ranks({"verb": "record"})

    def read_recording(self, ids: Sequence[int], prompt_tokens: int) -> Recording:
        answers = self._ask_ranks({"verb": "recording", "ids": list(ids), "prompt": prompt_tokens})
        return add_recordings([unpack_recording(base64.b64decode(rank["recording"])) for rank in answers])

    def read_recorded_values(self, op: str, token: int) -> list[Values]:
        answers = self._ask_ranks({"verb": "recorded values", "op": op, "token": token})
        return [Values(json.loads(rank["columns"]), json.loads(rank["values"])) for rank in answers]

    def stop_recording(self) -> None:
        self._ask_ranks({"verb": "stop recording"})

    def find_stale_tensors(self) -> list[dict[str, str]]:
        return self._ask_ranks({"verb": "stale"})
