"""Rewards by plain comparison of the answer and of the completion's format."""

import re

from megatron_rl.rewards.thinking import DEFAULT_MARKERS, ThoughtMarkers, split_thought
from megatron_rl.types import Problem, Reward


def match_answer(text: str, problem: Problem, *, pattern: str = "", thinking: ThoughtMarkers | None = DEFAULT_MARKERS) -> Reward:
    """Return 1.0 if the answer in `text` equals `problem.answer`, else 0.0. Surrounding white space is ignored. The answer is the whole
    text after the thought. With `pattern`, it is the last match there, or the first group of that match if there is one."""
    answer = split_thought(text, problem.prompt, thinking).answer
    if answer is not None and pattern:
        matches = list(re.finditer(pattern, answer, re.DOTALL))
        answer = (matches[-1][1 if matches[-1].re.groups else 0] or "") if matches else None
    if answer is None:
        return Reward(0.0, False, answer="")
    correct = answer.strip() == problem.answer.strip()
    return Reward(float(correct), correct, answer=answer.strip())


def match_format(text: str, problem: Problem, *, pattern: str) -> Reward:
    """Return 1.0 if `pattern` matches all of `text`, ignoring surrounding white space, else 0.0. If the chat template has begun the thought
    at the end of the prompt, its start marker belongs to the text."""
    begun = re.search(r"[<\[][\w:]+[>\]]\s*$", problem.prompt)
    texts = (text, begun[0] + text) if begun else (text,)
    matches = any(re.fullmatch(pattern, each.strip(), re.DOTALL) for each in texts)
    return Reward(float(matches), matches)
