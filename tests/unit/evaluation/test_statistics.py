"""Estimators against slow, independent computations: all sub-samples, all signs, coverage by simulation; votes, tables and pages."""

import functools
import json
import random
import threading
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import comb
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import RunError
from megatron_rl.evaluation.held_out import compute_eval_metrics
from megatron_rl.evaluation.sampling import append_completions, sample
from megatron_rl.evaluation.statistics import estimate_difference, estimate_mean, majority_at_k, pass_at_k, powers_of_two, sign_flip_p_value
from megatron_rl.evaluation.tallies import Outcome, Tally, build_table, compare_tallies, group_tallies
from megatron_rl.metrics import describe
from megatron_rl.reporting.eval_page import write_page
from megatron_rl.reporting.eval_text import format_points, format_sampling, list_columns, summarize, summarize_evaluations
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.types import Completion, Generation, Problem, Reward, SamplingParams

Vote = tuple[str | None, bool]  # an answer, and whether it is correct
completions = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


def pass_by_enumeration(correct: int, samples: int, k: int) -> Fraction:
    drawn = list(combinations([True] * correct + [False] * (samples - correct), k))
    return Fraction(sum(map(any, drawn)), len(drawn))


def majority_by_enumeration(sample: list[Vote], k: int) -> Fraction:
    """Every sub-sample votes; every winner among ties, and every completion that gave the winning answer, stands for it alike often."""
    total, drawn = Fraction(0), list(combinations(sample, k))
    for part in drawn:
        votes = Counter(answer for answer, _ in part if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        for winner in winners:
            verdicts = [correct for answer, correct in part if answer == winner]
            total += Fraction(sum(verdicts), len(verdicts) * len(winners))
    return total / len(drawn)


def votes_of(sample: list[Vote]) -> list[tuple[int, int]]:
    answers = {answer for answer, _ in sample if answer is not None}
    return [(len(of), sum(of)) for of in ([correct for given, correct in sample if given == answer] for answer in sorted(answers))]


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_sub_samples_with_a_correct_one(case):
    assert pass_at_k(*case) == pytest.approx(float(pass_by_enumeration(*case)), abs=1e-12)


@given(completions)
def test_majority_at_k_is_that_of_all_sub_samples(sample):
    ks = range(1, len(sample) + 1)
    expected = [float(majority_by_enumeration(sample, k)) for k in ks]
    assert majority_at_k(votes_of(sample), len(sample), list(ks)) == pytest.approx(expected, abs=1e-12)


def test_majority_of_many_and_the_ks_of_a_table():
    at_1, at_512, at_1024 = majority_at_k([(64, 64), (60, 0)], 1024, [1, 512, 1024])  # binomials as large as float64 allows
    assert at_1 == pytest.approx(64 / 1024) and at_1 < at_512 < 1.0 and at_1024 == pytest.approx(1.0)
    assert majority_at_k([(48, 48), (8, 0)], 64, [32]) == [1.0]  # not above, by rounding
    assert [powers_of_two(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_the_p_value_counts_all_choices_of_signs(differences):
    choices = product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * size for sign, size in zip(signs, differences, strict=True))) for signs in choices]
    assert sign_flip_p_value(differences) == pytest.approx(sum(value >= abs(sum(differences)) for value in sums) / len(sums))


def test_one_completion_each_is_mcnemars_exact_test_and_has_wilsons_interval():
    assert sign_flip_p_value([1] * 9 + [-1] * 2 + [0] * 50) == pytest.approx(2 * sum(comb(11, few) for few in range(3)) / 2**11)
    result = estimate_mean([1.0] * 8 + [0.0] * 2, 1)
    assert (result.low, result.high) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94331, abs=1e-5))  # Wilson 1927, 8 of 10


def test_none_or_all_correct_is_not_certain_and_few_differences_have_no_interval():
    for value in (0.0, 1.0):
        result = estimate_mean([value] * 20, 4)
        assert result.low <= value <= result.high and result.high - result.low == pytest.approx(0.161, abs=0.001)  # "3 of n" and a little
    assert estimate_difference([0.25] * 10).low is None is estimate_difference([1.0, 0.0, 1.0]).high


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_an_interval_holds_its_value_and_stays_between_0_and_1(correct):
    result = estimate_mean([count / 4 for count in correct], 4)
    assert 0 <= result.low <= result.value <= result.high <= 1


@pytest.mark.parametrize("samples, shape", [(1, 1.0), (4, 0.3), (8, 2.0)])
def test_95_of_100_intervals_cover_the_truth(samples, shape):
    draw = random.Random(7)
    covered = 0
    for _ in range(1000):
        chances = [draw.betavariate(shape, shape) for _ in range(40)]
        result = estimate_mean([sum(draw.random() < chance for _ in range(samples)) / samples for chance in chances], samples)
        covered += result.low <= 0.5 <= result.high
    assert 0.93 <= covered / 1000 <= 0.98


def test_intervals_of_differences_cover_the_truth_and_p_values_are_uniform_without_one():
    draw = random.Random(9)
    covered, small = 0, 0
    for _ in range(1000):
        chances = [draw.betavariate(0.5, 0.5) for _ in range(30)]
        first, second = ([sum(draw.random() < chance for _ in range(4)) for chance in chances] for _ in range(2))
        gains = [score - other for score, other in zip(first, second, strict=True)]
        result = estimate_difference([gain / 4 for gain in gains])
        covered += result.low is not None and result.low <= 0 <= result.high
        small += sign_flip_p_value(gains) <= 0.05
    assert 0.93 <= covered / 1000 <= 0.98
    assert 0.02 <= small / 1000 <= 0.06


def test_near_0_and_1_and_for_alike_problems_the_number_of_problems_counts():
    """Effective sizes jumped to that of all completions: [.977, .999] of 239 of 240, [.998, 1] of 30 alike, +-.085 of two problems."""
    all_right, one_wrong = estimate_mean([1.0] * 30, 8), estimate_mean([1.0] * 29 + [0.875], 8)
    assert (all_right.low, all_right.high) == (pytest.approx(0.8865, abs=1e-3), 1.0)
    assert abs(one_wrong.low - all_right.low) < 0.03 and one_wrong.high > 0.999
    assert estimate_mean([pass_at_k(30, 64, 32)] * 30, 64).low < 0.89
    two = estimate_mean([0.5] * 2, 64)
    assert two.high - two.low > 0.8


@pytest.mark.parametrize("problems", [5, 8, 15, 40])
@pytest.mark.parametrize("samples", [4, 16, 64])
@pytest.mark.parametrize("a, b", [(0.3, 0.3), (1.0, 1.0), (50.0, 50.0), (0.1, 1.9), (0.5, 4.5), (9.0, 1.0)])
def test_intervals_cover_from_five_problems_on(problems, samples, a, b):
    draw, covered = np.random.default_rng(11), 0
    for _ in range(1500):
        values = draw.binomial(samples, draw.beta(a, b, problems)) / samples
        estimate = estimate_mean(values.tolist(), samples)
        covered += estimate.low <= a / (a + b) <= estimate.high
    assert covered >= 0.93 * 1500


def problem(number: int, level: int = 1, source: str = "arithmetic", answer: str = "2") -> Problem:
    return Problem(f"{source}:{number}", f"q{number}", answer, level, source)


def outcome(text: str, correct: bool = False, error: str = "", finish: str = "stop") -> Outcome:
    return Outcome(text, Reward(float(correct), correct, error), len(text), finish, answer_text=text)


@pytest.mark.parametrize(
    "text, source, answer",
    [
        ("# Solution\nThe answer is 1,080.", "gsm8k", "1080"),
        ("#### 7", "gsm8k", "7"),
        (r"so \boxed{ \frac{1}{2} }", "math", "1/2"),
        ("it is 12", "math", "12"),
        ("who knows", "math", None),
        (r"\boxed{}", "math", None),
    ],
)
def test_a_wrong_completion_votes_for_what_it_states_and_a_correct_one_for_the_gold(text, source, answer):
    assert outcome(text).answer(problem(1, source=source)) == answer
    assert outcome(text, correct=True).answer(problem(1, source=source, answer=r"\frac{1}{2}")) == r"\frac{1}{2}"
    assert outcome(text, error="timeout after 5 s").answer(problem(1, source=source)) is None


def test_a_tally_counts_lengths_errors_and_votes_for_what_the_reward_function_read():
    assert Outcome("#12", Reward(0.0, False, answer="3"), 3, "stop").answer(problem(1)) == "3"
    assert Outcome("it is 12", Reward(0.0, False, answer=""), 8, "stop").answer(problem(1)) is None
    texts = [outcome("2", True), outcome("2=2", True), outcome("is 3"), outcome("a,", finish="length"), outcome("is 4", error="died")]
    result = Tally.of(problem(1), texts)
    assert (result.samples, result.correct, result.votes) == (5, 2, ((2, 2), (1, 0)))
    assert (result.tokens, result.truncated, result.errors, result.reward) == ((1, 3, 4, 2, 4), 1, 1, 2.0)


def tally(number: int, correct: int, level: int = 1, source: str = "arithmetic", samples: int = 4) -> Tally:
    outcomes = [outcome("is 2", True)] * correct + [outcome("is 3")] * (samples - correct)
    return Tally.of(problem(number, level, source), outcomes)


def test_tables_have_a_line_for_all_for_each_set_and_for_each_level():
    three = [tally(1, 4), tally(2, 0, level=2), tally(3, 2, source="gsm8k/test", level=0)]
    sets = {("arithmetic", None): [0, 1], ("arithmetic", 1): [0], ("arithmetic", 2): [1], ("gsm8k/test", None): [2]}
    assert group_tallies(three) == {(None, None): [0, 1, 2], **sets}
    assert list(group_tallies(three[:2])) == [(None, None), ("arithmetic", 1), ("arithmetic", 2)]
    assert list(group_tallies(three[:1])) == [(None, None)]


def test_a_tables_figures_by_hand():
    line = build_table([tally(1, 4), tally(2, 0), tally(3, 1)], [1, 2, 4])[0]
    assert line["mean"]["value"] == pytest.approx(5 / 12) == line["pass"]["1"]["value"] == line["maj"]["1"]["value"]
    assert line["pass"]["2"]["value"] == pytest.approx((1 + 0 + 0.5) / 3)  # 3 of 6 pairs hold the one that is right
    assert line["pass"]["4"]["value"] == pytest.approx(2 / 3) and line["maj"]["4"]["value"] == pytest.approx(1 / 3)
    assert 0 < line["mean"]["low"] < 5 / 12 < line["mean"]["high"] < 1
    assert (line["tokens"], line["truncated"], line["unanswered"], line["errors"]) == ({"mean": 4, "median": 4, "max": 4}, 0, 0, 0)


def test_a_comparison_pairs_the_problems():
    better, worse = [tally(number, 3) for number in range(8)], [tally(number, 1 + number % 3) for number in range(8)]
    line = compare_tallies(better, worse, [1, 4])[0]
    assert line["mean"]["value"] == pytest.approx((2 + 1 + 0 + 2 + 1 + 0 + 2 + 1) / 4 / 8)
    assert (line["better"], line["worse"], line["p"]) == (6, 0, 2 / 2**6)
    assert line["mean"]["low"] > 0
    with pytest.raises(AssertionError, match="different problems"):
        compare_tallies(better, worse[1:] + worse[:1], [1])


class Letters:
    """A tokenizer of letters, an engine that answers each prompt with ` #### ` and how often it was asked before, rewards for "1"."""

    chat_template, added_tokens_decoder = None, MappingProxyType({})

    def __init__(self, failing: str = "") -> None:
        self.seen: dict[str, int] = {}
        self.failing, self.lock = failing, threading.Lock()

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))

    def generate(self, prompts_B, sampling, abort=None):
        with self.lock:
            result = []
            for prompt in map(self.decode, prompts_B, [True] * len(prompts_B)):
                if prompt == self.failing:
                    raise RunError("the engine is gone")
                ids = self.encode(f"{prompt} #### {self.seen.get(prompt, 0)}", False)
                result.append(Generation(np.array(ids, np.int32), [], "stop", 0))
                self.seen[prompt] = self.seen.get(prompt, 0) + 1
            return result

    def split(self, text, problem):
        return Response(text, "")

    def score(self, texts, problems, lengths, broken, *_):
        return [Reward(float(text.endswith(" 1")), text.endswith(" 1")) for text in texts]


def run(letters: Letters, path, problems: int = 5, samples: int = 3, chunk: int = 4) -> list[Tally]:
    asked = [problem(number, answer="1") for number in range(problems)]
    turns = MultiTurnSampler(letters, letters)
    with path.open("a") as file:
        record = functools.partial(append_completions, file, "checkpoint")
        return sample(turns, letters, asked, samples, SamplingParams(1.0, 8), 0, chunk, record)


def test_every_problem_gets_its_own_completions(tmp_path):
    tallies = run(Letters(), tmp_path / "c.jsonl")
    assert [(result.id, result.samples, result.correct) for result in tallies] == [(f"arithmetic:{number}", 3, 1) for number in range(5)]
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [(row["problem"], row["sample"]) for row in rows] == [(f"arithmetic:{n}", sample) for n in range(5) for sample in range(3)]
    assert all(row["text"].startswith(row["prompt"]) and row["side"] == "checkpoint" for row in rows)
    assert sum(row["correct"] for row in rows) == 5 and {row["answer"] for row in rows} == {"0", "1", "2"}
    with pytest.raises(RunError, match="gone"):
        run(Letters(failing="q4"), tmp_path / "crash.jsonl")
    assert len((tmp_path / "crash.jsonl").read_text().splitlines()) == 12, "what was scored before a crash is on the disk"


HOSTILE = "</pre><script>alert(1)</script> \ud800"


def results(folder, step: int | None = 7, with_baseline: bool = True) -> dict:
    """A folder of results as `command.evaluate` writes it; returns eval.json."""
    sides = {"checkpoint": [tally(number, 3, level=number % 2) for number in range(6)]}
    if with_baseline:
        sides["baseline"] = [tally(number, number % 3, level=number % 2) for number in range(6)]
    page = {
        "schema": 1, "started": "a", "ended": "b", "argv": ["x", HOSTILE[:20]], "versions": {"torch": "2"}, "config": {"data": {"seed": 1}},
        "sampling": {"samples": 4, "temperature": 0.6, "max_new_tokens": 8, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "seed": 0},
        "ks": [1, 2, 4], "confidence": 0.95,
        "sides": {name: {"path": HOSTILE[:30], "step": step, "seconds": 2.5, "problems": [], "table": build_table(result, [1, 2, 4])}
                  for name, result in sides.items()},
        "comparison": compare_tallies(sides["checkpoint"], sides["baseline"], [1, 2, 4]) if with_baseline else [],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "eval.json").write_text(json.dumps(page))
    with (folder / "completions.jsonl").open("a") as file:
        append_completions(file, "checkpoint", [(problem(number), 0, outcome(HOSTILE)) for number in range(20)])
    return page


def test_the_page_shows_the_figures_and_obeys_nothing(tmp_path):
    results(tmp_path / "e")
    page = write_page(tmp_path / "e").read_text()
    assert "mean@4 is 75.0 % on 6 problems, 50.0 points above the baseline" in page
    assert "4 completions per problem at temperature 0.6, top_p 0.95." in page
    greedy = {"samples": 1, "temperature": 0.0, "top_p": 0.95, "top_k": 5, "min_p": 0.1}
    assert format_sampling(greedy) == "1 completion per problem, always the most probable token"
    assert page.count("<svg") == 1 and page.count("<article") == 12
    assert "pass@4" in page and "maj@4" in page and "maj@2" not in page and "arithmetic, level 1" in page
    assert "<script" not in page and "&lt;script&gt;" in page and "src=" not in page and "default-src 'none'" in page
    alone = results(tmp_path / "alone", with_baseline=False)
    assert summarize(alone) == "mean@4 is 75.0 % on 6 problems."
    assert [title for title, _, _ in list_columns(alone)] == ["mean@4", "pass@2", "pass@4", "maj@4"]
    assert format_points({"value": -0.081, "low": -0.1, "high": 0.02}) == "-8.1 (-10.0…+2.0)"


def test_a_run_finds_its_evaluations_and_leaves_out_what_is_damaged(tmp_path):
    for step in (12, 3):
        results(tmp_path / "eval" / f"step_{step}", step)
    (tmp_path / "eval" / "torn").mkdir()
    (tmp_path / "eval" / "torn" / "eval.json").write_text('{"sides": ')
    left_out = []
    lines = summarize_evaluations(tmp_path, left_out)
    assert [(line["folder"], line["step"], line["problems"]) for line in lines] == [("eval/step_3", "3", "6"), ("eval/step_12", "12", "6")]
    assert len(left_out) == 1 and "torn" in left_out[0]
    assert "mean@4 75.0 % (" in lines[0]["found"] and "50.0 points above the baseline's" in lines[0]["found"]


def answered(level: int, *answers: str) -> list[Completion]:
    problem = Problem(f"p{level}", "q", "7", level=level)
    return [Completion(problem, [1], [2], [0.0], "stop", 1, text, Reward(0.0, text == "7", answer=text)) for text in answers]


def test_one_completion_each_gives_accuracies_alone_several_also_what_one_of_them_and_their_majority_get_right():
    rollout = RolloutBatch([*answered(1, "7"), *answered(2, "8")], {"ahead/generate": 1.5, "ahead/reward": 0.5})
    assert compute_eval_metrics(rollout, 1) == {"eval/accuracy": 0.5, "eval/level_1": 1.0, "eval/level_2": 0.0, "time/eval": 2.0}
    assert compute_eval_metrics(RolloutBatch([]), 1) == {}
    answers = (("7", "7", "9", "8"), ("9", "9", "7", "7"), ("9", "9", "9", "7"), ("8", "9", "", ""))
    rollout = RolloutBatch([completion for level, texts in enumerate(answers) for completion in answered(level, *texts)])
    metrics = compute_eval_metrics(rollout, 4)
    assert metrics["eval/accuracy"] == pytest.approx(5 / 16) and metrics["eval/level_2"] == 0.25
    assert metrics["eval/pass@4"] == 0.75
    assert metrics["eval/maj@4"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)  # a tie is won half the time
    assert describe("eval/maj@4").label == "maj@4"
