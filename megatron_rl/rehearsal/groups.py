"""Names of Megatron's process groups, and the check that a collective runs in the right group.

Two groups of equal size accept the same tensors, so sizes do not reveal that a collective runs in the wrong group. `_OWNERS` therefore
lists the groups in which each function communicates. A function that receives its group as an argument is listed as `_CALLER`, and the next
outer caller decides. In a backward pass autograd calls operators without their layers, so the callers of the forward pass decide
(`record_owners`). A collective of a function that is not in the table is refused. Groups with the same ranks count as one.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from megatron_rl.rehearsal.recorder import find_name


class RefusedCollectiveError(RuntimeError):
    """NCCL would refuse this call or hang, or the ranks would exchange unrelated data."""


_CALLER = "its caller's group"
_REPLICAS = "edp for weights of experts, dp*cp for other weights"
_OWNERS = {
    "megatron/core/dist_checkpointing/": "world",
    "megatron/core/distributed/finalize_model_grads.py _allreduce_non_tensor_model_parallel_grads": "tp",
    "megatron/core/distributed/finalize_model_grads.py _allreduce_embedding_grad": "embedding",
    "megatron/core/distributed/finalize_model_grads.py _update_router_expert_bias": "tp*dp*cp",
    "megatron/core/distributed/finalize_model_grads.py finalize_model_grads": "pp dp*cp",  # counts of tokens
    "megatron/core/distributed/param_and_grad_buffer.py": _REPLICAS,
    "megatron/core/models/common/embeddings/language_model_embedding.py": "tp",
    "megatron/core/optimizer/": "world",
    "megatron/core/pipeline_parallel/p2p_communication.py": "pp world",  # the world if a pipeline has two stages
    "megatron/core/tensor_parallel/": _CALLER,
    "megatron/core/tensor_parallel/cross_entropy.py": "tp",
    "megatron/core/tensor_parallel/layers.py VocabParallelEmbedding": "tp",
    "megatron/core/transformer/attention.py": "tp",
    "megatron/core/transformer/mlp.py": _CALLER,
    "megatron/core/transformer/moe/moe_utils.py": _CALLER,
    "megatron/core/transformer/moe/router.py": "tp*cp",
    "megatron/core/transformer/moe/shared_experts.py": "tp",
    "megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher.dispatch_postprocess": "etp",
    "megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher.combine_preprocess": "etp",
    "megatron/core/transformer/multi_latent_attention.py": "tp",
    "megatron/core/transformer/multi_token_prediction.py": "tp",
    "megatron/core/transformer/transformer_layer.py": "tp",
    "megatron_rl/distributed/__init__.py": "world pp dp",
    "megatron_rl/mcore/weights/adapters.py": _CALLER,
    "megatron_rl/mcore/weights/cache_scales.py": "world",
    "megatron_rl/mcore/checkpoint/optimizer.py": _REPLICAS,
    "megatron_rl/mcore/passes/context_parallel.py": "cp",
    "megatron_rl/mcore/layers/attention/core_attention.py": _CALLER,
    "megatron_rl/mcore/layers/attention/self_attention.py": "tp",
    "megatron_rl/mcore/base/exchange.py": _CALLER,
    "megatron_rl/mcore/layers/moe/experts.py": "etp",
    "megatron_rl/mcore/layers/moe/experts.py Dispatcher.token_dispatch": "ep",
    "megatron_rl/mcore/layers/moe/experts.py Dispatcher.token_combine": "ep",
    "megatron_rl/mcore/layers/attention/gated_delta_net.py": "tp",
    "megatron_rl/mcore/layers/attention/mla.py": "tp",
    "megatron_rl/mcore/layers/mtp.py": "tp",
    "megatron_rl/mcore/layers/mtp.py copy_embedding": "embedding",
    "megatron_rl/mcore/layers/linear/output_layer.py": "tp",
    "megatron_rl/mcore/layers/linear/high_precision.py": _CALLER,
    "megatron_rl/mcore/base/weight_gradient.py": _CALLER,
    "megatron_rl/mcore/layers/linear/quantized_linear.py": _CALLER,
    "megatron_rl/mcore/layers/linear/quantized_linear.py QuantizedLinear.gather_master": _REPLICAS,
    "megatron_rl/mcore/layers/linear/quantized_matmul.py": _CALLER,
    "megatron_rl/mcore/layers/moe/router.py Router.attach_and_log_load_balancing_loss": "tp*cp",
    "megatron_rl/mcore/layers/moe/router.py": "world",
    "megatron_rl/mcore/layers/moe/forecast.py": "world",
    "megatron_rl/mcore/layers/linear/row_parallel.py": _CALLER,
    "megatron_rl/mcore/layers/spec.py": _CALLER,
    "megatron_rl/mcore/layers/moe/shared_experts.py": "tp",
    "megatron_rl/mcore/layers/moe/token_counts.py": "etp*ep",
    "megatron_rl/mcore/passes/logprobs.py": "tp",
    "megatron_rl/mcore/base/master_slices.py": _CALLER,
    "megatron_rl/mcore/optim/quantizing_optimizer.py QuantizingOptimizer": _REPLICAS,
    "megatron_rl/mcore/optim/quantizing_optimizer.py": "world",
    "megatron_rl/mcore/passes/reduce.py": "dp",
    "megatron_rl/mcore/passes/reduce.py sum_by_name": "pp dp",
    "megatron_rl/mcore/passes/reduce.py sum_values": "pp dp",
    "megatron_rl/mcore/passes/reduce.py sum_stages": "pp",
    "megatron_rl/mcore/passes/reduce.py sum_replica": "tp*cp",
    "megatron_rl/mcore/weights/load_weights.py": "tp",
    "megatron_rl/mcore/weights/step_response.py": "world",
    "megatron_rl/kernels/": _CALLER,
    "megatron_rl/precision/": _CALLER,
}
"""File, or file and function -> groups in which it communicates. The longest matching name counts."""


class _Owner(NamedTuple):
    """The function that decides a collective's group."""

    function: str
    groups: tuple[str, ...]
    """Allowed groups. Empty if the function is not in the table."""


def check_group(kind: str, group: ProcessGroup) -> None:
    """Raise RefusedCollectiveError if a collective does not run in a group of its owner, or its owner is not in the table."""
    names = find_names(group)
    if names == [_ENGINE]:
        return
    owner = _find_owner(sys._getframe(1))
    if owner is None or not owner.groups:
        function = "autograd" if owner is None else owner.function
        raise RefusedCollectiveError(f"{kind} in {name_group(group)}: {function} is not in the table of megatron_rl/rehearsal/groups.py")
    if not set(owner.groups) & set(names):
        raise RefusedCollectiveError(f"{kind} in {name_group(group)}: {owner.function} exchanges in {' or '.join(owner.groups)} alone")


def record_owners() -> None:
    """Record the owner of the forward pass on every autograd operator, and the name in the model on every weight."""
    function: Any = torch.autograd.Function
    plain = function.apply.__func__

    def apply(cls: Any, *args: Any, **named: Any) -> Any:
        result = plain(cls, *args, **named)
        for value in result if isinstance(result, tuple) else (result,):
            node = getattr(value, "grad_fn", None)
            if isinstance(node, cls._backward_cls):
                node.metadata[_METADATA_KEY] = _find_owner(sys._getframe(1))
                break
        return result

    function.apply = classmethod(apply)
    _record_names()


_METADATA_KEY = "owner of collectives"


def _record_names() -> None:
    """Give every weight its name as `key`, which parts of a checkpoint have too."""
    from megatron.core.distributed import DistributedDataParallel

    replicas: Any = DistributedDataParallel
    plain = replicas.__init__

    def start(self: Any, config: Any, settings: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
        for name, weight in module.named_parameters():
            weight.key = name  # type: ignore[attr-defined]
        plain(self, config, settings, module, *args, **named)

    replicas.__init__ = start


def _find_owner(frame: Any) -> _Owner | None:
    """Return the innermost owner among the callers from `frame` outward, or None if only torch is among them."""
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        said = _look_up(frame.f_code)
        if said is not None and said.groups == (_REPLICAS,) and "self" in frame.f_locals:
            return _find_replicas(said.function, frame.f_locals["self"])
        if said is not None and said.groups not in ((_CALLER,), (_REPLICAS,)):
            return said
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(_METADATA_KEY)


@functools.cache
def _look_up(code: CodeType) -> _Owner | None:
    """Return the table's entry of a function, or None for functions of other packages."""
    file = find_name(code)
    if not file:
        return None
    function = f"{file} {code.co_qualname}"
    row = max((name for name in _OWNERS if function.startswith(name)), key=len, default=None)
    said = "" if row is None else _OWNERS[row]
    return _Owner(function, (said,) if said in (_CALLER, _REPLICAS) else tuple(said.split()))


def _find_replicas(function: str, of: Any) -> _Owner:
    """Return the replicas' group for the weights of an object: buckets, an optimizer, a layer, or the state of one weight."""
    parts: Iterable[Any] = getattr(of, "buckets", None) or getattr(of, "buffers", None) or ()
    weights = [weight for part in parts for weight in part.params] or [of.weight]
    experts = {".experts." in weight.key for weight in weights}
    if len(experts) > 1:
        raise RefusedCollectiveError(f"{function} exchanges weights of experts together with other weights, which have other replicas")
    return _Owner(function, ("edp",) if experts.pop() else ("dp*cp",))


_ENGINE = "engine"


def name_group(group: ProcessGroup) -> str:
    """Return Megatron's name and the size of a group, such as `tp 4`."""
    return f"{find_names(group)[0]} {group.size()}"


def find_names(group: ProcessGroup) -> list[str]:
    """Return Megatron's names of a group, followed by the names of groups with the same ranks."""
    if sys.modules.get("megatron") is None:  # all ranks of an engine form its only group
        return [_ENGINE]
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
        "embedding": state.get_embedding_group,
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
