"""Let the members of a group share their prompt's prefill.

They arrive together, and SGLang finds a prompt in its prefix cache only when another request has computed it: by itself it computes the
prompt once for each member.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

MIN_SHARED = 16
"""Uncached tokens from which a request waits; fewer cost less than a pass of their own."""


def add_request(original: Callable[..., Any], self: Any, req: Any, *args: Any, **named: Any) -> Any:
    """Wrap `PrefillAdder.add_one_req`: leave a request in the queue while another computes the very tokens that it needs.

    The first stands in this batch, or in the one before, whose result has not come yet where SGLang overlaps the two.
    """
    ids = req.full_untruncated_fill_ids
    if self.tree_cache.disable or len(ids) - req.prefix_len <= MIN_SHARED:
        return original(self, req, *args, **named)
    started = (other for other in self.running_batch.reqs if not other.output_ids)
    if any(other.full_untruncated_fill_ids == ids for other in chain(self.can_run_list, started)):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(self, req, *args, **named)
