"""Does a live engine hold and compute what the precision contract says? Asked at every start."""

from __future__ import annotations

from megatron_rl.errors import RunError
from megatron_rl.rollout.engine import Engine, EngineTensorSpec
from megatron_rl.sync.plan import SyncPlan
from parallel.formats import SCHEMES
from parallel.reshard import kind_of, scale_name

_TORCH_NAME = {"bf16": "bfloat16", "fp32": "float32"}


def check_live_engine(plan: SyncPlan, engine: Engine) -> None:
    """Refuses, by RunError, an engine that does not follow the precision contract: its weights, or how it quantises activations."""
    check_live_tensors(plan, engine.describe_tensors())
    wanted = plan.contract.activation_format
    if wanted is not None:
        formats = engine.read_activation_scale_formats()
        wrong = [name for name, used in formats.items() if used != wanted]
        if wrong or not formats:
            kind = "INT8" if plan.contract.rollout_int8 else "FP8"
            what = f"{wrong[0]} quantises activations with {formats[wrong[0]]} scales" if wrong else f"no {kind} linear layer is live"
            rule = "precision.mode is int8_rollout" if plan.contract.rollout_int8 else f"precision.scale_format is {wanted}"
            raise RunError(f"the engine breaks the precision contract: {what}; {rule}")


def check_live_tensors(plan: SyncPlan, live: list[dict[str, EngineTensorSpec]]) -> None:
    """Compares what the engine really holds with what the plan will write: names, shapes and dtypes. Raises RunError by name."""
    roles, int8_roles = plan.contract.fp8_roles, plan.contract.int8_roles
    if len(live) != len(plan.targets):
        raise RunError(f"the engine answers with {len(live)} ranks, the plan has {len(plan.targets)}")
    dtypes = {"fp8": "float8_e4m3fn", "int8": "int8", "fp32": "float32", "high": _TORCH_NAME[plan.contract.high]}
    for rank, shards in plan.targets.items():
        expected = {}
        for shard in shards:
            kind = kind_of(shard.role, roles, int8_roles)
            expected[shard.name] = (dtypes[kind], shard.shape)
            if kind in SCHEMES:
                expected[scale_name(shard.name, kind)] = ("float32", shard.scale_shape_of(kind))
        held = {name: (tensor.dtype, tensor.shape) for name, tensor in live[rank].items()}
        for name in sorted(expected.keys() | held.keys()):
            if expected.get(name) != held.get(name):
                raise RunError(
                    f"engine rank {rank}: {name} is {held.get(name, 'absent')}, the precision contract says {expected.get(name, 'absent')}"
                )
