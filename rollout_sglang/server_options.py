"""`[rollout.sglang]`: SGLang's own server arguments. Those that are unknown or would break the precision contract, the proof or exactness
are refused. Names, types and groups are parsed from SGLang's source without importing it."""

import ast
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.agent import AgentConfig
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import PrecisionContract

FIELD = "rollout.sglang"
ATTENTION = "attention_backend"
_ALLOWED = ""
_OTHER_KERNELS = "computes with a different kernel than the precision graph says"
_COMPILERS = ("inductor", "tc_piecewise")  # in `cuda_graph_config`: rewrite operators, past the hooks
_OTHER_WEIGHTS = "serves weights that no sync fills and proves"
_OTHER_RANKS = "places ranks or weights where the sync does not expect them"
_OLD_WEIGHTS = "keeps keys and values of older weights that a sync does not drop"
_UNTESTED = "has not been tested with the hooks of this project"
GROUPS = {
    "Schedule": _ALLOWED,
    "Memory": _OLD_WEIGHTS,
    "ExecGraph": _ALLOWED,
    "ExecComm": _ALLOWED,
    "Observability": _ALLOWED,
    "Model": "sets the served model or its format, which [model] and [precision] do",
    "ExecKernel": _OTHER_KERNELS,
    "ExecMoe": _OTHER_KERNELS,
    "ExecDeterministic": _OTHER_KERNELS,
    "ExecMamba": "changes the kernels or the format of recurrent states, which the precision contract fixes",
    "ExecDllm": "is for models that do not sample token by token",
    "ExecFeatures": _UNTESTED,
    "ExecOverlap": _UNTESTED,
    "ExecOffload": _OTHER_RANKS,
    "Parallel": _OTHER_RANKS,
    "Device": "is determined by the machine that the engine runs on",
    "Disagg": "splits prefill and decoding over several servers, but the sync knows only one",
    "Spec": "draws tokens by rules that the trainer does not repeat, among proposals of weights that no sync fills",
    "Lora": _OTHER_WEIGHTS,
    "Mm": "is for inputs other than text",
    "Serving": "has no use in a run, which exchanges tokens with the engine",
}
"""SGLang's groups of arguments, with the reason why they are refused."""
EXCEPTIONS = {
    **dict.fromkeys(("watchdog_timeout", "soft_watchdog_timeout", "numa_node", "gc_threshold"), _ALLOWED),
    **dict.fromkeys(("nccl_port", "dist_timeout", "context_length", "stream_interval", "batch_notify_size"), _ALLOWED),
    **dict.fromkeys(("enable_torch_compile", "enable_torch_compile_debug_mode", "torch_compile_max_bs"), _OTHER_KERNELS),
    **dict.fromkeys(("boundary_reduction", "enable_quant_communications", "enable_flashinfer_allreduce_fusion"), _OTHER_KERNELS),
    **dict.fromkeys(("flashinfer_allreduce_fusion_backend", "enable_aiter_allreduce_fusion"), _OTHER_KERNELS),
    **dict.fromkeys(("radix_eviction_policy", "radix_eviction_policy_config"), _ALLOWED),
    **dict.fromkeys(("page_size", "enable_mixed_chunk", "swa_full_tokens_ratio", "c128_page_size"), _UNTESTED),
    **dict.fromkeys(("forward_hooks", "debug_tensor_dump_output_folder", "debug_tensor_dump_input_file"), _UNTESTED),
}
"""Arguments that are treated differently from their group."""
SET_BY = {
    "model_path": "model.path",
    "dtype": "precision.high",
    "quantization": "precision.mode",
    "kv_cache_dtype": "precision.kv",
    "tp_size": "rollout.tp",
    "ep_size": "rollout.ep",
    "nnodes": "rollout.nodes_per_engine",
    "host": "rollout.hosts",
    "max_running_requests": "rollout.max_running_requests",
    "max_total_tokens": "rollout.max_total_tokens",
    "chunked_prefill_size": "rollout.chunked_prefill_size",
    "disable_radix_cache": "rollout.enable_prefix_caching",
    "enable_return_routed_experts": "algorithm.routing_replay",
    "enable_memory_saver": "placement.kind",
    "random_seed": "train.seed",
}
"""Arguments that the run's own fields set."""
_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "List": (list,)}


def find_sglang_folder() -> Path | None:
    """Return the folder of SGLang's package, without importing it, or None if it is not installed."""
    found = find_spec("sglang")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


@cache
def read_arguments() -> Mapping[str, tuple[str, frozenset[str]]]:
    """Return SGLang's arguments: name -> (group, names in the type annotation). Empty if SGLang is not installed."""
    folder, arguments = find_sglang_folder(), {}
    for path in sorted((folder / "srt" / "arg_groups" / "fields").glob("*.py")) if folder else ():
        for group in (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)):
            for line in group.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(line.annotation, ast.Subscript):
                    declared = line.annotation.slice
                    kind = declared.elts[0] if isinstance(declared, ast.Tuple) else declared
                    types = frozenset(node.id for node in ast.walk(kind) if isinstance(node, ast.Name))
                    arguments[line.target.id] = group.name, types
    return arguments


def check(options: Mapping[str, Any]) -> None:
    """Raise UserError for the first argument that SGLang does not have, that is refused, or whose value has the wrong type."""
    known = read_arguments()
    for name, value in options.items():
        field = f"{FIELD}.{name}"
        if name in SET_BY:
            raise UserError(field, value, f"is set by {SET_BY[name]}", f"set {SET_BY[name]}")
        if not known:
            continue  # the machine that runs the engines checks this
        if name not in known or name.startswith("_"):
            near = get_close_matches(name, known, 1)
            raise UserError(field, value, "is not a server argument of SGLang", f"did you mean {near[0]}?" if near else "leave it out")
        group, types = known[name]
        if reason := EXCEPTIONS.get(name, GROUPS.get(group, "is of a kind that is unknown to this project")):
            raise UserError(field, value, reason, "leave it out")
        if name == "cuda_graph_config" and any(compiler in str(value) for compiler in _COMPILERS):
            raise UserError(field, value, _OTHER_KERNELS, "use breakable graphs")
        wanted = [kind for kind in _TYPES if kind in types]
        if wanted and not any(isinstance(value, _TYPES[kind]) and (kind == "bool") == isinstance(value, bool) for kind in wanted):
            raise UserError(field, value, f"must be of type {' or '.join(wanted)}", "see SGLang's documentation of server arguments")


def check_graphs(config: Config) -> None:
    """Raise UserError if the largest batch that an engine may decode has no CUDA graph, unless all graphs are off. It would take several
    times as long, because the host launches every kernel."""
    options, largest = config.rollout.sglang, config.rollout.max_running_requests
    for name in ("cuda_graph_bs_decode", "cuda_graph_max_bs_decode"):
        sizes = options.get(name)
        most = max(sizes, default=0) if isinstance(sizes, list) else sizes
        if most is not None and most < largest and not options.get("disable_cuda_graph"):
            rule = f"leaves batches of up to {largest} requests (rollout.max_running_requests) without a CUDA graph"
            raise UserError(f"{FIELD}.{name}", sizes, rule, f"add {largest}, or set rollout.max_running_requests = {most}")


def check_attention(config: Config, backend: str) -> bool:
    """Return whether engines may attend by `backend`. Raise UserError if it is refused for this run. SGLang's Triton kernels decode in an
    order of sums that depends on the number of keys, so they need a GPU and a run that does not ask for one order."""
    import torch

    contract = PrecisionContract.from_config(config.precision)
    if backend == "fa3" and contract.sums_by_ranks and torch.cuda.is_available():
        return True  # by the shared kernel
    if backend != "triton":
        return False
    if not torch.cuda.is_available():
        rule, fix = "needs a GPU, because engines attend by torch_native on a CPU", "leave it out"
    elif contract.scales_kv_by_layer:
        rule, fix = f"rounds queries and probabilities with precision.kv = {contract.kv!r}", "leave it out, or set precision.kv = 'high'"
    elif contract.sums_by_tree and contract.trainer_format == contract.engine_format:
        rule = f"adds up in an order of its own, but precision.reduction = {contract.reduction!r} asks for the trainer's"
        fix = "set precision.reduction = 'fast'"
    else:
        return True
    raise UserError(f"{FIELD}.{ATTENTION}", backend, rule, fix)


_PARSERS = {
    "tool_parser": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("parser/reasoning_parser.py", "DetectorMap"),
}
"""Field of `[agent]` -> where SGLang's source lists its values."""


def check_parsers(agent: AgentConfig) -> None:
    """Raise UserError if SGLang has no parser of a name that the agent's section gives, according to its source."""
    values: Iterator[Any]
    for field, (file, table) in _PARSERS.items():
        if not (name := getattr(agent, field)) or (folder := find_sglang_folder()) is None:
            continue  # the machine that runs the engines checks this
        nodes = ast.walk(ast.parse((folder / "srt" / file).read_text(encoding="utf-8")))
        values = (
            node.value for node in nodes if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == table and node.value
        )
        known = [key.value for key in next(values).keys if isinstance(key, ast.Constant)]
        if name not in known:
            raise UserError(f"agent.{field}", name, f"is no {field} of SGLang", f"use one of {', '.join(sorted(map(str, known)))}")


def make_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the options as arguments of SGLang's command line. False flags are omitted."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
