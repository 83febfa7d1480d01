"""Let the members of a group share their prompt's prefill.

They arrive together, and SGLang finds a prompt in its prefix cache only when another request has computed it: by itself it computes the
prompt once for each member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIN_SHARED = 16
"""Uncached tokens from which a request waits; fewer cost less than a pass of their own."""
_KEPT = "_megatron_rl_started"


def add_request(original: Callable[..., Any], self: Any, req: Any, *args: Any, **named: Any) -> Any:
    """Wrap `PrefillAdder.add_one_req`: leave a request in the queue while another computes the very tokens that it needs.

    The first stands in this batch, or in the one before, whose result has not come yet where SGLang overlaps the two.
    """
    ids = req.full_untruncated_fill_ids
    if self.tree_cache.disable or len(ids) - req.prefix_len <= MIN_SHARED:
        return original(self, req, *args, **named)
    if _key(req) in _list_started(self):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(self, req, *args, **named)


def _list_started(adder: Any) -> set[bytes]:
    """Return the prompts of this batch, and those launched before. They are kept with the adder, which lives for one batch: each request is
    looked at once, however many wait."""
    prompts, seen = getattr(adder, _KEPT, (None, 0))
    if prompts is None:
        prompts = {_key(req) for req in adder.running_batch.reqs if not req.output_ids}
    prompts.update(map(_key, adder.can_run_list[seen:]))
    setattr(adder, _KEPT, (prompts, len(adder.can_run_list)))
    return prompts


def _key(req: Any) -> bytes:
    return req.full_untruncated_fill_ids.tobytes()
