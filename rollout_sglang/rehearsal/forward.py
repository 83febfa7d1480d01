"""Runs a batch of prompts and a batch of decoded tokens through an engine rank without a GPU, with SGLang's own runner.

docs/guides/rehearse.md lists the passes. Both batches sample with log-probs, as a run's requests do.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.recorder import Phase, Recorder, find_line_of
from rollout_sglang.hooks import tree_reduction
from rollout_sglang.hooks.blackwell import PACKED
from rollout_sglang.hooks.e4m3_cache import get_attention_backend
from rollout_sglang.rehearsal import graphs as rehearsed_graphs
from rollout_sglang.rehearsal.kernels.flashinfer import count_bytes_per_graph

PREFILL, DECODE = "prefill", "decode, eager"
PASSES = (PREFILL, "decode", DECODE)


class EngineRecorder(Recorder):
    """A recorder that also stores the operands of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[tuple[str, frozenset[int]]] = set()
        """(dtype, storages of all operands)"""

    def wait(self, kind: str) -> None:
        if rehearsed_graphs.is_capturing():
            raise RefusedKernelError(f"the host waits for the device ({kind}) while a CUDA graph is captured")
        super().wait(kind)

    def work(self, kind: str, flops: int, *tensors: torch.Tensor, kernel: str = "") -> None:
        super().work(kind, flops, *tensors, kernel=kernel)
        if flops:
            self.products.add((kind, frozenset(tensor.untyped_storage()._cdata for tensor in tensors)))


@dataclass
class ForwardRehearsal:
    """Result of the passes of one rank."""

    fault: str = ""
    """The error that ended the passes (type, phase, line, message), a product in the wrong precision, or a wait in every layer; else ""."""
    captured: list[int] = field(default_factory=list)
    """Batch sizes whose CUDA graphs were captured. A run captures `capturable` of them."""
    capturable: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    context: int = 0
    """Tokens in the context of each request."""
    attention: str = ""
    """SGLang's attention backend."""
    phases: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each pass; see `_describe`."""
    graph_bytes: int = 0
    """Bytes of the graphs that a run captures, including the buffers of their inputs, and of attention's own buffers."""


def run_forward(runner: Any, recorder: EngineRecorder, longest_prompt: int) -> ForwardRehearsal:
    """Run both batches on SGLang's ModelRunner. An error of the program ends the passes and is part of the result."""
    found, phase = ForwardRehearsal(), "the KV cache"
    try:
        recorder.begin("KV cache")
        runner.alloc_memory_pool()
        before = recorder.now
        runner.init_attention_backends()
        found.attention = type(runner.attn_backend).__name__
        phase = "graphs"
        recorder.begin(phase)
        found.captured, found.capturable = _capture(runner)
        found.graph_bytes = recorder.now - before
        found.graph_bytes += (found.capturable - len(found.captured)) * count_bytes_per_graph(get_attention_backend(runner.attn_backend))
        for phase in PASSES:
            recorder.begin(phase)
            if phase == PREFILL:
                found.prefill_tokens = _prefill(runner, longest_prompt)
                continue
            if phase == DECODE:
                runner.decode_cuda_graph_runner = None
            found.decode_requests, found.context = _decode(runner)
        recorder.end()
        passes = [each for each in recorder.phases if each.name in PASSES]
        layers = runner.model_config.num_hidden_layers
        found.fault = find_wrong_product(runner.model, recorder.products) or find_wait_in_layers(passes, layers)
    except Exception as error:
        first = _find_first(error)
        message = (str(first).strip().splitlines() or [""])[0]
        found.fault = f"{type(first).__name__} in the engine's {phase} at {find_line_of(first)}: {message}"
        found.error = first  # type: ignore[attr-defined]
    found.phases = [_describe(each) for each in recorder.phases if each.name in PASSES]
    return found


def _find_first(error: BaseException) -> BaseException:
    """Return the original error. SGLang raises its own error while it handles one of a capture."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _capture(runner: Any) -> tuple[list[int], int]:
    """Capture the graphs of the smallest and the largest batch. Return these batch sizes, and the number of sizes in a run."""
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    count = len(config.decode.bs or [])
    for phase in (config.decode, config.prefill):
        sizes = phase.bs or []
        phase.bs = sorted({sizes[0], sizes[-1]}) if sizes else sizes
    runner.init_cuda_graphs()
    return list(runner.decode_cuda_graph_capture_bs), count


def _prefill(runner: Any, longest_prompt: int) -> int:
    """Run a chunk of prompts and sample their first tokens. Return the number of prompt tokens."""
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import get_schedule

    chunk = get_schedule().chunked_prefill_size
    room = min(chunk if chunk and chunk > 0 else get_schedule().max_prefill_tokens, runner.max_total_num_tokens)
    length = min(longest_prompt, room)
    one_batch.extend(_make_requests(room // length, length), runner)
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    return room // length * length


@torch.no_grad()
def _decode(runner: Any) -> tuple[int, int]:
    """Decode one token of each request. Return the number of requests and the length of their contexts."""
    from sglang.benchmark import one_batch

    requests = runner.max_running_requests
    context = max(1, min(runner.max_total_num_tokens // requests - 1, runner.model_config.context_len - 2))
    batch = _make_batch(_make_requests(requests, context), runner)
    batch.prepare_for_extend()  # its pass is skipped, as if the tokens were in the cache
    one_batch.decode(torch.zeros(requests, dtype=torch.int64, device="cuda"), batch, runner)
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    return requests, context


def _make_batch(requests: list[Any], runner: Any) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    cache = one_batch.TreeCacheNamespace(
        page_size=get_schedule().page_size, device="cuda", token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator
    )
    return ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=cache,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )


def _make_requests(count: int, length: int) -> list[Any]:
    """Return requests that sample as in a run, at temperature 1 and with log-probs."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    requests = []
    for number in range(count):
        sampling = SamplingParams(temperature=1.0, max_new_tokens=8)
        sampling.normalize(None)
        request = Req(str(number), "", array("q", [1]) * length, sampling, return_logprob=True)
        request.full_untruncated_fill_ids, request.logprob_start_len, request.extend_end = request.origin_input_ids, -1, length
        requests.append(request)
    return requests


def find_wrong_product(model: torch.nn.Module, products: set[tuple[str, frozenset[int]]]) -> str:
    """Return an error for the first E4M3 weight that was not multiplied in an FP8 product with its scales, or ""."""
    together = [operands for kind, operands in products if kind == "fp8"]
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dtype != torch.float8_e4m3fn:
                continue
            scale = getattr(module, f"{name}_scale_inv", None)
            forms = () if scale is None else (scale, getattr(scale, PACKED, scale))
            wanted = [{tensor.untyped_storage()._cdata for tensor in (weight, form)} for form in forms]
            if type(module).__name__ == "RowParallelLinear" and tree_reduction.count_slices(module.tp_group.world_size) > 1:
                wanted = [{weight.untyped_storage()._cdata}]  # each slice's scales are copied for its product
            if not any(each <= operands for each in wanted for operands in together):
                return f"{path}.{name} is E4M3, and no FP8 product was called with its blocks and scales"
    return ""


def find_wait_in_layers(phases: Sequence[Phase], layers: int) -> str:
    """Return an error for the first line in which the host waits for the device in every layer of a pass, or ""."""
    for phase in phases:
        for (kind, line), count in phase.waits.items():
            if count >= layers:
                return f"the host waits for the device ({kind}) in every layer of the engine's {phase.name}, at {line}"
    return ""


def _describe(phase: Phase) -> dict[str, Any]:
    """Return a phase's figures for JSON: work, host waits by line, and additional bytes at its peak."""
    return phase.as_json() | {
        "activation_bytes": max(phase.peak.nbytes - phase.held, 0),
        "bytes": phase.traffic,
        "sent_bytes": sum(phase.sent.values()),
    }
