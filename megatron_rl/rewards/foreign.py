"""Reward functions written for verl, TRL or verifiers, recognized by the names of their arguments.

    verl        compute_score(data_source, solution_str, ground_truth, extra_info=None), or some of these, with any name for the text
                compute_score(data_sources, solution_strs, ground_truths, extra_infos), which takes lists
                returns a number, a tuple that begins with one, or a dict with `score` and optionally `acc` and `pred`
    TRL         f(completions, **columns), with `prompts` and `completion_ids` if it takes them, which takes and returns lists
    verifiers   f(completion, answer), or some of prompt, completion, answer, state, task and info, which returns a number

A function gets the columns of the row (`Problem.columns`). verl's `ground_truth` is `reward_model.ground_truth` or the column
`ground_truth`, typed as in the file, or else the gold answer. Completions of TRL and verifiers are messages if the column `prompt` holds
messages, and otherwise texts; a function that fails on one form gets the other. A completion is correct if its reward is above 0, or as
`acc` says. Functions may be coroutines.
"""

import contextlib
import functools
import inspect
import json
import numbers
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from megatron_rl.types import Problem, Reward
from parallel.plug import InputError

DOES_NOT_APPLY = "the reward function returned None: it does not apply to this problem"
"""Error of the Reward of a TRL function that returns None."""

_BATCHED = {"data_sources": "data_source", "solution_strs": "solution_str", "ground_truths": "ground_truth", "extra_infos": "extra_info"}
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERIFIERS = ("prompt", "completion", "answer", "state", "task", "info")
_UNKNOWN = {"trainer_state", "environments", "prompt_ids", "parser", "judge"}  # objects of a trainer or a rubric
_WRONG_FORM = (TypeError, AttributeError, IndexError, AssertionError)  # errors of a function that gets a text instead of messages


@dataclass(frozen=True)
class Sample:
    """What a function may ask about a completion apart from its text."""

    token_ids: bytes = b""  # int32, in the order of this machine: most functions never read a token
    dialogue: Sequence[str] = ()  # alternating texts of policy and environment; empty without an environment

    @property
    def verl_turns(self) -> int:
        """Number of turns as verl counts them: the prompt is one."""
        return (len(self.dialogue) or 1) + 1


def adapt(name: str, function: Any) -> "ForeignFunction | None":
    """Return a function written for verl, TRL or verifiers, or None if it is another one. Raise InputError if it requires an argument
    that nothing provides, or names none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not callable, or written in C
        return None
    names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    required = {each.name for each in parameters if each.name in names and each.default is each.empty}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not names:
        rule = "names none of its arguments, so that nobody knows what it takes"
        raise InputError("reward.function", name, rule, "name them; a decorator keeps the names with functools.wraps")
    if not {"completions", "completion_ids"}.isdisjoint(names):
        _refuse(name, required & _UNKNOWN)
        return _TRLFunction(function, names, required, takes_any)
    if "solution_strs" in names:
        _refuse(name, required - _BATCHED.keys())
        return _BatchedVerlFunction(function, names, required, takes_any)
    if "problem" in names:
        return None
    if not {"solution_str", "ground_truth"}.isdisjoint(names):
        text = "solution_str" if "solution_str" in names else next((each for each in names if each not in _VERL), "solution_str")
        _refuse(name, required - {text, *_VERL})
        return _VerlFunction(function, names, required, takes_any, text)
    if not {"completion", "answer", "state"}.isdisjoint(names):
        text = "" if "completion" in names else next((each for each in names if each in required and each not in _VERIFIERS), "")
        _refuse(name, required & _UNKNOWN)
        return _VerifiersFunction(function, names, required, takes_any, text)
    return None


def _refuse(name: str, unknown: set[str]) -> None:
    if unknown:
        rule = f"requires the argument {', '.join(sorted(unknown))}, which no reward function gets"
        fix = "set it in settings or by functools.partial, or write a function of (text, problem), see docs/guides/rewards.md"
        raise InputError("reward.function", name, rule, fix)


@dataclass(frozen=True)
class ForeignFunction:
    """A function of another library."""

    function: Callable[..., Any]
    names: Sequence[str]  # of all arguments
    required: set[str]  # arguments without a default
    takes_any: bool  # whether the function takes any keyword arguments
    text: str = ""  # argument that gets the text, if its name says nothing

    def __call__(self, text: str, problem: Problem, sample: Sample) -> Reward:
        raise NotImplementedError

    def call(self, problem: Problem, values: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Any:
        """Call the function with the arguments that it takes of `values`, and those that it requires of `more`."""
        given = {name: value for name, value in (more or {}).items() if name in self.required}
        given |= {name: value for name, value in values.items() if self.takes_any or name in self.names}
        if isinstance(self.function, functools.partial):  # settings take precedence
            given = {name: value for name, value in given.items() if name not in self.function.keywords}
        if missing := self.required - given.keys():
            columns = ", ".join({"answer": None, **problem.columns})
            raise LookupError(f"the reward function needs the column {', '.join(sorted(missing))}; the row has {columns}")
        return wait_for(self.function(**given))


class _VerlFunction(ForeignFunction):
    def __call__(self, text: str, problem: Problem, sample: Sample) -> Reward:
        values = _list_verl_values(text, problem, sample)
        if self.text != "solution_str":
            values[self.text] = values.pop("solution_str")
        return _read_score(self.call(problem, values))


class _BatchedVerlFunction(ForeignFunction):
    def __call__(self, text: str, problem: Problem, sample: Sample) -> Reward:
        values = _list_verl_values(text, problem, sample)
        return _read_score(_take_only(self.call(problem, {name: [values[value]] for name, value in _BATCHED.items()})))


def _list_verl_values(text: str, problem: Problem, sample: Sample) -> dict[str, Any]:
    columns = problem.columns
    model, extra = columns.get("reward_model"), columns.get("extra_info") or {}
    truth = model.get("ground_truth") if isinstance(model, Mapping) else columns.get("ground_truth")
    return {
        "data_source": columns.get("data_source", problem.source),
        "solution_str": text,
        "ground_truth": problem.answer if truth is None else truth,
        "extra_info": {**extra, "num_turns": sample.verl_turns, "rollout_reward_scores": {}} if isinstance(extra, Mapping) else extra,
    }


def _read_score(score: Any) -> Reward:
    if isinstance(score, tuple):  # as verl does: a number, and details
        score = score[0]
    if not isinstance(score, Mapping):
        return make_reward(score)
    reward = make_reward(score["score"])
    answer = score.get("pred")
    return Reward(reward.value, bool(score.get("acc", reward.correct)), answer=None if answer is None else str(answer))


class _TRLFunction(ForeignFunction):
    def __call__(self, text: str, problem: Problem, sample: Sample) -> Reward:
        columns = {"answer": problem.answer, **problem.columns}
        if self.takes_any:
            left_out = ("prompt", "completion", "completion_ids")  # as in TRL
            columns = {name: value for name, value in columns.items() if name not in left_out}

        def call(prompt: Any, completion: Any) -> Any:
            values = {
                **columns,
                "prompts": prompt,
                "completions": completion,
                "completion_ids": array("i", sample.token_ids).tolist(),
            }
            logs = {"log_extra": _ignore, "log_metric": _ignore}
            return self.call(problem, {name: [value] for name, value in values.items()}, logs)

        score = _take_only(_call_in_either_form(call, text, problem, sample))
        return Reward(0.0, False, error=DOES_NOT_APPLY) if score is None else make_reward(score)


def _ignore(*_: object) -> None:
    """Log nothing."""


class _VerifiersFunction(ForeignFunction):
    def __call__(self, text: str, problem: Problem, sample: Sample) -> Reward:
        info = problem.columns.get("info") or {}
        if isinstance(info, str):
            info = json.loads(info)
        own_text = {self.text: text} if self.text else {}

        def call(prompt: Any, completion: Any) -> Any:
            task = problem.columns.get("task", "default")
            values = {"prompt": prompt, "completion": completion, "answer": problem.answer, "task": task, "info": info}
            state = {**values, "turn": sample.verl_turns // 2, "responses": []}
            return self.call(problem, {**values, "state": state, **own_text}, problem.columns)

        return make_reward(_call_in_either_form(call, text, problem, sample))


def _call_in_either_form(call: Callable[[Any, Any], Any], text: str, problem: Problem, sample: Sample) -> Any:
    """Return the result of `call(prompt, completion)`, with messages or texts, whichever the row has. If it fails, try the others."""
    prompt, dialogue = problem.columns.get("prompt"), sample.dialogue or [text]
    completion = [{"role": "user" if number % 2 else "assistant", "content": each} for number, each in enumerate(dialogue)]
    texts = (prompt if isinstance(prompt, str) else problem.prompt, text)
    messages = (prompt if isinstance(prompt, list) else [{"role": "user", "content": texts[0]}], completion)
    first, second = (messages, texts) if isinstance(prompt, list) else (texts, messages)
    try:
        return call(*first)
    except _WRONG_FORM:
        with contextlib.suppress(Exception):
            return call(*second)
        raise


def _take_only(scores: Any) -> Any:
    try:
        scores = list(scores)
    except TypeError:
        raise TypeError(f"the reward function must return a list of numbers, not {type(scores).__name__}") from None
    if len(scores) != 1:
        raise ValueError(f"the reward function returned {len(scores)} rewards for 1 completion")
    return scores[0]


def make_reward(score: Any) -> Reward:
    """Return the Reward of a real number or a bool, also of NumPy or torch. It is correct if it is above 0. Raise TypeError for other
    values."""
    value = score.item() if hasattr(score, "item") else score
    if not isinstance(value, numbers.Real | Decimal):
        raise TypeError(f"the reward function must return a Reward or a number, not {type(score).__name__}")
    number = float(value)
    return Reward(number, number > 0)


def wait_for(result: Any) -> Any:
    """Return the result of a coroutine, or any other value as it is. All coroutines of a process have the same event loop."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return _get_runner().run(wait())


@functools.cache
def _get_runner() -> Any:
    import asyncio  # few workers need it

    return asyncio.Runner()
