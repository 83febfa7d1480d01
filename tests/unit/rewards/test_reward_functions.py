"""The built-in reward functions on correct, wrong and hostile answers, and on the real gold answers of GSM8K and MATH-500."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.sets import read_set
from megatron_rl.rewards import load_function, match
from megatron_rl.rewards import math as math_reward
from megatron_rl.rewards.thinking import decode_completion, find_markers, split_thought
from megatron_rl.types import Problem, Reward
from parallel.plug import InputError

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
GSM8K_TEST, MATH_500 = DATA / "gsm8k" / "test.jsonl", DATA / "math500" / "test.jsonl"


def _problem(answer: str) -> Problem:
    return Problem("p", "?", answer)


def _read_graded() -> Iterator[tuple[str, str, bool]]:
    """Yield (gold answer, answer, whether it is right) of graded_answers.txt."""
    gold = ""
    for line in (Path(__file__).parent / "graded_answers.txt").read_text().splitlines():
        if line.startswith("["):
            gold = line[1 : line.rindex("]")]
        elif line[:2] in ("+ ", "- "):
            yield gold, line[2:] if r"\ne" in line else line[2:].replace(r"\n", "\n"), line[0] == "+"


def test_graded_answers_have_no_false_positive_and_hardly_a_false_negative():
    graded = [*_read_graded()]
    assert len(graded) > 500
    verdicts = [math_reward.reward(text, _problem(gold)) for gold, text, _ in graded]
    wrong = [case for case, verdict in zip(graded, verdicts, strict=True) if verdict.error or verdict.correct != case[2]]
    assert not [case for case in wrong if not case[2]], "wrong answers that are paid"
    assert len(wrong) < 0.02 * sum(right for _, _, right in graded), wrong
    for (gold, text, right), verdict in zip(graded, verdicts, strict=True):
        if right and gold == "42":  # votes of one number are one vote, and every paid answer is also read
            assert verdict.answer == "42" or math_reward.reward(rf"\boxed{{{verdict.answer}}}", _problem(gold)).correct, text


@pytest.mark.parametrize(
    "gold, texts, vote",
    [
        ("B", ["A", "**A**", "The answer is (A) London.", r"\boxed{\text{A}}"], "A"),
        ("Yes", ["No, it is not.", "The answer is no.", r"\boxed{\text{No}}"], "no"),
        (r"2\sqrt{3}", [r"So $x = \sqrt{6}$.", r"\boxed{\sqrt{6}}"], r"\sqrt{6}"),
        ("1,2", [r"\boxed{3, 1}", r"\boxed{x=1, x=3}", r"\boxed{\{1,3\}}"], "1,3"),
        ("42", ["**43**", "The answer is 43 apples.", "So 43.0"], "43"),
        ("B", ["I don't know.", "A or C"], ""),
    ],
)
def test_spellings_of_a_wrong_answer_are_one_vote(gold, texts, vote):
    assert [math_reward.reward(text, _problem(gold)).answer for text in texts] == [vote] * len(texts)


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_compare_by_value(stated, gold):
    for text in (rf"\boxed{{{stated:,}}}", f"#### {stated}", f"The answer is {stated}."):
        assert math_reward.reward(text, _problem(str(gold))).correct == (stated == gold)


@given(st.decimals(-(10**6), 10**6, places=4), st.decimals(-(10**6), 10**6, places=4), st.sampled_from(["f", "e", "E"]))
def test_decimals_compare_by_value_in_any_notation(stated, gold, notation):
    text = rf"\boxed{{{stated:.12{notation}}}}"
    assert math_reward.reward(text, _problem(f"{gold:f}")).correct == (stated == gold)


@pytest.mark.parametrize(
    "text, prompt, answer, thought",
    [
        ("<think>a</think>b", "", "b", "a"),
        ("a</think>b", "", "b", "a"),
        ("a</think>b", "Q<think>\n", "b", "a"),
        ("<think>a", "", None, "a"),
        ("a", "Q<think>\n", None, "a"),
        ("x<think>a</think>y<think>b</think>z", "", "xyz", "ab"),
        ("b<think>c", "", None, "c"),
        ("b", "", "b", ""),
        ("", "", "", ""),
    ],
)
def test_an_answer_is_what_follows_the_thought(text, prompt, answer, thought):
    assert split_thought(text, prompt) == (answer, thought)
    other = (text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), prompt.replace("<think>", "[THINK]"))
    assert split_thought(*other, find_markers("{{ '[THINK]' }}{{ x.split('[/THINK]') }}")) == (answer, thought)
    assert split_thought(*other, find_markers({"default": "", "tool_use": "[/THINK]"})) == (answer, thought)
    assert split_thought(text, prompt, None) == (text, "")


@pytest.mark.parametrize("special", [False, True])
def test_markers_of_several_tokens_are_found_and_kept(special):
    template = "<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|><|start|>assistant<|channel|>final<|message|>"
    words = ["<|channel|>", "analysis", "<|message|>", "5", "<|end|>", "<|start|>", "assistant", "final", "6", "<|return|>"]
    tokenizer = mock.Mock(chat_template=template, added_tokens_decoder={})
    if special:
        tokenizer.added_tokens_decoder = {number: AddedToken(word, special=True) for number, word in enumerate(words) if "|" in word}
    tokenizer.encode.return_value = []
    tokenizer.decode = lambda ids, skip_special_tokens: "".join(words[i] for i in ids if i not in tokenizer.added_tokens_decoder)
    markers = find_markers(template)
    thought = [0, 1, 2, 3, 4, 5, 6]
    assert split_thought(decode_completion(tokenizer, thought), "", markers).answer is None
    answer = split_thought(decode_completion(tokenizer, [*thought, 0, 7, 2, 8]), "", markers).answer
    assert answer == "6"


@pytest.mark.parametrize("function", [math_reward.reward, match.match_answer])
def test_thoughts_are_not_paid(function):
    assert function("<think>6</think>5", _problem("5")).correct and not function("<think>5</think>6", _problem("5")).correct
    assert not function("<think>5", _problem("5")).correct and not function("5", Problem("p", "?<think>", "5")).correct
    assert function("<think>5", _problem("5"), thinking=None).correct == (function is math_reward.reward)


HARMONY = find_markers("<|channel|>analysis<|message|> <|channel|>final<|message|>")


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>6<|return|>", "6"),
        ("<|channel|>analysis<|message|>5assistant<|channel|>commentary to=functions.f json<|message|>{}", None),
        ("<|channel|>commentary<|message|>5<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>6<|return|>", "6"),
        ("<|channel|>commentary<|message|>5<|end|>", None),
        ("<|channel|>final json<|message|>6", "6"),
        ("5", None),
    ],
)
def test_of_gpt_oss_only_the_final_channel_is_an_answer(text, answer):
    assert split_thought(text, "<|start|>assistant", HARMONY).answer == answer
    assert split_thought("7", "<|start|>assistant<|channel|>final<|message|>", HARMONY).answer == "7"


REPEATED = (
    *("the answer is ", "The answer is correct. ", "x is the answer ", "answer: ", "not 4, ", "no, wait ", "No, it is 6. "),
    *(r"\boxed{", r"\boxed{1}", r"\frac{1}{", "{", "}", "(", "$", "$1$ ", "1,", "1", "-", "*", "=", " ", "\n"),
    *("check the answer: ", "<answer>", "</think>", "#### ", "选"),
    *(
        "die Antwort ist nicht ",
        "答えは",
        "x = 1 or ",
        "**1** ",
        "a (abc ",
        "√(",
        "A. ",
        "twenty-one ",
        "1-",
        "1 h ",
        "x=1,",
        "A and ",
        "2024-",
        "1 to ",
        "1.1",
        "_2",
    ),
)
COSTLY = (
    *("9^{9^{9^{9}}}", "10^{10^{10}}", "(9^9)^{999999}", "2^" * 50 + "2", "1000000!", "((9!)!)!", r"\binom{1000000}{500000}"),
    *("(x+y+z)^{99}", "(" * 49 + "1" + ")" * 49, r"\sqrt{" * 60 + "2" + "}" * 60, r"\int_0^1 e^{x^{x^x}} dx", "|" * 100, "1+" * 240 + "1"),
)


def test_hostile_texts_take_no_time():
    """About 20 ms for 100 KB; the first formula of a kind takes SymPy more."""
    math_reward.prepare()
    hostile = [text * (100_000 // len(text)) for text in REPEATED] + [rf"\boxed{{{formula}}}" for formula in COSTLY]
    hostile += [r"\boxed{" + "the answer is correct " * 5000, "The answer is 4" + " because" * 10_000, "a" * 100_000 + " is the answer"]
    for text in hostile:
        for gold in ("5", "x+1"):
            start = time.process_time()
            assert not math_reward.reward(text, _problem(gold)).correct
            assert time.process_time() - start < 1, text[:20]
    assert math_reward.reward(r"\boxed{9^{9^{9^{9}}}}", _problem("9^{9^{9^{9}}}")).correct
    assert math_reward.reward(r"\boxed{(\frac{1}{2})^{10}}", _problem(r"\frac{1}{1024}")).correct


@pytest.mark.parametrize(
    "gold, text, correct",
    [
        ("0.30000000000000004", "0.3", True),
        ("0.1", "0.1000001", False),
        ("1e-05", "0.00001", True),
        ("0.0000001", "10^-7", True),
        ("1000000", "10^{6}", True),
    ],
)
def test_decimals_are_compared_as_numbers(gold, text, correct):
    assert math_reward.reward(rf"\boxed{{{text}}}", _problem(gold)).correct == correct


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
    assert match.match_answer(text, _problem("Paris"), **settings).correct == correct


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


needs_gsm8k = pytest.mark.skipif(not GSM8K_TEST.is_file(), reason="needs the data sets in ../shared/data")
needs_math500 = pytest.mark.skipif(not MATH_500.is_file(), reason="needs the data sets in ../shared/data")


def _correct(texts: list[str], golds: list[str]) -> int:
    return sum(math_reward.reward(text, _problem(gold)).correct for text, gold in zip(texts, golds, strict=True))


@needs_gsm8k
def test_real_gsm8k_golds_verify_and_another_problems_gold_does_not():
    problems = read_set(DataSourceConfig(source=str(GSM8K_TEST)), DataConfig(format="gsm8k"), "data.eval").problems
    golds = [problem.answer for problem in problems]
    texts = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text().splitlines()]
    assert _correct(texts, golds) == _correct([rf"\boxed{{{gold}}}" for gold in golds], golds) == len(golds) == 1319
    others = golds[1:] + golds[:1]
    assert _correct(texts, others) == sum(gold == other for gold, other in zip(golds, others, strict=True))
    for problem in problems[:50]:  # through math-verify too
        text = rf"so \boxed{{\frac{{{2 * int(problem.answer)}}}{{2}}}}"
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
