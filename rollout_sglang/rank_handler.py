"""Code inside the engine's scheduler process: receives bytes into live parameters, hashes them and describes them.

Requests arrive at SGLang's `/weights_checker` endpoint, whose ModelRunner method `rollout_sglang.hooks.registry` wraps. An `action` that
starts with `PREFIX` is ours and carries JSON. Every engine rank answers with a mapping of strings. Requests carry no pickles and no code.

    {"verb": "ping"}
    {"verb": "describe"}                   -> name: "dtype rows cols"
    {"verb": "activation_formats"}         -> module: format of its inputs, for quantized modules only
    {"verb": "graph"}                      -> "graph": the precision graph of this rank as JSON
    {"verb": "connect", "link": {...}, "staged": BOOL, "ranks": {"0": [CHUNK, ...]}}   see parallel.transport.base
    {"verb": "start", "hashing": BOOL, "places": null or {"0": [[offset, bytes], ...]}}   starts receiving in the background
    {"verb": "finish", "hashing": BOOL}    -> chunk index: digest; the live parameters hold the new bytes
    {"verb": "reread"}                     starts hashing the live parameters in the background
    {"verb": "reread digests"}             -> chunk index: digest, or "pending"
    {"verb": "served"}                     -> kind: number of tensors accounted for, or "wrong": the failure
    {"verb": "disconnect"}
    {"verb": "digest", "ranks": {"0": [[name, row, col, rows, cols], ...]}}   -> index: digest
    {"verb": "release"}                    frees the memory of the KV cache
    {"verb": "restore"}                    allocates it again
    {"verb": "tap"}                        starts recording the outputs of operators (`rollout_sglang.activation_hooks`)
    {"verb": "untap", "folder": PATH}      -> "file": the recording
"""

from __future__ import annotations

import ctypes
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from parallel.chunking import Chunk
from parallel.digest import digest_all
from parallel.formats import FP8, INT8
from parallel.shards import Rect
from parallel.transport.base import Link
from rollout_sglang import precision_graph
from rollout_sglang.activation_hooks import ActivationRecorder
from rollout_sglang.derived_tensors import ServedTensors
from rollout_sglang.hooks import dequant_cache, gpu_activation_quant, kv_cache_scales
from rollout_sglang.weight_receiver import WeightReceiver

PREFIX = "megatron_rl:"
FAILED = "megatron_rl failed"  # key of an answer that holds why a rank failed
PENDING = "pending"  # key of an answer of a rank that has not finished hashing


class RankHandler:
    """Answers the requests to one engine rank. `runner` is SGLang's ModelRunner."""

    _receiver: WeightReceiver | None = None
    """Connection to the trainer. A new connection replaces it."""
    _recorder: ActivationRecorder | None = None
    _served: ServedTensors | None = None

    def answer(self, request: dict[str, Any], rank: int, runner: Any) -> dict[str, str]:
        """Return the rank's answer to a request. Raise ValueError if the request is invalid. Errors of the transport are passed on."""
        model = runner.model
        match request["verb"]:
            case "ping":
                return {}
            case "describe":
                tensors = live_tensors(model).items()
                return {name: " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)]) for name, tensor in tensors}
            case "activation_formats":
                return read_activation_formats(model)
            case "graph":
                return {"graph": json.dumps(precision_graph.read_rank_graph(runner, read_activation_formats(model)).to_json())}
            case "digest":
                dequant_cache.clear_cache()  # the next values must be computed from the bytes hashed here
                named_rects = [(name, Rect(*rect)) for name, *rect in request["ranks"].get(str(rank), [])]
                return _number(digest_all(live_tensors(model), named_rects))
            case "reread":
                self._get_receiver().start_rereading(live_tensors(model))
            case "reread digests":
                digests = self._get_receiver().finish_rereading()
                return {PENDING: ""} if digests is None else _number(digests)
            case "served":
                return self._account(runner)
            case "release":
                release_cache(runner.token_to_kv_pool)
            case "restore":
                restore_cache()
            case "tap":
                if self._recorder is not None:
                    self._recorder.stop()
                self._recorder = ActivationRecorder(model)
            case "untap":
                return {"file": str(self._write_recording(Path(request["folder"]) / f"rank{rank}.safetensors"))}
            case "connect" | "disconnect":
                self._connect(request, rank, model)
            case "start":
                places = request["places"] and request["places"].get(str(rank), [])
                self._get_receiver().start(live_tensors(model), request["hashing"], places)
            case "finish":
                digests = self._get_receiver().finish(live_tensors(model), request["hashing"])
                dequant_cache.clear_cache()  # the next values must be computed from the bytes just written
                return _number(digests)
            case verb:
                raise ValueError(f"unknown verb {verb!r}")
        return {}

    def _write_recording(self, file: Path) -> Path:
        """Stop recording. Raise ValueError if nothing was recorded."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise ValueError("nothing is recorded: send tap first")
        recorder.write(file)
        return file

    def _connect(self, request: dict[str, Any], rank: int, model: torch.nn.Module) -> None:
        """Close this rank's connection to the trainer. For the verb `connect`, open a new one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        if request["verb"] == "connect":
            self._served = self._served or ServedTensors(model)
            chunks = [Chunk.from_json(rank, fields) for fields in request["ranks"].get(str(rank), [])]
            self._receiver = WeightReceiver(Link(**request["link"]), rank, chunks, live_tensors(model), request["staged"])

    def _account(self, runner: Any) -> dict[str, str]:
        """Check that the KV cache is empty and every tensor is accounted for."""
        allocator, receiver = runner.token_to_kv_pool_allocator, self._get_receiver()
        if cached := allocator.size - allocator.available_size():
            return {"wrong": f"the KV cache was not flushed: it holds {cached} tokens of the previous weights"}
        assert self._served is not None
        live = live_tensors(runner.model)
        try:
            kv_cache_scales.check_copies(runner.model)
            counts = self._served.check(runner.model, {name: live[name] for name in receiver.names})
        except ValueError as error:
            return {"wrong": str(error)}
        return {kind: str(count) for kind, count in counts.items()}

    def _get_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise ValueError("the trainer is not connected")
        return self._receiver


_handler = RankHandler()


def handle(original: Callable[..., Any], runner: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's ModelRunner.check_weights. Actions without our prefix are passed on."""
    if not action.startswith(PREFIX):
        return original(runner, action, *args, **kwargs)
    placement = runner._weight_checker._placement
    try:
        answers = _handler.answer(json.loads(action.removeprefix(PREFIX)), placement["tp_rank"], runner)
    except Exception as error:  # SGLang's ranks gather their answers, so a rank that raises would leave all other ranks waiting
        traceback.print_exc()
        answers = {FAILED: f"{type(error).__name__}: {error}"}
    parallelism = {"role": kwargs.get("role", "target"), **placement, "rank": placement["tp_rank"], "size": placement["tp_size"]}
    return {"checksums": answers, "parallelism_info": parallelism}


def _number(digests: Sequence[str]) -> dict[str, str]:
    return {str(index): digest for index, digest in enumerate(digests)}


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a model serves from, by name and by rows. Weights that SGLang keeps transposed for a kernel (INT8 on a
    GPU) are transposed back. Shared parameters appear once. SGLang's own scales of an FP8 KV cache, which are 1, are left out
    (`hooks.kv_cache_scales`)."""
    return {
        name: _by_rows(parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.dim() > 0 or not name.endswith((".k_scale", ".v_scale"))
    }


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix with contiguous columns as its transposed view, through which it can be written. Return other tensors unchanged."""
    transposed = tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return tensor.t() if transposed else tensor


def read_activation_formats(model: torch.nn.Module) -> dict[str, str]:
    """Return how live linear layers and experts quantize activations, as `str(TensorFormat)`, such as "fp8 pow2" or "fp8 fp32". FP8
    formats are read from the code that the layers run, with a description of the quantizer if it is not known. "int8 fp32" is the only
    format of SGLang's INT8 layers."""
    formats = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ in ("W8A8Int8LinearMethod", "W8A8Int8MoEMethod"):
            formats[name] = str(INT8)
        elif hasattr(module, "w13_weight_scale_inv"):
            formats[name] = str(FP8.with_scales(gpu_activation_quant.read_expert_scale_format(method, module)))
        elif getattr(method, "w8a8_block_fp8_linear", None) is not None:
            formats[name] = str(FP8.with_scales(gpu_activation_quant.read_linear_scale_format(method, module)))
    return formats


_KV_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA
_released: dict[torch.UntypedStorage, int] = {}  # released storages and their sizes in bytes


def release_cache(pool: Any) -> None:
    """Free the memory of SGLang's KV cache `pool` on a CPU while the trainer runs. Its content is lost.

    SGLang's own /release_memory_occupation needs torch_memory_saver, and thus CUDA. Here the storages are resized: the tensor objects stay
    and their memory is returned to the system. Weights are kept, because torch cannot resize their memory. Raise ValueError for an unknown
    kind of cache.
    """
    tensors = [tensor for name in _KV_BUFFERS for tensor in getattr(pool, name, None) or ()]
    if not tensors:
        raise ValueError(f"the KV cache {type(pool).__name__} has none of {', '.join(_KV_BUFFERS)}")
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.nbytes():  # not yet released: keys and values may share one storage
            _released[storage] = storage.nbytes()
            storage.resize_(0)
    ctypes.CDLL(None).malloc_trim(0)  # the engine's glibc keeps freed pages otherwise (`launch_args`)


def restore_cache() -> None:
    """Allocate the released memory again, zeroed: attention multiplies masked values by 0, and NaN would stay NaN."""
    while _released:
        storage, size = _released.popitem()
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
