"""Inside the engine's scheduler process: write raw bytes into live parameters, hash them, describe them.

Requests come over SGLang's `/weights_checker` endpoint, whose handler `rollout_sglang.plugin` wraps: an `action` that starts with
`PREFIX` is ours and carries JSON. Every engine rank answers with a mapping of strings. No pickles, no code in requests.

    {"verb": "describe"}                                              name -> "dtype rows cols"
    {"verb": "scale_formats"}                                         module -> format of its activation scales, FP8 modules only
    {"verb": "write", "segment": PATH, "ranks": {"0": [[name, row, rows, row_bytes, offset], ...]}}
    {"verb": "digest", "ranks": {"0": [[name, row, col, rows, cols], ...]}}      index -> digest
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from typing import Any

import torch

from parallel.geometry import Rect
from parallel.regions import digest
from rollout_sglang import kernels

PREFIX = "megatron_rl:"


def handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Wraps SGLang's WeightChecker.handle; actions without our prefix go on to it."""
    if not action.startswith(PREFIX):
        return original(checker, action, *args, **kwargs)
    request = json.loads(action.removeprefix(PREFIX))
    tensors = live_tensors(checker._get_model())
    rank = checker._placement["tp_rank"]
    mine = request.get("ranks", {}).get(str(rank), [])
    if request["verb"] == "describe":
        answers = {name: " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]) for name, tensor in tensors.items()}
    elif request["verb"] == "scale_formats":
        answers = activation_scale_formats(checker._get_model())
    elif request["verb"] == "write":
        answers = {"written": str(write(tensors, request["segment"], mine))}
    elif request["verb"] == "digest":
        kernels.forget_values()  # what is served next is made from the bytes hashed here
        answers = {str(index): digest(tensors[name], Rect(*rect)) for index, (name, *rect) in enumerate(mine)}
    else:
        raise ValueError(f"unknown verb {request['verb']!r}")
    placement = {key: value for key, value in checker._placement.items() if value is not None}
    parallelism = {"role": kwargs.get("role", "target"), **placement, "rank": rank, "size": placement["tp_size"]}
    return {"checksums": answers, "parallelism_info": parallelism}


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights a model serves from, by name. Shared parameters appear once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def activation_scale_formats(model: torch.nn.Module) -> dict[str, str]:
    """What the live FP8 linear layers will really quantise activations with: "pow2" or "fp32", read from the callable they run."""
    found = {}
    for name, module in model.named_modules():
        linear = getattr(getattr(module, "quant_method", None), "w8a8_block_fp8_linear", None)
        if linear is not None:
            found[name] = "pow2" if getattr(linear, "keywords", {}).get("act_scale_ue8m0", False) else "fp32"
    return found


def write(tensors: dict[str, torch.Tensor], segment: str, slices: list[list[Any]]) -> int:
    """Copies slices [name, row, rows, row_bytes, offset] of a shared-memory file into live parameters; returns bytes written.

    Raises ValueError for an unknown name, or where a row's size or count does not fit, before that tensor is touched.
    """
    kernels.forget_values()
    total = 0
    with open(segment, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for name, row, rows, row_bytes, offset in slices:
            if name not in tensors:
                raise ValueError(f"the engine holds no parameter {name}")
            live = _byte_rows(name, tensors[name])
            if live.shape[1] != row_bytes or row + rows > live.shape[0]:
                raise ValueError(f"{name} holds {list(live.shape)} bytes, cannot write rows {row}..{row + rows} of {row_bytes} bytes")
            # from bytes: a tensor over the map itself would keep it open
            source = torch.frombuffer(bytearray(memory[offset : offset + rows * row_bytes]), dtype=torch.uint8)
            live[row : row + rows] = source.view(rows, row_bytes).to(live.device)
            total += rows * row_bytes
    return total


def _byte_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's storage as uint8 [rows, bytes per row]; a vector has one element per row, experts stand one below the other."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous in the engine; its bytes cannot be written in place")
    return tensor.view(-1, tensor.shape[-1] if tensor.dim() > 1 else 1).view(torch.uint8)
