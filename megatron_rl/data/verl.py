"""The format of verl's data sets.

    data_source     name of the set, such as openai/gsm8k
    prompt          a chat: [{"role": "user", "content": "..."}]
    ability         kind of task
    reward_model    {"style": "rule", "ground_truth": ...}: a text, a number, a list, or an object
    extra_info      whatever the reward function needs

A list or an object in `ground_truth` becomes JSON text in `Problem.answer`. All columns reach judges as they are (`Problem.columns`).
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.data.chat import say_dropped, split_chat
from megatron_rl.data.formats import ColumnError, ProblemRow, RowError, is_blank, read_answer


def read_row(row: Mapping[str, Any]) -> ProblemRow:
    """Return the contents of a row. Raise ColumnError if a column is missing, or RowError if its content is malformed."""
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ColumnError("reward_model.ground_truth")
    if "prompt" not in row:
        raise ColumnError("prompt")
    history, question, reply = split_chat(row["prompt"], "prompt")
    say_dropped(reply, "prompt")
    if not question.strip():
        raise RowError("the field prompt has an empty question")
    gold = reward_model["ground_truth"]
    return ProblemRow(
        question, "" if is_blank(gold) else read_answer(gold, "reward_model.ground_truth", structured=True).strip(), 0, history
    )
