"""Megatron's process groups by name, and which of them a collective may run in.

Groups of one size take the same tensors, so sizes do not show that a collective runs in the wrong one. Its callers do: a file does a part
of the work that is cut along known dimensions only (`_FILES`), and all files that the call comes through must agree. Groups go by their
ranks: two of the same ranks are one. A backward pass comes from autograd, through the file of the operator alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from megatron_rl.rehearsal.recorder import find_line, find_name


class RefusedCollectiveError(RuntimeError):
    """NCCL would refuse this call or wait for ever, or the ranks would exchange what is not the same."""


_LAYER = ("tp", "etp")
_EXPERTS = ("ep", "etp", "etp*ep")
_REPLICAS = ("dp", "dp*cp", "edp")
_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megatron/core/pipeline_parallel/p2p_communication.py", ("pp", "world")),  # the world where a pipeline has two stages
    ("megatron/core/tensor_parallel/mappings.py", (*_LAYER, *_EXPERTS)),
    ("megatron/core/tensor_parallel/layers.py", _LAYER),
    ("megatron/core/tensor_parallel/cross_entropy.py", ("tp",)),
    ("megatron/core/models/common/embeddings/language_model_embedding.py", ("tp",)),
    ("megatron/core/transformer/attention.py", ("tp", "cp")),
    ("megatron/core/transformer/moe/token_dispatcher.py", _EXPERTS),
    ("megatron/core/transformer/moe/shared_experts.py", ("tp",)),
    ("megatron_rl/mcore/context_parallel.py", ("cp",)),
    ("megatron_rl/mcore/layers/attention.py", ("tp", "cp")),
    ("megatron_rl/mcore/layers/mla.py", ("tp", "cp")),
    ("megatron_rl/mcore/layers/shared_heads.py", ("tp",)),
    ("megatron_rl/mcore/layers/output_layer.py", ("tp",)),
    ("megatron_rl/mcore/layers/value_head.py", ("tp",)),
    ("megatron_rl/mcore/logprobs.py", ("tp",)),
    ("megatron_rl/mcore/layers/quantized_linear.py", _LAYER),
    ("megatron_rl/mcore/layers/row_parallel.py", _LAYER),
    ("megatron_rl/mcore/layers/exchange.py", (*_LAYER, *_EXPERTS)),
    ("megatron_rl/precision/backends/gather.py", _LAYER),
    ("megatron_rl/mcore/layers/experts.py", _EXPERTS),
    ("megatron_rl/mcore/layers/grouped_experts.py", ("etp",)),
    ("megatron/core/distributed/param_and_grad_buffer.py", _REPLICAS),
    ("megatron_rl/mcore/buckets.py", _REPLICAS),
    ("megatron_rl/mcore/layers/master.py", _REPLICAS),
    ("megatron_rl/mcore/checkpoint/optimizer.py", _REPLICAS),
)
"""File -> the groups in which what it does, and all that it calls, may exchange tensors."""
_BETWEEN_REPLICAS = (
    "megatron/core/distributed/",
    "megatron_rl/mcore/buckets.py",
    "megatron_rl/mcore/quantizing_optimizer.py",
    "megatron_rl/mcore/layers/master.py",
    "megatron_rl/mcore/checkpoint/",
    "megatron_rl/mcore/replicas.py",
)
"""Where weights, gradients, masters and samples are exchanged."""
_SMALL = 1 << 16
"""Bytes of what else replicas agree on: counts, sums of metrics."""


def check_group(kind: str, group: ProcessGroup, nbytes: int) -> None:
    """Raise RefusedCollectiveError where a collective of `nbytes` runs in a group in which its callers exchange nothing, or sends
    activations to other replicas, whose samples are others."""
    if group.size() == 1:
        return
    names = find_names(group)
    for file, allowed in _find_rules():
        if not allowed.intersection(names):
            raise RefusedCollectiveError(f"{kind} in {name_group(group)}: {file} exchanges in {' or '.join(sorted(allowed))} alone")
    if nbytes > _SMALL and names[0] in _REPLICAS and not find_line().startswith(_BETWEEN_REPLICAS):
        raise RefusedCollectiveError(f"{kind} of {nbytes:,} bytes in {name_group(group)}: replicas exchange weights and gradients alone")


def _find_rules() -> list[tuple[str, frozenset[str]]]:
    """Return the rules of the files that a call comes through."""
    found = {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if (rule := _find_rule(frame.f_code)) is not None:
            found[rule[0]] = rule
        frame = frame.f_back
    return list(found.values())


@functools.cache
def _find_rule(code: CodeType) -> tuple[str, frozenset[str]] | None:
    name = find_name(code)
    return next(((file, frozenset(groups)) for file, groups in _FILES if file == name), None)


def name_group(group: ProcessGroup) -> str:
    """Return Megatron's name of a group with its size, such as `tp 4`."""
    return f"{find_names(group)[0]} {group.size()}"


def find_names(group: ProcessGroup) -> list[str]:
    """Return Megatron's names of a group, its own first, then those of others of the same ranks."""
    if sys.modules.get("megatron") is None:  # an engine has no other group than that of its ranks
        return ["engine"]
    from megatron.core import parallel_state as state

    names: dict[str, Callable[[], Any]] = {
        "tp": state.get_tensor_model_parallel_group,
        "pp": state.get_pipeline_model_parallel_group,
        "dp": state.get_data_parallel_group,
        "cp": state.get_context_parallel_group,
        "ep": state.get_expert_model_parallel_group,
        "dp*cp": lambda: state.get_data_parallel_group(with_context_parallel=True),
        "tp*cp": state.get_tensor_and_context_parallel_group,
        "etp": state.get_expert_tensor_parallel_group,
        "etp*ep": state.get_expert_tensor_and_model_parallel_group,
        "edp": state.get_expert_data_parallel_group,
        "tp*dp*cp": lambda: state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tp*pp": state.get_model_parallel_group,
        "etp*ep*pp": state.get_expert_tensor_model_pipeline_parallel_group,
        "world": lambda: dist.group.WORLD,
    }
    ranks = dist.get_process_group_ranks(group)
    own, same = [], []
    for name, get in names.items():
        try:
            known = get()
        except (AssertionError, TypeError):
            continue
        if known is group:
            own.append(name)
        elif known is not None and dist.get_process_group_ranks(known) == ranks:
            same.append(name)
    return [*own, *same] or [f"ranks {ranks}"]
