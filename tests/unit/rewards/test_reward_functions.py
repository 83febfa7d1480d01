"""The built-in reward functions on correct, wrong and hostile answers, and on the real gold answers of GSM8K and MATH-500."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.sets import read_problem_set
from megatron_rl.rewards import load_function, match
from megatron_rl.rewards import math as math_reward
from megatron_rl.types import Problem, Reward
from parallel.plug import InputError

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
GSM8K_TEST, MATH_500 = DATA / "gsm8k" / "test.jsonl", DATA / "math500" / "test.jsonl"


def _problem(answer: str) -> Problem:
    return Problem("p", "?", answer)


@pytest.mark.parametrize(
    "verdict, text, gold",
    [
        (True, r"so \boxed{72}", "72"),
        (True, r"\boxed{1} and then \boxed{1,\!080}", "1080"),
        (True, "... = 72\n#### 1,080", "1080"),
        (True, "The answer is **72**. Then 3 more words.", "72"),
        (True, r"Thus the answer is $\$5$.", "5"),
        (True, "She sold 48 + 24 = 72 clips in a day.", "72"),
        (True, "-0012", "-12"),
        (False, r"72 or \boxed{73}", "72"),
        (False, "72\n#### 73", "72"),
        (False, "the answer is 73. No, 72", "72"),
        (False, "#### -5", "5"),
    ],
)
def test_the_fast_path_decides_between_integers_and_leaves_expressions_to_math_verify(verdict, text, gold):
    assert math_reward.compare_integers(text, gold) is verdict
    expressions = ["x = 3/5", "3 + 5", "it is 5x", "sqrt 5", "5 pi", r"\frac{3}{5}", "the answer is 10 or 5", r"\boxed{2.5 \cdot 2}"]
    for expression in [*expressions, "5.5", "2^5"]:
        assert math_reward.compare_integers(expression, "5") is None


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_the_fast_path_compares_values(stated, gold):
    for text in (rf"\boxed{{{stated:,}}}", f"#### {stated}", f"The answer is {stated}."):
        assert math_reward.compare_integers(text, str(gold)) == (stated == gold)


@pytest.mark.parametrize(
    "text, gold, correct",
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{72.0}", "72", True),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
        ("no idea", r"\frac{1}{2}", False),
        ("", "72", False),
        (r"\boxed{", "72", False),
    ],
)
def test_math_verify_decides_the_rest(text, gold, correct):
    assert math_reward.reward(text, _problem(gold)) == Reward(float(correct), correct)


@pytest.mark.parametrize(
    "text, pattern, correct",
    [
        (" Paris\n", "", True),
        ("paris", "", False),
        ("It is Paris", "", False),
        ("<answer>Rome</answer> no: <answer>\nParis</answer>", "<answer>(.*?)</answer>", True),
        ("<answer>Paris</answer> no: <answer>Rome</answer>", "<answer>(.*?)</answer>", False),
        ("no tags: Paris", "<answer>(.*?)</answer>", False),
        ("I say Paris, not Lyon", "Paris|Rome", True),
        ("()", r"(x)?\(\)", False),  # a group that took no part
    ],
)
def test_exact_compares_word_for_word(text, pattern, correct):
    settings = {"pattern": pattern} if pattern else {}
    assert match.match_answer(text, _problem("Paris"), **settings) == Reward(float(correct), correct)


@pytest.mark.parametrize(
    "text, fits", [("<think>\na\n\nb</think> 5", True), ("\n<think></think>5 \n", True), ("so <think>a</think>5", False), ("", False)]
)
def test_format_matches_the_whole_completion(text, fits):
    assert match.match_format(text, _problem("5"), pattern="<think>.*</think>.+") == Reward(float(fits), fits)


async def asynchronous(text, problem): ...


def without_a_problem(text): ...


def with_defaults(text, problem, extra=1): ...


def test_functions_are_found_by_name_and_what_is_none_is_refused():
    assert load_function("math") is load_function("megatron_rl.rewards.math:reward") is math_reward.reward
    assert load_function("format", {"pattern": "a+"})("aa", _problem("")).correct
    assert load_function(f"{__name__}:with_defaults") is with_defaults
    for name in ("absent", "DATA", "asynchronous", "without_a_problem"):
        with pytest.raises(InputError, match=f"^reward.function = {__name__}:{name}: "):
            load_function(f"{__name__}:{name}")


needs_gsm8k = pytest.mark.skipif(not GSM8K_TEST.is_file(), reason=f"the GSM8K file is not at {GSM8K_TEST}")
needs_math500 = pytest.mark.skipif(not MATH_500.is_file(), reason=f"the MATH-500 file is not at {MATH_500}")


def _correct(texts: list[str], golds: list[str]) -> int:
    return sum(math_reward.reward(text, _problem(gold)).correct for text, gold in zip(texts, golds, strict=True))


@needs_gsm8k
def test_real_gsm8k_golds_verify_and_another_problems_gold_does_not():
    problems = read_problem_set(DataSourceConfig(source=str(GSM8K_TEST)), DataConfig(format="gsm8k"), "data.eval")
    golds = [problem.answer for problem in problems]
    texts = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text().splitlines()]
    assert _correct(texts, golds) == _correct([rf"\boxed{{{gold}}}" for gold in golds], golds) == len(golds) == 1319
    others = golds[1:] + golds[:1]
    assert _correct(texts, others) == sum(gold == other for gold, other in zip(golds, others, strict=True))
    for problem in problems[:50]:  # through math-verify too
        text = rf"so \boxed{{\frac{{{2 * int(problem.answer)}}}{{2}}}}"
        assert math_reward.compare_integers(text, problem.answer) is None
        assert math_reward.reward(text, problem).correct


@needs_math500
def test_real_math500_golds_verify_and_shuffled_ones_fail():
    rows = [json.loads(line) for line in MATH_500.read_text().splitlines()]
    golds = [row["answer"] for row in rows]
    assert _correct([row["solution"] for row in rows], golds) == len(golds) == 500
    assert _correct([rf"so \boxed{{{gold}}}" for gold in golds], golds) == 500
    shuffled = random.Random(0).sample(golds, len(golds))
    pairs = [(rf"\boxed{{{stated}}}", gold) for stated, gold in zip(shuffled, golds, strict=True) if stated != gold][:200]
    assert len(pairs) == 200
    assert _correct(*map(list, zip(*pairs, strict=True))) <= 1
