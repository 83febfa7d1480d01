"""Reward functions written for verl or TRL, recognized by the names of their arguments, as functions of `(text, problem)`.

    verl    compute_score(data_source, solution_str, ground_truth, extra_info=None), or without data_source and extra_info
            compute_score(data_sources, solution_strs, ground_truths, extra_infos), which takes lists
            returns a number, a tuple that begins with one, or a dict with `score` and optionally `acc` and `pred`
    TRL     f(completions, **columns), with `prompts` if it takes them, which takes and returns lists

A function gets the columns of the row (`Problem.columns`). verl's `ground_truth` is `reward_model.ground_truth` or the column
`ground_truth`, typed as in the file, or else the gold answer. TRL's completions are texts, or messages if the column `prompt` holds
messages or the function fails on texts. A completion is correct if its reward is above 0, or as `acc` says.
"""

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any

from megatron_rl.types import Problem, Reward, RewardFunction
from parallel.plug import InputError

_BATCHED = {"data_sources": "data_source", "solution_strs": "solution_str", "ground_truths": "ground_truth", "extra_infos": "extra_info"}
_VERL = ("data_source", "ground_truth", "extra_info")


def adapt(name: str, function: Any) -> RewardFunction | None:
    """Return a function written for verl or TRL as a function of (text, problem), or None if it is neither. Raise InputError if it requires
    an argument that cannot come from a row."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not callable, or written in C
        return None
    names = {each.name: None for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    required = {each.name for each in parameters if each.name in names and each.default is each.empty}
    if "completions" in names:
        _refuse(name, required & {"completion_ids", "prompt_ids", "trainer_state"})
        return _TRLFunction(function, required, None if takes_any else names.keys())
    if "ground_truths" in names and "solution_strs" in names:
        _refuse(name, required - _BATCHED.keys())
        return _VerlFunction(function, {each: _BATCHED[each] for each in names if each in _BATCHED}, batched=True)
    if "ground_truth" in names:
        text = "solution_str" if "solution_str" in names else next((each for each in names if each not in _VERL), "")
        _refuse(name, required - {text, *_VERL})
        return _VerlFunction(function, {text: "solution_str"} | {each: each for each in names if each in _VERL}, batched=False)
    return None


def _refuse(name: str, unknown: set[str]) -> None:
    if unknown:
        rule = f"requires the argument {', '.join(sorted(unknown))}, which no reward function gets"
        raise InputError("reward.function", name, rule, "write a function of (text, problem), see docs/guides/rewards.md")


class _VerlFunction:
    """`arguments`: maps parameters to the values that they get."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, str], batched: bool) -> None:
        self._function, self._arguments, self._batched = function, arguments, batched

    def __call__(self, text: str, problem: Problem) -> Reward:
        columns = problem.columns
        model = columns.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else columns.get("ground_truth")
        values = {
            "data_source": columns.get("data_source", problem.source),
            "solution_str": text,
            "ground_truth": problem.answer if truth is None else truth,
            "extra_info": columns.get("extra_info") or {},
        }
        given = {name: [values[value]] if self._batched else values[value] for name, value in self._arguments.items()}
        score = self._function(**given)
        return _read_score(score[0] if self._batched else score)


def _read_score(score: Any) -> Reward:
    if isinstance(score, tuple):  # as verl does: a number, and details
        score = score[0]
    if not isinstance(score, Mapping):
        return make_reward(score)
    reward = make_reward(score["score"])
    answer = score.get("pred")
    return Reward(reward.value, bool(score.get("acc", reward.correct)), answer=None if answer is None else str(answer))


class _TRLFunction:
    """`required`: arguments without a default. `takes`: names of all arguments, or None for any."""

    def __init__(self, function: Callable[..., Any], required: Set[str], takes: Set[str] | None) -> None:
        self._function, self._required, self._takes = function, required, takes

    def __call__(self, text: str, problem: Problem) -> Reward:
        prompt = problem.columns.get("prompt", problem.prompt)
        messages = [{"role": "assistant", "content": text}]
        if not isinstance(prompt, str):
            return self._call(messages, prompt, problem)
        try:
            return self._call(text, prompt, problem)
        except (TypeError, AttributeError, IndexError):  # it looks for the content of a message in a text
            return self._call(messages, [{"role": "user", "content": prompt}], problem)

    def _call(self, completion: Any, prompt: Any, problem: Problem) -> Reward:
        columns = {"answer": problem.answer, **problem.columns}
        values = {**columns, "prompts": prompt, "completions": completion}
        if missing := self._required - values.keys():
            raise LookupError(f"the reward function needs the column {', '.join(sorted(missing))}; the row has {', '.join(columns)}")
        given = {name: [value] for name, value in values.items() if self._takes is None or name in self._takes}
        if self._takes is None:
            given = {name: value for name, value in given.items() if name not in ("prompt", "completion")}  # as in TRL
        (score,) = self._function(**given)
        if score is None:
            raise ValueError("the reward function returned None: it does not apply to this problem")
        return make_reward(score)


def make_reward(score: Any) -> Reward:
    """Return the Reward of a number or a bool, also of NumPy or torch. It is correct if it is above 0. Raise TypeError for other values."""
    value = score.item() if hasattr(score, "item") else score
    if not isinstance(value, bool | int | float):
        raise TypeError(f"the reward function must return a Reward or a number, not {type(score).__name__}")
    return Reward(float(value), value > 0)
