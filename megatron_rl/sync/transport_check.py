"""Check that the chosen transport can work on these machines and devices, before anything heavy starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import UserError


def check_transport(settings: SyncConfig, shared: bool = False) -> None:
    """Raise UserError for a transport that cannot work on this machine. `shared`: trainer and engines have the same devices."""
    if settings.transport == "process_group" and shared and torch.cuda.is_available():
        rule = "is NCCL's, which takes no GPU twice, and trainer and engines share theirs (placement.kind)"
        raise UserError("sync.transport", "process_group", rule, "use cuda_ipc on one host, gloo on several")
    if settings.transport in ("shared_memory", "disk") and torch.cuda.is_available():
        rule = "moves what lies in the host's memory, and here trainer and engines are on GPUs"
        raise UserError("sync.transport", settings.transport, rule, "use cuda_ipc on one host; process_group or gloo on several")
    if settings.transport == "cuda_ipc" and not torch.cuda.is_available():
        raise UserError("sync.transport", "cuda_ipc", "needs CUDA, and this machine has no CUDA device", "use shared_memory")
    if settings.transport == "disk" and settings.dir is None:
        raise UserError("sync.dir", None, "must be set for sync.transport = disk", "name a folder that trainer and engine both see")


def check_hosts(settings: SyncConfig, hosts: Sequence[str]) -> None:
    """Raise UserError where trainer ranks on these hosts, and an engine on the first of them, cannot use the transport."""
    if settings.transport in ("shared_memory", "cuda_ipc") and len(set(hosts)) > 1:
        rule = f"needs trainer and engine on one host; the trainer's ranks are on {len(set(hosts))}"
        raise UserError("sync.transport", settings.transport, rule, "use process_group, gloo, or disk with a shared folder")
