"""Code inside the engine's scheduler process, and the requests to it: receives bytes into live parameters, hashes and describes them.

Requests arrive at SGLang's `/weights_checker` endpoint, whose ModelRunner method `rollout_sglang.hooks.registry` wraps. An `action` that
starts with `PREFIX` is ours and carries JSON. Every engine rank answers with a mapping of strings. Requests carry no pickles and no code.

    {"verb": "ping"}
    {"verb": "describe"}                   -> name: "dtype rows cols"
    {"verb": "activation_formats"}         -> module: format of its inputs, for quantized modules only
    {"verb": "vocabulary"}                 -> "vocabulary": the fields of `megatron_rl.hf.vocabulary.Vocabulary` as JSON
    {"verb": "graph"}                      -> "graph": the precision graph of this rank as JSON
    {"verb": "connect", "link": {...}, "staged": BOOL, "ranks": {"0": CHUNKS}}   see parallel.transport.base, parallel.chunking
    {"verb": "start", "hashing": BOOL, "places": null or {"0": "[[offset, bytes], ...]"}}   starts receiving
    {"verb": "finish", "hashing": BOOL}    -> "root" (parallel.proof_root), and the live parameters hold the new bytes; or "pending"
    {"verb": "reread"}                     starts hashing the live parameters in the background
    {"verb": "reread digests"}             -> "root", or "pending"
    {"verb": "served"}                     -> "tensors", "bytes": size of the proved weights; kind: number of tensors of that kind; or
                                              "wrong": the failure. "copies": whether layers keep float values of weights
    {"verb": "copies"}                     -> "derived": number of weights whose float values were recomputed, or "wrong": the failure
    {"verb": "disconnect"}
    {"verb": "digest", "ranks": {"0": [[name, row, col, rows, cols], ...]}}   -> index: digest
    {"verb": "release"}                    frees the memory of the KV cache, which the system allocates again when it is used
    and those of `rollout_sglang.activation_recorder`
"""

from __future__ import annotations

import ctypes
import json
import mmap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_rl.hf.vocabulary import make_vocabulary
from megatron_rl.precision.graph.graph import GRAPH_JSON
from megatron_rl.rollout.engine import Places, Roots, ServedReport
from parallel.chunking import decode_chunks
from parallel.digest import digest_all
from parallel.formats import FP8, INT8
from parallel.plug import find_plug_error
from parallel.shards import NamedRect, Rect
from parallel.transport.base import Link
from rollout_sglang import activation_recorder, precision_graph
from rollout_sglang.derived_tensors import ServedTensors, refresh
from rollout_sglang.hooks import dequant_cache, e4m3_cache, gpu_activation_quant
from rollout_sglang.proved_regions import ProvedRegions, find_padding
from rollout_sglang.weight_receiver import WeightReceiver

PREFIX = "megatron_rl:"
FAILED = "megatron_rl failed"  # key of an answer that holds why a rank failed
REPEATABLE = {
    "ping", "describe", "activation_formats", "vocabulary", "graph", "digest", "finish", "reread", "reread digests", "served", "copies",
    "disconnect", "release",
}  # fmt: skip
"""Verbs of requests that may be sent twice. A second `connect`, `start`, `record`, or `stop recording` would end what the
first one began."""
PENDING = "pending"  # key of an answer of a rank that has not finished
_KV_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA
_CONVOLUTION = "conv1d.weight"
_EXPERT_BIASES = ("w13_weight_bias", "w2_weight_bias")
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.5


class RankHandler:
    """Answers the requests to one engine rank. `runner` is SGLang's ModelRunner."""

    _receiver: WeightReceiver | None = None  # connection to the trainer
    _regions: ProvedRegions | None = None  # of the same connection
    _served: ServedTensors | None = None
    _keeps_copies = False  # whether layers keep float values of quantized weights
    tokenizer: Any = None  # the scheduler's

    def __init__(self) -> None:
        self._recording = activation_recorder.RecordingRank()

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
            case "vocabulary":
                config = runner.model_config  # SGLang also ends at added tokens with some well-known names (`additional_stop_token_ids`)
                vocabulary = make_vocabulary(self.tokenizer, config.hf_eos_token_id, config.vocab_size)
                return {"vocabulary": json.dumps(asdict(vocabulary))}
            case "graph":
                graph = precision_graph.read_rank_graph(runner, read_activation_formats(model))
                return {"graph": GRAPH_JSON.dump_json(graph).decode()}
            case "digest":
                dequant_cache.clear_cache()  # the next values must be computed from the bytes hashed here
                named_rects = [(name, Rect(*rect)) for name, *rect in request["ranks"].get(str(rank), [])]
                return _number(digest_all(live_tensors(model), named_rects))
            case "reread":
                self._get_receiver().start_rereading(live_tensors(model))
            case "reread digests":
                digests = self._get_receiver().finish_rereading()
                return {PENDING: ""} if digests is None else {"root": json.dumps(digests)}
            case "served":
                return self._account(runner)
            case "copies":
                return self._check_copies(model)
            case "release":
                release_cache(runner.token_to_kv_pool)
            case verb if verb in activation_recorder.VERBS:
                return self._recording.answer(request, rank, runner)
            case "connect" | "disconnect":
                self._connect(request, rank, model)
            case "start":
                places = request["places"] and json.loads(request["places"][str(rank)])
                self._get_receiver().start(live_tensors(model), request["hashing"], places)
            case "finish":
                if (digests := self._get_receiver().finish(live_tensors(model), request["hashing"])) is None:
                    return {PENDING: ""}
                self._get_regions().fill_padding(live_tensors(model))
                dequant_cache.clear_cache()  # the next values must be computed from the bytes just written
                refresh(model)
                return {"root": json.dumps(digests)}
            case verb:
                raise ValueError(f"unknown verb {verb!r}")
        return {}

    def _connect(self, request: dict[str, Any], rank: int, model: torch.nn.Module) -> None:
        """Close this rank's connection to the trainer. For the verb `connect`, open a new one."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None
        if request["verb"] == "connect":
            self._served = self._served or ServedTensors(model)
            chunks, live = decode_chunks(rank, request["ranks"][str(rank)]), live_tensors(model)
            self._receiver = WeightReceiver(Link(**request["link"]), rank, chunks, live, request["staged"])
            self._regions = ProvedRegions(chunks, live, find_padding(model))
            self._keeps_copies = next(iter(live.values())).device.type == "cpu" and bool(read_activation_formats(model))

    def _account(self, runner: Any) -> dict[str, str]:
        """Check that the KV cache is empty, the sync has written every byte of the weights, and every tensor is accounted for."""
        allocator = runner.token_to_kv_pool_allocator
        if cached := allocator.size - allocator.available_size():
            return {"wrong": f"the KV cache was not flushed: it holds {cached} tokens of the previous weights"}
        states = getattr(runner.req_to_token_pool, "mamba_allocator", None)
        if states is not None and (cached := states.size - states.available_size()):
            return {"wrong": f"recurrent states were not flushed: {cached} slots hold states of the previous weights"}
        assert self._served is not None
        live = live_tensors(runner.model)
        try:
            size = self._get_regions().check(live)
            precision_graph.check_scale_values(runner.model)
            e4m3_cache.check_copies(runner.model)
            counts = self._served.check(runner.model, live)
        except ValueError as error:
            return {"wrong": str(error)}
        found = {"tensors": size.tensors, "bytes": size.nbytes, "copies": int(self._keeps_copies), **counts}
        return {kind: str(count) for kind, count in found.items()}

    def _check_copies(self, model: torch.nn.Module) -> dict[str, str]:
        """Check the float values that layers on a CPU have kept since they computed with the last sync's weights."""
        self._get_receiver()
        assert self._served is not None
        try:
            return {"derived": str(self._served.check_copies(live_tensors(model)))}
        except ValueError as error:
            return {"wrong": str(error)}

    def _get_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise ValueError("the trainer is not connected")
        return self._receiver

    def _get_regions(self) -> ProvedRegions:
        self._get_receiver()
        assert self._regions is not None
        return self._regions


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
        named = error if isinstance(error, OSError) else find_plug_error(error) or error  # a lost connection stays one
        answers = {FAILED: f"{type(named).__name__}: {named}"}
    parallelism = {"role": kwargs.get("role", "target"), **placement, "rank": placement["tp_rank"], "size": placement["tp_size"]}
    return {"checksums": answers, "parallelism_info": parallelism}


def remember_tokenizer(original: Callable[..., None], scheduler: Any) -> None:
    """Wrap SGLang's Scheduler.init_tokenizer."""
    original(scheduler)
    _handler.tokenizer = scheduler.tokenizer


def _number(digests: Sequence[str]) -> dict[str, str]:
    return {str(index): digest for index, digest in enumerate(digests)}


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a model serves from, by name. Weights that SGLang keeps transposed for a kernel (INT8 on a GPU) are
    transposed back; those of a convolution of single channels `[channels, 1, taps]` are matrices, biases of experts `[experts, n]` one
    vector. Shared parameters appear once. SGLang's own scales of an FP8 KV cache are left out (`hooks.e4m3_cache`)."""
    return {
        name: _by_rows(_flatten(name, parameter.detach()))
        for name, parameter in model.named_parameters()
        if parameter.dim() > 0 or not name.endswith((".k_scale", ".v_scale"))
    }


def _flatten(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(1) if name.endswith(_CONVOLUTION) else tensor.view(-1) if name.endswith(_EXPERT_BIASES) else tensor


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix with contiguous columns as its transposed view, through which it can be written. Return other tensors unchanged."""
    transposed = tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return tensor.t() if transposed else tensor


def read_activation_formats(model: torch.nn.Module) -> dict[str, str]:
    """Return how live linear layers and experts quantize activations, as `str(TensorFormat)`, such as "fp8 pow2" or "int8 fp32". FP8
    formats are read from the code that the layers run, with a description of the quantizer if it is not known."""
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


def release_cache(pool: Any) -> None:
    """Free the memory of SGLang's KV cache `pool`, and of recurrent states, on a CPU, where SGLang's own way does not work. The system
    allocates a page again, zeroed, when it is used: attention multiplies masked values by 0, and NaN would stay NaN. Weights are kept.
    Raise ValueError for an unknown kind of cache."""
    attention = e4m3_cache.get_attention_pool(pool)
    tensors = [tensor for name in _KV_BUFFERS for tensor in getattr(attention, name, None) or ()]
    if not tensors:
        raise ValueError(f"the KV cache {type(attention).__name__} has none of {', '.join(_KV_BUFFERS)}")
    if attention is not pool:
        tensors += [*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal]
    for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():  # some share one
        _discard(torch.empty(0, dtype=torch.uint8).set_(storage))
    ctypes.CDLL(None).malloc_trim(0)  # the engine's glibc keeps freed pages otherwise (`launch_args`)


def _discard(memory: torch.Tensor) -> None:
    """Set `memory`, uint8 `[bytes]`, to 0 by giving its whole pages back to the system. Raise OSError if the system refuses."""
    start = memory.data_ptr()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE - start, (start + len(memory)) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if first >= last:
        memory.zero_()
        return
    memory[:first].zero_()
    memory[last:].zero_()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start + first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise refuses to free the KV cache")


class RankRequests:
    """The sync methods of `megatron_rl.rollout.engine.Engine`. A subclass implements the transfer of requests to the ranks."""

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """Send a request to every engine rank and return their answers in rank order. Raise RunError if a rank failed."""
        raise NotImplementedError

    def connect(self, link: Link, chunks: Mapping[int, str], staged: bool) -> None:
        ranks = {str(rank): text for rank, text in chunks.items()}
        self._ask_ranks({"verb": "connect", "link": asdict(link), "staged": staged, "ranks": ranks})

    def disconnect(self) -> None:
        self._ask_ranks({"verb": "disconnect"})

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        self._ask_ranks({"verb": "start", "hashing": hashing, "places": places and {str(rank): own for rank, own in places.items()}})

    def finish_receiving(self, hashing: bool) -> Roots:
        while True:
            answers = self._ask_ranks({"verb": "finish", "hashing": hashing})
            if not any(PENDING in answer for answer in answers):  # a rank waits for a moment before it answers so
                return _list_roots(answers)

    def start_rereading(self) -> None:
        self._ask_ranks({"verb": "reread"})

    def finish_rereading(self) -> Roots:
        seconds = _FIRST_POLL_SECONDS
        while True:
            answers = self._ask_ranks({"verb": "reread digests"})
            if not any(PENDING in answer for answer in answers):
                return _list_roots(answers)
            time.sleep(seconds)  # running requests share the engine's time with these polls
            seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        ranks = {str(rank): [[name, *rect] for name, rect in named_rects] for rank, named_rects in rects_by_rank.items()}
        answers = self._ask_ranks({"verb": "digest", "ranks": ranks})
        return {rank: [answers[rank][str(index)] for index in range(len(named_rects))] for rank, named_rects in rects_by_rank.items()}

    def account_for_tensors(self) -> list[ServedReport]:
        return [
            ServedReport(wrong=rank["wrong"])
            if "wrong" in rank
            else ServedReport(int(rank["derived"]), "", int(rank["tensors"]), int(rank["bytes"]), rank["copies"] == "1")
            for rank in self._ask_ranks({"verb": "served"})
        ]

    def check_copies(self) -> list[ServedReport]:
        answers = self._ask_ranks({"verb": "copies"})
        return [ServedReport(wrong=rank["wrong"]) if "wrong" in rank else ServedReport(int(rank["derived"])) for rank in answers]


def _list_roots(answers: list[dict[str, str]]) -> Roots:
    return {rank: json.loads(answer["root"]) for rank, answer in enumerate(answers)}
