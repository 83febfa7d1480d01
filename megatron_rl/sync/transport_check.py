"""Check that the chosen transport can work on these machines and devices, before anything heavy starts."""

from __future__ import annotations

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import UserError, as_user_error
from parallel.transport import TRANSPORTS

_ON_OTHER_DEVICES = {
    "cuda": (
        "moves what lies in the host's memory, and here trainer and engines are on GPUs",
        "use cuda_ipc on one host; process_group or gloo on several",
    ),
    "cpu": ("needs CUDA, and this machine has no CUDA device", "use shared_memory"),
}


def check_transport(settings: SyncConfig, shared: bool = False) -> None:
    """Raise UserError for a transport that cannot work on this machine. `shared`: trainer and engines have the same devices."""
    transport, device = settings.load_transport(), "cuda" if torch.cuda.is_available() else "cpu"
    with as_user_error():
        for half in ("Outbox", "Inbox"):
            TRANSPORTS.load(f"{transport.module}:{half}")
    if device not in transport.devices:
        raise UserError("sync.transport", settings.transport, *_ON_OTHER_DEVICES[device])
    if shared and device == "cuda" and not transport.shares_gpus:
        rule = "takes no GPU twice, and trainer and engines share theirs (placement.kind)"
        raise UserError("sync.transport", settings.transport, rule, "use cuda_ipc on one host, gloo on several")
    if settings.delta == "on" and device == "cuda":
        raise UserError("sync.delta", "on", "compares weights in the host's memory, and here they are on GPUs", 'set "off" or "auto"')
    if transport.needs_dir and settings.dir is None:
        rule = f"must be set for sync.transport = {settings.transport}"
        raise UserError("sync.dir", None, rule, "name a folder that trainer and engine both see")


def check_one_host(settings: SyncConfig, apart: str) -> None:
    """Raise UserError for a transport within one host, where `apart` says what is on several."""
    if settings.load_transport().one_host:
        rule = f"needs trainer and engines on one host; {apart}"
        raise UserError("sync.transport", settings.transport, rule, "use process_group, gloo, or disk with a shared folder")
