"""CUDA IPC: a ring of buffers in the sender's device memory, which engine ranks on the same host open by handle. Handles are sent over the
ring's Unix socket as JSON. Devices are identified by UUID. It ran on one H200 (benchmarks/README.md)."""

import base64
import json
from typing import Any

import torch
from torch.multiprocessing import reductions

from parallel.transport import shared_memory

_MEMORY, _EVENT = ("handle", "storage_bytes", "storage_offset"), ("reference_handle", "reference_offset", "event_handle", "event_needed")
HANDLE_FIELDS = ("device", *_MEMORY, *_EVENT)  # names for the result of `untyped_storage()._share_cuda_()`, in order


class Outbox(shared_memory.Outbox):
    def make_ring(self, nbytes: int) -> tuple[torch.Tensor, list[int], bytes]:
        device = torch.cuda.current_device()
        ring = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
        shared = dict(zip(HANDLE_FIELDS, ring.untyped_storage()._share_cuda_(), strict=True))
        return ring, [], encode(shared, str(torch.cuda.get_device_properties(device).uuid))

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()


class Inbox(shared_memory.Inbox):
    def open_ring(self, descriptors: list[int], description: bytes, nbytes: int) -> torch.Tensor:
        shared, uuid = decode(description)
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        memory, event = ([shared[name] for name in names] for names in (_MEMORY, _EVENT))
        kind = torch.Tensor, torch.Size([nbytes]), (1,), 0, torch.UntypedStorage, torch.uint8
        arguments: list[Any] = [*kind, device_index(uuid, uuids), *memory, False, *event]
        return reductions.rebuild_cuda_tensor(*arguments)

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()


def encode(shared: dict[str, Any], uuid: str) -> bytes:
    """Return handles and sizes as JSON, with bytes as base64."""
    fields = {name: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value for name, value in shared.items()}
    return json.dumps({"shared": fields, "uuid": uuid}).encode()


def decode(description: bytes) -> tuple[dict[str, Any], str]:
    """Return the arguments of `encode`."""
    fields = json.loads(description)
    shared = {name: base64.b64decode(value["base64"]) if isinstance(value, dict) else value for name, value in fields["shared"].items()}
    return shared, fields["uuid"]


def device_index(uuid: str, uuids: list[str]) -> int:
    """Return this process's number of a device. Raise OSError if the device is not visible."""
    if uuid not in uuids:
        raise OSError(f"the engine does not see the trainer's device {uuid}; cuda_ipc needs it in CUDA_VISIBLE_DEVICES")
    return uuids.index(uuid)
