"""gloo with one event loop per process, whatever the number of its groups.

torch gives every gloo group a device of its own, whose thread polls a hundred times a second. Megatron makes some twenty groups, so
eight ranks on one machine wake 16,000 times a second and leave little of two cores. torch's own hook for backends lets all groups share
a device.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_NAME = "gloo_one_loop"


@functools.cache
def backend() -> str:
    """Return the name to give to `init_process_group`; groups made later inherit it. Registers it with torch at the first call."""
    dist.Backend.register_backend(_NAME, _new_group, devices=["cpu"])
    return _NAME


@functools.cache
def _devices() -> list[Any]:
    """Choose devices as torch does: the interfaces of GLOO_SOCKET_IFNAME, or the one of this machine's host name."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def _new_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return group(store, rank, size, timeout, _devices())


def group(store: Any, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    """Make a process group over these devices of gloo; returns when every member has joined."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = devices, timeout
    return gloo(store, rank, size, options)
