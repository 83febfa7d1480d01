"""Check, at every start, that a live engine holds and computes what the precision contract says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.errors import RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import Engine, EngineTensorSpec
from megatron_rl.sync.plan import SyncPlan
from parallel.reshard import list_stored_tensors
from parallel.shards import Shard


def check_live_engine(plan: SyncPlan, engine: Engine) -> None:
    """Raise RunError for an engine that breaks the precision contract: by its weights, or by how it quantises activations."""
    check_live_tensors(plan, engine.describe_tensors())
    if plan.contract.engine_format.quantized:
        check_activation_formats(plan.contract, engine.read_activation_formats())


def check_live_tensors(plan: SyncPlan, live: list[dict[str, EngineTensorSpec]]) -> None:
    """Compare names, shapes and dtypes of what the engine really holds with what the plan will write. Raise RunError by name."""
    if len(live) != len(plan.targets):
        raise RunError(f"the engine answers with {len(live)} ranks, the plan has {len(plan.targets)}")
    for rank, shards in plan.targets.items():
        check_rank_tensors(rank, shards, plan.contract, live[rank])


def check_rank_tensors(rank: int, shards: Sequence[Shard], contract: PrecisionContract, live: Mapping[str, EngineTensorSpec]) -> None:
    """`check_live_tensors` of one engine rank, which a sync fills with `shards`."""
    stored = list_stored_tensors(shards, contract.format_of)
    expected = {name: (format.dtype, shape) for name, (format, shape) in stored.items()}
    actual = {name: (tensor.dtype, tensor.shape) for name, tensor in live.items()}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            found, wanted = actual.get(name, "absent"), expected.get(name, "absent")
            fix = "; SGLang may have no class of its own for `architectures` and serve its generic one" * ("absent" in (found, wanted))
            raise RunError(f"engine rank {rank}: {name} is {found}, the precision contract says {wanted}{fix}")


def check_activation_formats(contract: PrecisionContract, formats: Mapping[str, str]) -> None:
    """Raise RunError for the first layer that does not quantise its inputs as the contract says, or where there is none that does."""
    expected = contract.engine_format
    wrong = [name for name, format in formats.items() if format != str(expected)]
    if wrong or not formats:
        kind = expected.name.upper()
        what = f"{wrong[0]} quantises activations as {formats[wrong[0]]}" if wrong else f"no {kind} linear layer is live"
        raise RunError(f"the engine breaks the precision contract: {what}; precision.mode {contract.mode} says {expected}")
