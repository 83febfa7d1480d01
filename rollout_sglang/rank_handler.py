"""Inside the engine's scheduler process: receive bytes into live parameters, hash them, describe them.

Requests come over SGLang's `/weights_checker` endpoint, whose handler `rollout_sglang.hooks.registry` wraps: an `action` that starts with
`PREFIX` is ours and carries JSON. Every engine rank answers with a mapping of strings. No pickles, no code in requests.

    {"verb": "ping"}
    {"verb": "describe"}                                       name -> "dtype rows cols"
    {"verb": "scale_formats"}                                  module -> format of its activation scales, FP8 and INT8 modules only
    {"verb": "graph"}                                          "graph" -> the precision graph of this rank, JSON
    {"verb": "connect", "link": {...}, "staged": BOOL, "ranks": {"0": [CHUNK, ...]}}      see parallel.transport.base
    {"verb": "start", "hashing": BOOL}                         receiving begins, in the background
    {"verb": "finish", "hashing": BOOL}                        index of a chunk -> digest; the live parameters hold the new bytes
    {"verb": "disconnect"}
    {"verb": "digest", "ranks": {"0": [[name, row, col, rows, cols], ...]}}      index -> digest
    {"verb": "release"}                                        the KV cache's memory is given back (`rollout_sglang.memory_release`)
    {"verb": "restore"}                                        and taken again
    {"verb": "tap"}                                            begins to record what operators give (`rollout_sglang.activation_hooks`)
    {"verb": "untap", "folder": PATH}                          "file" -> what was recorded
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.chunking import Chunk
from parallel.digest import digest_all
from parallel.shards import Rect
from parallel.transport.base import Link
from rollout_sglang import activation_hooks, memory_release, precision_graph
from rollout_sglang.hooks import dequant_cache as values
from rollout_sglang.hooks import gpu_activation_quant
from rollout_sglang.weight_receiver import WeightReceiver

PREFIX = "megatron_rl:"
FAILED = "megatron_rl failed"
"""An answer under this name says why a rank has no other."""

_receiver: WeightReceiver | None = None
"""This process's connection to the trainer; a new one replaces it."""


def handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Wraps SGLang's WeightChecker.handle; actions without our prefix go on to it."""
    if not action.startswith(PREFIX):
        return original(checker, action, *args, **kwargs)
    rank = checker._placement["tp_rank"]
    try:
        answers = answer(json.loads(action.removeprefix(PREFIX)), rank, checker._get_model())
    except Exception as error:  # SGLang's ranks gather their answers: a rank that raised would leave the others waiting
        traceback.print_exc()
        answers = {FAILED: f"{type(error).__name__}: {error}"}
    placement = {key: value for key, value in checker._placement.items() if value is not None}
    parallelism = {"role": kwargs.get("role", "target"), **placement, "rank": rank, "size": placement["tp_size"]}
    return {"checksums": answers, "parallelism_info": parallelism}


def answer(request: dict[str, Any], rank: int, model: torch.nn.Module) -> dict[str, str]:
    """This rank's answer to one of our requests. Raises ValueError for a request that does not fit, or what the transport raises."""
    global _receiver
    verb = request["verb"]
    if verb == "ping":
        return {}
    tensors = live_tensors(model)
    mine = request.get("ranks", {}).get(str(rank), [])
    if verb == "describe":
        return {name: " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]) for name, tensor in tensors.items()}
    if verb == "scale_formats":
        return activation_scale_formats(model)
    if verb == "graph":
        return {"graph": json.dumps(precision_graph.read_rank_graph(model, activation_scale_formats(model)).to_json())}
    if verb == "digest":
        values.clear_cache()  # what is served next is made from the bytes hashed here
        return _numbered(digest_all(tensors, [(name, Rect(*rect)) for name, *rect in mine]))
    if verb == "release":
        memory_release.release(precision_graph.get_model_runner().token_to_kv_pool)
        return {}
    if verb == "restore":
        memory_release.restore()
        return {}
    if verb in ("tap", "untap"):
        return activation_hooks.handle_request(request, rank, model)
    if verb in ("connect", "disconnect"):
        if _receiver is not None:
            _receiver.close()
        _receiver = None
        if verb == "connect":
            chunks = [Chunk.from_json(rank, told) for told in mine]
            _receiver = WeightReceiver(Link(**request["link"]), rank, chunks, tensors, request["staged"])
        return {}
    if verb not in ("start", "finish"):
        raise ValueError(f"unknown verb {verb!r}")
    if _receiver is None:
        raise ValueError("the trainer is not connected")
    if verb == "start":
        _receiver.start(tensors, request["hashing"])
        return {}
    found = _receiver.finish(tensors, request["hashing"])
    values.clear_cache()  # what is served next is made from the bytes just written
    return _numbered(found)


def _numbered(values: Sequence[str]) -> dict[str, str]:
    return {str(index): value for index, value in enumerate(values)}


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights a model serves from, by name, each by rows: what SGLang keeps transposed for a kernel (INT8 on a GPU) is shown as it
    was before. Shared parameters appear once.

    Left out are the scales of an FP8 KV cache, which SGLang makes for MLA although the cache is in the model's dtype.
    """
    return {
        name: _by_rows(parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.dim() > 0 or not name.endswith((".k_scale", ".v_scale"))
    }


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix whose columns lie side by side, as its transposed view; what is written there is written to it."""
    transposed = tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return tensor.t() if transposed else tensor


def activation_scale_formats(model: torch.nn.Module) -> dict[str, str]:
    """What the live linear layers and experts will really quantise activations with: FP8 with "pow2" or "fp32" scales, read from what
    they run, or "int8" per token, which is all that SGLang's INT8 layers know. Words that say so where the quantiser is another."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ in ("W8A8Int8LinearMethod", "W8A8Int8MoEMethod"):
            found[name] = "int8"
        elif hasattr(module, "w13_weight_scale_inv"):
            found[name] = gpu_activation_quant.read_expert_scale_format(method, module)
        elif getattr(method, "w8a8_block_fp8_linear", None) is not None:
            found[name] = gpu_activation_quant.read_linear_scale_format(method, module)
    return found
