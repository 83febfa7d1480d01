"""CUDA IPC: a ring in the sender's device memory that engine ranks on the same host open by handle. No byte passes through the CPU.

The handles go over the ring's Unix socket as JSON, in torch's own form (`torch.multiprocessing.reductions`). A device is identified by
its UUID, because processes number devices differently. Not run on any machine yet: see docs/reference/sync.md.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch
from torch.multiprocessing import reductions

from parallel.transport.ring import RingInbox, RingOutbox

HANDLE_FIELDS = (
    "device",
    "handle",
    "storage_bytes",
    "storage_offset",
    "reference_handle",
    "reference_offset",
    "event_handle",
    "event_needed",
)
"""Of `untyped_storage()._share_cuda_()`, in its order."""


class Outbox(RingOutbox):
    def make_ring(self, nbytes: int) -> tuple[torch.Tensor, list[int], bytes]:
        device = torch.cuda.current_device()
        ring = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
        shared = dict(zip(HANDLE_FIELDS, ring.untyped_storage()._share_cuda_(), strict=True))
        return ring, [], encode(shared, str(torch.cuda.get_device_properties(device).uuid))

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()


class Inbox(RingInbox):
    def open_ring(self, descriptors: list[int], description: bytes, nbytes: int) -> torch.Tensor:
        shared, uuid = decode(description)
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        return reductions.rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size([nbytes]),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            device_index(uuid, uuids),
            shared["handle"],
            shared["storage_bytes"],
            shared["storage_offset"],
            False,
            shared["reference_handle"],
            shared["reference_offset"],
            shared["event_handle"],
            shared["event_needed"],
        )

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()


def encode(shared: dict[str, Any], uuid: str) -> bytes:
    """Return handles and sizes as JSON, bytes as base64."""
    fields = {name: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value for name, value in shared.items()}
    return json.dumps({"shared": fields, "uuid": uuid}).encode()


def decode(description: bytes) -> tuple[dict[str, Any], str]:
    """Return the arguments of `encode`."""
    fields = json.loads(description)
    shared = {name: base64.b64decode(value["base64"]) if isinstance(value, dict) else value for name, value in fields["shared"].items()}
    return shared, fields["uuid"]


def device_index(uuid: str, uuids: list[str]) -> int:
    """Return this process's number of a device. Raise OSError where it is not visible."""
    if uuid not in uuids:
        raise OSError(f"the engine does not see the trainer's device {uuid}; cuda_ipc needs it in CUDA_VISIBLE_DEVICES")
    return uuids.index(uuid)
