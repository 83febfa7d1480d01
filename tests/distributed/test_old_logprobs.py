"""The engine's log-probs as the old ones: the same training as with a pass, and a mismatch is found before a weight changes."""

from functools import partial

import pytest
from support import training_runs
from support.models import FP8

from megatron_rl.algorithm.old_logprobs import PASS_EVERY

TIMES = ("time/", "memory/")
FEWER = ("mismatch/", "entropy", "router/", "tokens/")
"""Metrics that cover the tokens of the first update only, if the pass is left out."""


def run(worlds, checkpoint, old_logprobs, updates=1, noise=0.0, steps=3, exact=True, **algorithm):
    settings = {"updates_per_step": updates, "old_logprobs": old_logprobs, **algorithm}
    return worlds(1).call(partial(training_runs.run_loop, exact=exact), checkpoint, FP8, settings, steps, noise)[0]


@pytest.mark.parametrize(
    "updates, algorithm",
    [(1, {"kl_coef": 0.01}), (2, {"entropy_coef": 0.01}), (1, {"loss": "gspo"}), (2, {"name": "rloo", "kl_coef": 0.01}),
     (2, {"loss": "clip_cov"}), (2, {"calibrate_every": 1}), (1, {"old_policy": "engine"})],
)  # fmt: skip
def test_a_run_without_the_pass_learns_the_same_bits(worlds, checkpoint, updates, algorithm):
    whole, left_out = (run(worlds, checkpoint, which, updates, **algorithm) for which in ("pass", "auto"))
    assert whole["leads"] == left_out["leads"] and whole["advantages"] == left_out["advantages"]
    for step, (one, other) in enumerate(zip(whole["rows"], left_out["rows"], strict=True)):
        kept = [name for name in one if not name.startswith((*TIMES, *FEWER))]
        assert {name: one[name] for name in kept} == {name: other[name] for name in kept}
        if step == 0:
            continue
        assert other["mismatch/abs_max"] == 0 and other["entropy"] > 0
        has_pass = updates > 1 and (step - 1) % PASS_EVERY == 0
        compared = one["mismatch/tokens"] if has_pass or updates == 1 else sum(2 + member % 4 for member in range(8))
        assert other["mismatch/tokens"] == compared
        if updates == 1:
            assert other["entropy"] == pytest.approx(one["entropy"], rel=1e-6)


def test_router_statistics_come_from_the_first_update(worlds, model_folder):
    checkpoint = model_folder("qwen3_moe")
    whole, left_out = (run(worlds, checkpoint, which) for which in ("pass", "auto"))
    assert whole["leads"] == left_out["leads"]
    for one, other in zip(whole["rows"][1:], left_out["rows"][1:], strict=True):
        names = [name for name in one if name.startswith("router/")]
        assert names and {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-6)


@pytest.mark.parametrize("algorithm", [{}, {"loss": "examples.plugs.sapo:token_losses"}])
def test_a_mismatch_is_found_by_the_first_update(worlds, checkpoint, algorithm):
    """The line is the same as that of the pass."""
    lines = []
    for which in ("pass", "auto"):
        with pytest.raises(Exception, match="the mismatch of rollout and trainer is") as raised:
            run(worlds, checkpoint, which, noise=1e-3, **algorithm)
        lines.append(str(raised.value))
    assert lines[0] == lines[1]


def test_without_a_promise_the_pass_stays(worlds, checkpoint):
    rows = run(worlds, checkpoint, "auto", noise=1e-3, exact=False)["rows"]
    assert all(row["mismatch/abs_max"] > 0 for row in rows[1:])
