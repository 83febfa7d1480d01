"""When a run asks the canary for tokens to compare, and when its bound fails because there were none. Real runs: test_sampling_ahead.py."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.sync import SyncConfig
from megatron_rl.diagnosis.mismatch import TOKENS, UNCOMPARED_STEPS, MismatchBound
from megatron_rl.errors import RunError
from megatron_rl.training.policy_trainer import PolicyTrainer


@pytest.mark.parametrize(
    "ahead, metrics, in_update, asks", [(1, {}, False, True), (1, {TOKENS: 3.0}, False, False), (0, {}, False, False), (1, {}, True, False)]
)
def test_a_run_ahead_whose_step_has_compared_nothing_asks_the_canary(ahead, metrics, in_update, asks):
    trainer: Any = SimpleNamespace(
        _config=SimpleNamespace(placement=SimpleNamespace(max_staleness=ahead)),
        compares_in_update=in_update,
        _mismatch_bound=MismatchBound(SyncConfig(), True, print),
    )
    assert PolicyTrainer.compares_nothing(trainer, metrics) == asks
    for _ in range(2 * UNCOMPARED_STEPS):
        assert PolicyTrainer.count_compared(trainer, 4) == {TOKENS: 4.0}
    for _ in range(UNCOMPARED_STEPS - 1):
        PolicyTrainer.count_compared(trainer, 0)
    with pytest.raises(RunError, match=r"set sync\.canary above 0"):
        PolicyTrainer.count_compared(trainer, 0)


@pytest.mark.parametrize("how", ["stop", "warn"])
def test_a_bound_that_holds_for_no_token_fails(how):
    lines = list[str]()
    bound = MismatchBound(SyncConfig(on_mismatch=how), True, lines.append)
    for metrics in [{}, {}, {TOKENS: 1.0}] + [{}] * (UNCOMPARED_STEPS - 1):
        bound.check(metrics)
    line = f"no token of the trainer's version was compared for {UNCOMPARED_STEPS} steps (mismatch/tokens)"
    if how == "stop":
        with pytest.raises(RunError, match=r"set sync\.canary above 0") as caught:
            bound.check({TOKENS: 0.0})
        assert str(caught.value).startswith(line)
    else:
        for _ in range(5):
            bound.check({})
        assert lines == [line]
    free = MismatchBound(SyncConfig(max_mismatch=math.inf), True, lines.append)
    for _ in range(2 * UNCOMPARED_STEPS):
        free.check({})
