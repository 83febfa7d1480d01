"""The transport `process_group` over gloo, for trainer and engines on the same GPUs, which NCCL refuses."""

from parallel.transport import process_group


class Outbox(process_group.Outbox):
    on_device = False


class Inbox(process_group.Inbox):
    on_device = False
