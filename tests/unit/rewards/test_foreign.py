"""Reward functions with the signatures of verl, TRL and verifiers, run as they stand on the columns of a row."""

import sys
from array import array

import numpy as np
import pytest
from pydantic import ValidationError
from support.data import make_config

from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.sets import read_set
from megatron_rl.errors import UserError
from megatron_rl.rewards import load_function
from megatron_rl.rewards.foreign import Sample
from megatron_rl.rewards.pool import call_reward_function
from megatron_rl.rewards.scorer import Scorer, check_rewards
from megatron_rl.types import Problem, Reward
from parallel.plug import InputError

MODULE = """
import fractions

import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == str(ground_truth["target"][0])
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str, "from": (data_source, extra_info["index"])}

def short(solution_str, ground_truth, method="strict", format_score=0.1):
    return 1 if solution_str == ground_truth else format_score * (method == "loose")

def other_name(model_output, ground_truth):
    return (model_output == ground_truth, "details")

def batched(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]

async def coroutine(solution_str, ground_truth, **kwargs):
    return {"score": kwargs["extra_info"]["num_turns"], "acc": kwargs["data_source"] == "qa" and kwargs["extra_info"]["index"] == 7}

def without_truth(solution_str, extra_info=None): return extra_info["index"]

def with_settings(solution_str, ground_truth, *, factor): return factor

def with_level(completions, level, **kwargs): return [level]

def with_tokenizer(solution_str, ground_truth, tokenizer): return 1.0

def texts(prompts, completions, solution, **kwargs):
    assert prompts == ["1+1?"] and kwargs == {"level": [3], "answer": ["2"], "completion_ids": [[5, 6]]}, (prompts, kwargs)
    return [float(completion == each) for completion, each in zip(completions, solution, strict=True)]

def messages(completions, solution, **kwargs):
    assert "prompt" not in kwargs
    return [float(completion[0]["content"] == each) for completion, each in zip(completions, solution, strict=True)]

def no_columns(completions): return [len(completion) for completion in completions]

def skips(completions, **kwargs): return [None for _ in completions]

class Short:
    async def __call__(self, completion_ids, **kwargs): return np.array([2.0 - len(ids) for ids in completion_ids])

short_ids = Short()

def logs(completions, log_extra, log_metric=None):
    log_extra("answer", completions)
    return [1.0 if log_metric is None else 0.0]

def no_list(completions): return 1.0

def two(completions): return [1.0, 2.0]

def raises(completions): return [1 / 0 if completions == ["2"] else completions[0] + completions[1]]

def with_state(completions, trainer_state): return [1.0]

def last_message(completion, answer): return float(completion[-1]["content"] == answer)

async def everything(prompt, completion, answer, state, task, info, **kwargs):
    assert state["completion"] == completion and kwargs == {}
    return float(answer in completion) * info["weight"] * (task == "sum")

def any_name(response, answer): return response == answer

def turns(completion, state): return sum(message["role"] == "assistant" for message in completion) + state["turn"] / 10

def with_parser(parser, completion): return 1.0

def hidden(*args, **kwargs): return short(*args, **kwargs)

class Unprintable(Exception):
    def __str__(self): raise ValueError

def unprintable(text, problem): raise Unprintable

def fraction(text, problem): return fractions.Fraction(1, 2)

def flag(text, problem): return np.bool_(text == problem.answer)

def number(text, problem): return np.float32(len(text) - 2)

def words(text, problem): return "right"

def nothing(text, problem): return None
"""
VERL = {
    "data_source": "qa", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": {"target": [2, "two"]}}, "extra_info": {"index": 7, "split": "train"},
}  # fmt: skip
TRL = {"prompt": "1+1?", "solution": "2", "level": 3, "answer": "2"}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "ported_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("ported_rewards", None)


def judge(name: str, text: str, answer: str = "2", dialogue: tuple[str, ...] = (), **columns: object):
    function, problem = load_function(f"ported_rewards:{name}"), Problem("p", "Q: 1+1?", answer, columns=columns)
    return call_reward_function(function, text, problem, Sample(array("i", [5, 6]).tobytes(), dialogue))


def test_a_verl_function_gets_the_typed_columns():
    right, wrong = judge("compute_score", "2", **VERL), judge("compute_score", "3", **VERL)
    assert (right.value, right.correct, right.answer, right.error) == (1.0, True, "2", "")
    assert (wrong.value, wrong.correct, wrong.answer) == (-1.0, False, "3")


def test_verl_functions_of_other_shapes():
    """Without columns, the ground truth is the gold answer."""
    for name in ("short", "other_name", "batched"):
        assert judge(name, "2").value == 1.0 and judge(name, "2").correct
        assert judge(name, "3").value == 0.0 and not judge(name, "3").correct
        assert judge(name, "5", ground_truth="5").correct, "a column takes precedence"
    assert judge("without_truth", "2", **VERL).value == 7
    for dialogue, turns in (((), 2), (("a", "b", "c"), 4)):
        assert judge("coroutine", "2", dialogue=dialogue, **VERL) == Reward(turns, True)


def test_trl_functions_get_lists_of_columns():
    assert judge("texts", "2", **TRL).correct and not judge("texts", "3", **TRL).correct
    for prompt in ("1+1?", [{"role": "user", "content": "1+1?"}]):
        right, wrong = judge("messages", "2", **{**TRL, "prompt": prompt}), judge("messages", "3", **{**TRL, "prompt": prompt})
        assert right.correct and not wrong.correct and not wrong.error
    assert judge("no_columns", "abc", **TRL).value == 3.0
    assert judge("messages", "2", question="1+1?").error == (
        "LookupError: the reward function needs the column solution; the row has answer, question"
    )
    assert "returned None" in judge("skips", "2").error
    assert judge("short_ids", "2") == Reward(0.0, False) and judge("logs", "2") == Reward(1.0, True)
    for name, error in (("no_list", "must return a list of numbers, not float"), ("two", "returned 2 rewards for 1 completion")):
        assert judge(name, "2").error.endswith(f"Error: the reward function {error}")
    assert "division by zero" in judge("raises", "2").error and "index out of range" in judge("raises", "3").error, "of the first form"


def test_functions_of_verifiers():
    row = {"info": '{"weight": 0.5}', "task": "sum"}
    for prompt in ({}, {"prompt": "1+1?"}, {"prompt": [{"role": "user", "content": "1+1?"}]}):
        assert judge("last_message", "2", **prompt).correct and judge("last_message", "3", **prompt) == Reward(0.0, False)
    assert judge("everything", "2", **row).value == 0.5 and judge("everything", "3", **row) == Reward(0.0, False)
    assert judge("any_name", "2").correct and judge("any_name", "3") == Reward(0.0, False)
    assert judge("turns", "abc", dialogue=("a", "b", "c")).value == 2.2


def test_a_function_that_does_not_apply_is_left_out_of_the_sum():
    names = ("ported_rewards:skips", "ported_rewards:any_name")
    problems = [Problem("p", "1+1?", "2")] * 2
    config = RewardConfig.model_validate({"functions": tuple({"name": name} for name in names), "workers": 1})
    check_rewards(config, problems)
    with Scorer(config, print) as scorer:
        assert scorer.score(["2", "3"], problems, [1, 1]) == [
            Reward(value, value > 0, parts={"ported_rewards:any_name": value}) for value in (1.0, 0.0)
        ]
    with pytest.raises(UserError, match="ported_rewards:skips': fails on the first problems .* it does not apply to this problem"):
        check_rewards(RewardConfig(function=names[0]), problems)


def test_a_function_may_return_a_number():
    assert judge("flag", "2").correct and not judge("flag", "3").correct
    assert [(judge("number", text).value, judge("number", text).correct) for text in ("abcd", "ab", "a")] == [
        (2, True),
        (0, False),
        (-1, False),
    ]
    assert judge("fraction", "2").value == 0.5
    assert judge("unprintable", "2").error == "Unprintable: its message cannot be written"
    for name, kind in (("words", "str"), ("nothing", "NoneType")):
        assert judge(name, "2").error == f"TypeError: the reward function must return a Reward or a number, not {kind}"


@pytest.mark.parametrize("name, argument", [("with_tokenizer", "tokenizer"), ("with_state", "trainer_state"), ("with_parser", "parser")])
def test_arguments_that_no_row_has_are_refused(name, argument):
    with pytest.raises(InputError, match=f"requires the argument {argument}, which no reward function gets"):
        load_function(f"ported_rewards:{name}")
    with pytest.raises(InputError, match="names none of its arguments"):
        load_function("ported_rewards:hidden")


def test_rows_of_verl_reach_the_function_in_a_worker(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**VERL, "reward_model": {"ground_truth": {"target": ["2", "two"]}}}]), tmp_path / "a.parquet"
    )
    data = make_config(train=str(tmp_path / "a.parquet"), format="verl", chat=True).data
    (problem,) = read_set(data.train[0], data, "data.train").problems
    config = RewardConfig(function="ported_rewards:compute_score", workers=1)
    check_rewards(config)
    with Scorer(config, print) as scorer:
        rewards = scorer.score(["2", "3"], [problem] * 2, [1, 1])
    assert [(reward.value, reward.correct, reward.error) for reward in rewards] == [(1.0, True, ""), (-1.0, False, "")]
    assert np.isfinite(rewards[0].value)


def test_settings_are_keyword_arguments():
    part = {"name": "ported_rewards:with_settings", "settings": {"factor": 3}}
    config = RewardConfig.model_validate({"functions": (part,), "workers": 1})
    with Scorer(config, print) as scorer:
        assert scorer.score(["2"], [Problem("p", "?", "2")], [1]) == [Reward(3.0, True)]
    level = load_function("ported_rewards:with_level", {"level": 7})
    assert call_reward_function(level, "2", Problem("p", "?", "2", columns={"level": 3})).value == 7, "not the column"
    for settings, line in (({}, "requires the argument factor"), ({"factor": 1, "other": 2}, "unexpected keyword argument 'other'")):
        wrong = config.model_copy(update={"functions": (config.functions[0].model_copy(update={"settings": settings}),)})
        with pytest.raises(UserError, match=line):
            check_rewards(wrong, [Problem("p", "?", "2")])
    with pytest.raises(ValidationError, match="math has no setting settings"):
        RewardConfig.model_validate({"functions": ({"name": "math", "settings": {"factor": 3}},)})
