"""Stop strings that the model spells in its own way: of many short tokens, where the tokenizer would take few long ones.

SGLang looks for a stop string in the text of the last tokens, as many as the tokenizer writes it with, and misses longer spellings.
"""

from __future__ import annotations

from typing import Any


def count_tail_tokens(self: Any, new_tokens: int) -> int:
    """Replace `Req._stop_match_tail_len`: one token for each byte of the longest stop string, and one before it."""
    longest = max((len(text.encode()) for text in self.sampling_params.stop_strs), default=0)
    return min(longest + new_tokens, len(self.output_ids))
