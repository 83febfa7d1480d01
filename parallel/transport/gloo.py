"""The transport `process_group` over gloo, through host memory, for trainer and engines that share GPUs on several nodes.

NCCL refuses a group that contains a GPU twice.
"""

from __future__ import annotations

from parallel.transport import process_group


class Outbox(process_group.Outbox):
    on_device = False


class Inbox(process_group.Inbox):
    on_device = False
