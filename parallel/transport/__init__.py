"""Transports: how chunks of weights get from trainer ranks to engine ranks, one module each (docs/reference/sync.md). No torch."""

from parallel.plug import InputError, Plug
from parallel.transport.base import Transport

SHARED_MEMORY = Transport("parallel.transport.shared_memory", 4 << 20, devices=("cpu",), one_host=True)
DISK = Transport("parallel.transport.disk", 8 << 20, devices=("cpu",), needs_dir=True)
PROCESS_GROUP = Transport("parallel.transport.process_group", shares_gpus=False, lost_errors=(OSError, RuntimeError))
GLOO = Transport("parallel.transport.gloo", lost_errors=(OSError, RuntimeError))
CUDA_IPC = Transport("parallel.transport.cuda_ipc", 1 << 30, devices=("cuda",), one_host=True)

TRANSPORTS = Plug(
    "sync.transport",
    {name: f"parallel.transport:{name.upper()}" for name in ("shared_memory", "process_group", "gloo", "cuda_ipc", "disk")},
)


def load_transport(name: str) -> Transport:
    """Return the transport that `sync.transport` names. Raise InputError if the object is not a `Transport`."""
    transport = TRANSPORTS.load(name)
    if not isinstance(transport, Transport):
        rule = f"must be a parallel.transport.base.Transport, not a {type(transport).__name__}"
        raise InputError("sync.transport", name, rule, "see docs/extending.md")
    return transport
