"""Checks before the first sync: the transport can work on these machines, and the live engine matches the precision contract."""

from collections.abc import Mapping, Sequence

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import RunError, UserError, as_user_error
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine import Engine, EngineTensorSpec
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import Chunk
from parallel.coverage import Size, check_chunks
from parallel.places import check_places
from parallel.reshard import list_stored_tensors
from parallel.shards import Shard
from parallel.transport import TRANSPORTS

_WRONG_DEVICE = {
    "cuda": (
        "reads weights from host memory, but trainer and engines are on GPUs here",
        "use cuda_ipc on one host; process_group or gloo on several",
    ),
    "cpu": ("needs CUDA, and this machine has no CUDA device", "use shared_memory"),
}


def check_transport(settings: SyncConfig, shared: bool = False) -> None:
    """Raise UserError if the transport cannot work on this machine. `shared`: trainer and engines use the same devices."""
    transport, device = settings.load_transport(), "cuda" if torch.cuda.is_available() else "cpu"
    with as_user_error():
        for name in ("Outbox", "Inbox"):
            TRANSPORTS.load(f"{transport.module}:{name}")
    if device not in transport.devices:
        raise UserError("sync.transport", settings.transport, *_WRONG_DEVICE[device])
    if shared and device == "cuda" and not transport.shares_gpus:
        rule = "cannot use the same GPU twice, but trainer and engines share their GPUs (placement.kind)"
        raise UserError("sync.transport", settings.transport, rule, "use cuda_ipc on one host, gloo on several")
    if settings.delta == "on" and device == "cuda":
        raise UserError("sync.delta", "on", "compares weights in host memory, but they are on GPUs here", 'set "off" or "auto"')
    if transport.needs_dir and settings.dir is None:
        rule = f"must be set for sync.transport = {settings.transport}"
        raise UserError("sync.dir", None, rule, "name a folder that trainer and engine both see")


def check_one_host(settings: SyncConfig, reason: str) -> None:
    """Raise UserError if the transport works only within one host. `reason` says what runs on several hosts."""
    if settings.load_transport().one_host:
        rule = f"needs trainer and engines on one host; {reason}"
        raise UserError("sync.transport", settings.transport, rule, "use process_group, gloo, or disk with a shared folder")


def check_coverage(plan: SyncPlan, received: Mapping[int, Sequence[Chunk]]) -> dict[int, Size]:
    """Return the size of some engine ranks' weights. Raise RunError if the chunks that they receive leave out a byte but padding."""
    targets = {rank: plan.targets[rank] for rank in received}
    try:
        return check_chunks(targets, (chunk for chunks in received.values() for chunk in chunks), plan.contract.format_of)
    except ValueError as error:
        raise RunError(f"the sync cannot be proved: {error}") from None


def check_pairs(plan: SyncPlan, chunks: Sequence[Chunk]) -> None:
    """Raise RunError if one of this rank's chunks fills a place of the engine with other values than the names of both sides say."""
    try:
        check_places(chunks, plan.sources, plan.targets, plan.contract.format_of)
    except ValueError as error:
        raise RunError(f"the sync cannot be proved: {error}") from None


def check_live_engine(plan: SyncPlan, engine: Engine) -> None:
    """Raise RunError if a live engine holds other tensors, or quantizes activations differently, than the precision contract says."""
    check_live_tensors(plan, engine.describe_tensors())
    if plan.contract.engine_format.quantized:
        check_activation_formats(plan.contract, engine.read_activation_formats())


def check_activation_formats(contract: PrecisionContract, formats: Mapping[str, str]) -> None:
    """Raise RunError if a linear layer quantizes its inputs differently than the contract says, or if no layer quantizes them."""
    expected = contract.engine_format
    wrong = [name for name, format in formats.items() if format != str(expected)]
    if wrong or not formats:
        found = f"{wrong[0]} quantizes activations as {formats[wrong[0]]}" if wrong else f"no {expected.name.upper()} linear layer is live"
        raise RunError(f"the engine breaks the precision contract: {found}; precision.mode {contract.mode} says {expected}")


def check_live_tensors(plan: SyncPlan, live: list[dict[str, EngineTensorSpec]]) -> None:
    """Raise RunError for the first tensor of a live engine whose name, shape or dtype differs from what the plan will write."""
    if len(live) != len(plan.targets):
        raise RunError(f"the engine answers with {len(live)} ranks, the plan has {len(plan.targets)}")
    for rank, shards in plan.targets.items():
        check_rank_tensors(rank, shards, plan.contract, live[rank])


def check_rank_tensors(rank: int, shards: Sequence[Shard], contract: PrecisionContract, live: Mapping[str, EngineTensorSpec]) -> None:
    """Check the live tensors of one engine rank, which a sync fills with `shards`, like `check_live_tensors`."""
    stored = list_stored_tensors(shards, contract.format_of)
    expected = {name: (format.dtype, shape) for name, (format, shape) in stored.items()}
    actual = {name: (tensor.dtype, tensor.shape) for name, tensor in live.items()}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            found, wanted = actual.get(name, "absent"), expected.get(name, "absent")
            fix = "; SGLang may have no class for this `architectures` entry and serve its generic model" * ("absent" in (found, wanted))
            raise RunError(f"engine rank {rank}: {name} is {found}, the precision contract says {wanted}{fix}")
