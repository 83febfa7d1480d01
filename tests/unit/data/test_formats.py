"""Formats of published data sets: one row of each, and the real files if they are available."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.formats import RowError, math, read_row
from megatron_rl.data.sets import read_set
from megatron_rl.plugs import DATA_FORMATS

REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
MATH_SOLUTION = r"We have $\frac{1}{1} = \boxed{9}$ or rather $\boxed{\left( 3, \frac{\pi}{2} \right)}.$"


@pytest.mark.parametrize(
    "format, row, gold, level",
    [
        ("gsm8k", {"question": "q", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 1,072"}, "1072", 0),
        ("gsm8k", {"question": "q", "answer": "#### -1,234,567"}, "-1234567", 0),
        ("gsm8k", {"question": "q", "answer": "#### 1,080.5"}, "1080.5", 0),
        ("gsm8k", {"question": "q", "answer": "#### (1,234)"}, "(1,234)", 0),
        # Hendrycks' own files, MATH-500, deepscaler's file
        ("math", {"problem": "q", "level": "Level 5", "type": "Algebra", "solution": MATH_SOLUTION}, r"\left( 3, \frac{\pi}{2} \right)", 5),
        ("math", {"problem": "q", "level": "Level ?", "type": "Geometry", "solution": r"so \fbox{7}"}, "7", 0),
        ("math", {"problem": "q", "level": "Level 1", "solution": r"is $\boxed 2$."}, "2", 1),
        ("math", {"problem": "q", "solution": MATH_SOLUTION, "answer": "p - q", "level": 2, "unique_id": "t/1"}, "p - q", 2),
        ("math", {"problem": "q", "answer": "0", "difficulty": 5.0, "type": "Algebra"}, "0", 5),
        ("math", {"problem": "q", "answer": None, "solution": r"\boxed{4}"}, "4", 0),
        ("math", {"problem": "q", "answer": "", "difficulty": 5.0}, "", 5),
        # zwhe99/DeepMath-103K, and its sample in ROLL
        ("deepmath", {"question": "q", "final_answer": r"\dfrac12", "difficulty": 4.5, "topic": "t"}, r"\dfrac12", 4),
        ("deepmath", {"id": "1", "prompt": "q", "ground_truth": "x", "difficulty": "9.5", "messages": "[]"}, "x", 9),
        ("deepmath", {"question": "q", "final_answer": "0", "difficulty": -1.0}, "0", 0),
        # as published by Maxwell-Jia, HuggingFaceH4, opencompass, NeMo-Skills
        ("aime", {"ID": "2024-II-4", "Problem": "q", "Solution": "s", "Answer": 33}, "33", 0),
        ("aime", {"id": 60, "problem": "q", "solution": "s", "answer": "073", "url": "u", "year": "2024"}, "73", 0),
        ("aime", {"question": "q", "answer": r"336^\circ"}, "336", 0),
        ("aime", {"problem": "q", "reference_solution": "s", "expected_answer": "0", "source": "aime24"}, "0", 0),
    ],
)
def test_a_row_of_each_published_data_set(format, row, gold, level):
    result = read_row(row, format, DATA_FORMATS.load(format))
    assert (result.question, result.gold, result.level) == ("q", gold, level)


@pytest.mark.parametrize(
    "format, row, wrong",
    [
        ("gsm8k", {"problem": "q", "answer": "-5"}, 'needs the field question, found problem, answer; set format = "math"'),
        ("math", {"question": "q", "answer": "so #### 5"}, 'needs the field problem, found question, answer; set format = "gsm8k"'),
        ("math", {"question": "q", "final_answer": "5"}, 'set format = "deepmath"'),
        ("math", {"problem": "q", "answer_key": "5"}, "needs the field answer or solution, found problem, answer_key; correct or"),
        ("math", {"problem": "q", "solution": "so 5"}, r"the field solution has no \boxed{}"),
        ("math", {"problem": "q", "solution": r"\boxed{5"}, r"the field solution has no \boxed{}"),
        ("aime", {"problem": "q", "answer": "1000"}, "must be an integer from 0 to 999, not '1000'"),
        ("aime", {"problem": "q", "answer": "-1"}, "must be an integer from 0 to 999, not '-1'"),
        ("math", {"problem": "q", "question": "q", "solution": "x", "final_answer": "5"}, 'remove this row, or set format = "deepmath"'),
    ],
)
def test_rows_of_another_format_are_refused_with_a_suggestion(format, row, wrong):
    with pytest.raises(RowError) as caught:
        read_row(row, format, DATA_FORMATS.load(format))
    assert wrong in f"{caught.value.rule}; {caught.value.fix}"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the data sets in ../shared/data")
@pytest.mark.parametrize(
    "file, format, levels",
    [
        ("gsm8k/train.jsonl", "gsm8k", {0: 7473}),
        ("gsm8k/test.jsonl", "gsm8k", {0: 1319}),
        ("math500/test.jsonl", "math", {1: 43, 2: 90, 3: 105, 4: 128, 5: 134}),
        ("math_train/math.json", "math", {0: 2, 1: 564, 2: 1345, 3: 1582, 4: 1681, 5: 2296}),  # 4 of 7474 rows have no answer
        ("deepmath_sample/math_deepmath_deal.jsonl", "deepmath", {1: 3, 2: 8, 3: 200, 4: 478, 5: 1511, 6: 1224, 7: 742, 8: 760, 9: 68}),
        ("aime24/test.jsonl", "aime", {0: 30}),
    ],
)
def test_the_real_files_are_read(file, format, levels):
    problems = read_set(DataSourceConfig(source=str(REAL / file)), DataConfig(format=format), "data.eval").problems
    assert Counter(problem.level for problem in problems) == levels


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the data sets in ../shared/data")
def test_the_boxed_answers_of_real_solutions_match_the_published_answers():
    rows = [json.loads(line) for line in (REAL / "math500/test.jsonl").read_text().splitlines()]
    boxed = [math({"problem": row["problem"], "solution": row["solution"]}).gold for row in rows]
    assert sum(result == row["answer"] for result, row in zip(boxed, rows, strict=True)) >= 490
