"""Completions of several turns."""

import numpy as np

from megatron_rl.types import Completion


def append_tokens(
    completion: Completion, ids_T: np.ndarray, logprobs_T: np.ndarray | None, lags_T: np.ndarray | None, text: str | None
) -> None:
    """Append tokens of the policy, or of what replies to it if `logprobs_T` is None. `lags_T`: see `Completion.version_lags_T`. `text`: of
    the tokens, or None if the completion has one turn only."""
    completion.output_ids_T = np.concatenate([completion.output_ids_T, ids_T])
    logprobs = np.zeros(len(ids_T), np.float32) if logprobs_T is None else logprobs_T
    completion.logprobs_T = np.concatenate([completion.logprobs_T, logprobs])
    if lags_T is not None:
        completion.version_lags_T = _extend(completion.version_lags_T, lags_T)
    if text is not None:
        completion.response_mask_T = _extend(completion.response_mask_T, np.full(len(ids_T), logprobs_T is not None))
        completion.dialogue.append(text)


def _extend(known: np.ndarray | None, more: np.ndarray) -> np.ndarray:
    return more if known is None else np.concatenate([known, more])
