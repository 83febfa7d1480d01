"""The reward of the arithmetic task, through the loader of rewards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards import load_function
from megatron_rl.types import Problem, Reward

reward = load_function("examples.arithmetic.reward:reward")


def test_arithmetic_accepts_the_integer_after_the_last_hash_alone():
    for text in ("#62", "57+8=65,65-3=62#62", "#1#62", "#062"):
        assert reward(text, Problem("p", "?", "62")) == Reward(1.0, True, answer="62"), text
    wrong = ["", "62", "#", "#63", "#62 ", "#62\n", "#62.", "#62#", "# 62", "#+62", "#٦٢", "#62<|endoftext|>", "#" + "9" * 9999]
    for text in wrong:
        answer = "63" if text == "#63" else ""
        assert reward(text, Problem("p", "?", "62")) == Reward(0.0, False, answer=answer), text


@given(st.text(), st.integers(0, 99), st.integers(0, 99))
def test_arithmetic_depends_on_the_last_integer_only(text, stated, gold):
    assert reward(f"{text}#{stated}", Problem("p", "?", str(gold))).correct == (stated == gold)
