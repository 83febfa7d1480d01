"""Hooks on SGLang's scheduler: shared prefill of equal prompts, stop strings, and the longest request."""

from collections.abc import Callable
from typing import Any

MIN_SHARED = 8  # largest number of uncached tokens for which a request does not wait, as they cost less than a separate pass
RESERVED = 2  # tokens of the KV cache that no request may fill, so that SGLang admits the longest one
_STARTED = "_megatron_rl_started"


def add_request(original: Callable[..., Any], self: Any, req: Any, *args: Any, **named: Any) -> Any:
    """Wrap `PrefillAdder.add_one_req`: keep a request in the queue while another request computes the same prompt, in this batch or in the
    preceding one if SGLang overlaps batches. SGLang would compute the prompt once per completion of a group."""
    is_short = len(req.full_untruncated_fill_ids) - req.prefix_len <= MIN_SHARED
    if not self.tree_cache.disable and not is_short and _key(req) in _list_started(self):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(self, req, *args, **named)


def _list_started(adder: Any) -> set[bytes]:
    """Return the prompts of this batch and of the running one. The adder lives for one batch and keeps them."""
    prompts, seen = getattr(adder, _STARTED, (None, 0))
    if prompts is None:
        prompts = {_key(req) for req in adder.running_batch.reqs if not req.output_ids}
    prompts.update(map(_key, adder.can_run_list[seen:]))
    setattr(adder, _STARTED, (prompts, len(adder.can_run_list)))
    return prompts


def _key(req: Any) -> bytes:
    return req.full_untruncated_fill_ids.tobytes()


def count_tail_tokens(self: Any, new_tokens: int) -> int:
    """Replace `Req._stop_match_tail_len`: a token per byte of the longest stop string, which a model may spell with more tokens than
    usual."""
    longest = max((len(text.encode()) for text in self.sampling_params.stop_strs), default=0)
    return min(longest + new_tokens, len(self.output_ids))


def use_whole_context(original: Callable[..., tuple[Any, ...]], self: Any) -> tuple[Any, ...]:
    """Wrap `TpModelWorker.get_worker_info`, which returns the bounds of a request as fifth and sixth: prompt and completion may fill all
    positions of the model, and a prompt all but one. SGLang would cut completions two positions earlier without an error, and refuse
    prompts of the last six."""
    info = original(self)
    longest = min(self.model_config.context_len + 1, self.model_runner.effective_logical_max_total_num_tokens - 1)
    return *info[:4], longest, longest - 1, *info[6:]
