"""Code inside the engine's scheduler process, and the requests to it: receives bytes into live parameters, hashes and describes them.

Requests arrive at SGLang's `/weights_checker` endpoint, whose ModelRunner method `rollout_sglang.hooks.registry` wraps. An `action` that
starts with `PREFIX` is ours and carries JSON. Every engine rank answers with a mapping of strings. Requests carry no pickles and no code.

    {"verb": "ping"}
    {"verb": "describe"}                   -> name: "dtype rows cols"
    {"verb": "activation_formats"}         -> module: format of its inputs, for quantized modules only
    {"verb": "vocabulary"}                 -> "vocabulary": the fields of `megatron_rl.hf.vocabulary.Vocabulary` as JSON
    {"verb": "graph"}                      -> "graph": the precision graph of this rank as JSON
    {"verb": "connect", "link": {...}, "staged": BOOL, "ranks": {"0": [CHUNK, ...]}}   see parallel.transport.base
    {"verb": "start", "hashing": BOOL, "places": null or {"0": [[offset, bytes], ...]}}   starts receiving in the background
    {"verb": "finish", "hashing": BOOL}    -> chunk index: digest, and the live parameters hold the new bytes; or "pending"
    {"verb": "reread"}                     starts hashing the live parameters in the background
    {"verb": "reread digests"}             -> chunk index: digest, or "pending"
    {"verb": "served"}                     -> kind: number of tensors accounted for, or "wrong": the failure
    {"verb": "disconnect"}
    {"verb": "digest", "ranks": {"0": [[name, row, col, rows, cols], ...]}}   -> index: digest
    {"verb": "release"}                    frees the memory of the KV cache
    {"verb": "resume"}                     allocates it again
    {"verb": "tap"}                        starts recording the outputs of operators (`ActivationRecorder`)
    {"verb": "untap", "folder": PATH}      -> "file": the recording
"""

from __future__ import annotations

import ctypes
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.hf.vocabulary import make_vocabulary
from megatron_rl.precision.activation_hooks import ENGINE, attach_hooks, layer_hook_points
from megatron_rl.precision.graph.graph import GRAPH_JSON
from megatron_rl.rollout.engine import Places, ServedReport
from parallel.chunking import Chunk
from parallel.digest import digest_all
from parallel.formats import FP8, INT8
from parallel.shards import NamedRect, Rect
from parallel.transport.base import Link
from rollout_sglang import precision_graph
from rollout_sglang.derived_tensors import ServedTensors, refresh
from rollout_sglang.hooks import dequant_cache, e4m3_cache, gpu_activation_quant
from rollout_sglang.weight_receiver import WeightReceiver

PREFIX = "megatron_rl:"
FAILED = "megatron_rl failed"  # key of an answer that holds why a rank failed
PENDING = "pending"  # key of an answer of a rank that has not finished
_KV_BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA
_CONVOLUTION = "conv1d.weight"
_released: dict[torch.UntypedStorage, int] = {}  # released storages and their sizes in bytes
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.5
MAX_RECORDED_BYTES = 1 << 30  # recording stops before it would exceed them
HOOK_POINTS = (("embedding", None, "model.embed_tokens"), *layer_hook_points(ENGINE), ("norm", 1, "logits_processor"))


class RankHandler:
    """Answers the requests to one engine rank. `runner` is SGLang's ModelRunner."""

    _receiver: WeightReceiver | None = None  # connection to the trainer
    _recorder: ActivationRecorder | None = None
    _served: ServedTensors | None = None
    tokenizer: Any = None  # the scheduler's

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
                return {PENDING: ""} if digests is None else _number(digests)
            case "served":
                return self._account(runner)
            case "release":
                release_cache(runner.token_to_kv_pool)
            case "resume":
                restore_cache()
            case "tap":
                if self._recorder is not None:
                    self._recorder.stop()
                self._recorder = ActivationRecorder(model)
            case "untap":
                file, recorder, self._recorder = Path(request["folder"]) / f"rank{rank}.safetensors", self._recorder, None
                if recorder is None:
                    raise ValueError("nothing is recorded: send tap first")
                recorder.write(file)
                return {"file": str(file)}
            case "connect" | "disconnect":
                self._connect(request, rank, model)
            case "start":
                places = request["places"] and request["places"].get(str(rank), [])
                self._get_receiver().start(live_tensors(model), request["hashing"], places)
            case "finish":
                if (digests := self._get_receiver().finish(live_tensors(model), request["hashing"])) is None:
                    return {PENDING: ""}
                dequant_cache.clear_cache()  # the next values must be computed from the bytes just written
                refresh(model)
                return _number(digests)
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
            chunks = [Chunk.from_json(rank, fields) for fields in request["ranks"].get(str(rank), [])]
            self._receiver = WeightReceiver(Link(**request["link"]), rank, chunks, live_tensors(model), request["staged"])

    def _account(self, runner: Any) -> dict[str, str]:
        """Check that the KV cache is empty and every tensor is accounted for."""
        allocator, receiver = runner.token_to_kv_pool_allocator, self._get_receiver()
        if cached := allocator.size - allocator.available_size():
            return {"wrong": f"the KV cache was not flushed: it holds {cached} tokens of the previous weights"}
        states = getattr(runner.req_to_token_pool, "mamba_allocator", None)
        if states is not None and (cached := states.size - states.available_size()):
            return {"wrong": f"recurrent states were not flushed: {cached} slots hold states of the previous weights"}
        assert self._served is not None
        live = live_tensors(runner.model)
        try:
            e4m3_cache.check_copies(runner.model)
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


def remember_tokenizer(original: Callable[..., None], scheduler: Any) -> None:
    """Wrap SGLang's Scheduler.init_tokenizer."""
    original(scheduler)
    _handler.tokenizer = scheduler.tokenizer


def _number(digests: Sequence[str]) -> dict[str, str]:
    return {str(index): digest for index, digest in enumerate(digests)}


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that a model serves from, by name. Weights that SGLang keeps transposed for a kernel (INT8 on a GPU) are
    transposed back; those of a convolution of single channels `[channels, 1, taps]` are matrices. Shared parameters appear once. SGLang's
    own scales of an FP8 KV cache are left out (`hooks.e4m3_cache`)."""
    return {
        name: _by_rows(parameter.detach().squeeze(1) if name.endswith(_CONVOLUTION) else parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.dim() > 0 or not name.endswith((".k_scale", ".v_scale"))
    }


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
    """Free the memory of SGLang's KV cache `pool`, and of recurrent states, on a CPU, where SGLang's own way does not work. The tensor
    objects stay, with resized storages. Weights are kept, because torch cannot resize their memory. Raise ValueError for an unknown kind of
    cache."""
    attention = e4m3_cache.get_attention_pool(pool)
    tensors = [tensor for name in _KV_BUFFERS for tensor in getattr(attention, name, None) or ()]
    if not tensors:
        raise ValueError(f"the KV cache {type(attention).__name__} has none of {', '.join(_KV_BUFFERS)}")
    if attention is not pool:
        tensors += [*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal]
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


class RankRequests:
    """The sync methods of `megatron_rl.rollout.engine.Engine`. A subclass implements the transfer of requests to the ranks."""

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """Send a request to every engine rank and return their answers in rank order. Raise RunError if a rank failed."""
        raise NotImplementedError

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        ranks: dict[str, list[Any]] = {}
        for chunk in chunks:
            ranks.setdefault(str(chunk.target), []).append(chunk.to_json())
        self._ask_ranks({"verb": "connect", "link": asdict(link), "staged": staged, "ranks": ranks})

    def disconnect(self) -> None:
        self._ask_ranks({"verb": "disconnect"})

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        self._ask_ranks({"verb": "start", "hashing": hashing, "places": places and {str(rank): own for rank, own in places.items()}})

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        while True:
            answers = self._ask_ranks({"verb": "finish", "hashing": hashing})
            if not any(PENDING in answer for answer in answers):  # a rank waits for a moment before it answers so
                return _list_digests(answers)

    def start_rereading(self) -> None:
        self._ask_ranks({"verb": "reread"})

    def finish_rereading(self) -> dict[int, list[str]]:
        seconds = _FIRST_POLL_SECONDS
        while True:
            answers = self._ask_ranks({"verb": "reread digests"})
            if not any(PENDING in answer for answer in answers):
                return _list_digests(answers)
            time.sleep(seconds)  # running requests share the engine's time with these polls
            seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        ranks = {str(rank): [[name, *rect] for name, rect in named_rects] for rank, named_rects in rects_by_rank.items()}
        answers = self._ask_ranks({"verb": "digest", "ranks": ranks})
        return {rank: [answers[rank][str(index)] for index in range(len(named_rects))] for rank, named_rects in rects_by_rank.items()}

    def account_for_tensors(self) -> list[ServedReport]:
        answers = self._ask_ranks({"verb": "served"})
        return [ServedReport(wrong=rank["wrong"]) if "wrong" in rank else ServedReport(int(rank["derived"])) for rank in answers]

    def tap(self) -> None:
        """Start recording the outputs of operators on every rank."""
        self._ask_ranks({"verb": "tap"})

    def untap(self, folder: Path) -> list[Path]:
        """Stop recording and return the files, which the ranks write into this folder on the engine's machine."""
        return [Path(answer["file"]) for answer in self._ask_ranks({"verb": "untap", "folder": str(folder)})]


def _list_digests(answers: list[dict[str, str]]) -> dict[int, list[str]]:
    return {rank: [digests[str(index)] for index in range(len(digests))] for rank, digests in enumerate(answers)}


class ActivationRecorder:
    """Records the outputs of a model's operators: a file with a row per token in the order of serving. `requests` (SGLang's slot of the
    request), `positions` and `tokens`, int64 `[T]`; `logit_rows`, the rows of the tokens that have logits; operator -> `[T, columns]`."""

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
        if self._handles and self._bytes + values.nbytes > MAX_RECORDED_BYTES:
            self.stop()
            self._passes.pop()  # the incomplete pass
        if not self._handles:
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
