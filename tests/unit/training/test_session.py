"""In which order a run takes memory, and what it does about a rollout that disagrees with the trainer."""

import inspect
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_rl.config import Config
from megatron_rl.config.sync import SyncConfig
from megatron_rl.diagnosis.mismatch import MISMATCH, MismatchBound
from megatron_rl.errors import RunError
from megatron_rl.training import build, start
from megatron_rl.training.context import RunContext
from parallel.layout import Layout

KEPT = ("build_loop", "start_rollout", "_load_checkpoint", "_record_contents", "RunContext")


@pytest.fixture
def calls(monkeypatch) -> MagicMock:
    """Record all calls of a run's start to this project, in order."""
    calls = MagicMock()
    calls.find_checkpoint_format.return_value = None
    calls.load_problems.return_value = MagicMock(), []
    calls.load_actor.return_value = calls.actor, []
    calls.load_critic.return_value = calls.critic
    for name, value, module in [(*item, each) for each in (build, start) for item in vars(each).items()]:
        ours = getattr(value, "__module__", "").startswith(("megatron_rl.", "parallel."))
        if ours and name not in KEPT and not (inspect.isclass(value) and issubclass(value, Exception)):
            monkeypatch.setattr(module, name, getattr(calls, name))
    monkeypatch.setattr(Config, "make_geometry", MagicMock())
    monkeypatch.setattr(build, "Rank0", lambda make: MagicMock(value=make()))
    return calls


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
def test_engines_start_when_the_trainer_holds_as_much_memory_as_in_a_sync(calls, tmp_path, kind):
    """On a shared GPU, an engine fills the free memory: by then the reference is loaded, and what only an optimizer step needs is not."""
    sections = {"model": {"path": Path("m")}, "algorithm": {"kl_coef": 0.1}, "placement": {"kind": kind}}
    build.build_loop(RunContext(Config.model_validate(sections), Layout(), tmp_path, MagicMock(), ExitStack()))
    order = [name for name, *_ in calls.mock_calls]
    assert order.count("start_empty_engines") == 1
    before = order[: order.index("start_empty_engines")]
    assert before.index("load_actor") < before.index("load_reference")
    assert ("actor.offload_optimizer" in before) == ("critic.offload_optimizer" in before) == (kind == "colocated")


INF = float("inf")


@pytest.mark.parametrize(
    "given, exact, fine, too_much",
    [(None, True, 0.0, 1e-7), (None, False, 99.0, None), (0.5, True, 0.5, 0.6), (0.5, False, 0.5, float("nan")), (INF, True, 99.0, None)],
)
def test_the_bound_is_0_if_exactness_is_promised_unless_it_is_given(given, exact, fine, too_much):
    bound = MismatchBound(SyncConfig(max_mismatch=given), exact, print)
    bound.check({MISMATCH[1]: fine})
    bound.check({})  # no token of the trainer's version
    if too_much is not None:
        line = r"^the mismatch of rollout and trainer is \S+ nats \(mismatch/abs_max\), above sync\.max_mismatch = 0(\.5)?: "
        with pytest.raises(RunError, match=line):
            bound.check({MISMATCH[1]: too_much})


def test_a_warning_is_given_once_until_the_mismatch_is_back():
    lines: list[str] = []
    bound = MismatchBound(SyncConfig(max_mismatch=0.1, on_mismatch="warn"), True, lines.append)
    for value in (0.0, 0.2, 0.3, 0.1, 0.4):
        bound.check({MISMATCH[1]: value})
    assert lines == [
        f"the mismatch of rollout and trainer is {value} nats (mismatch/abs_max), above sync.max_mismatch = 0.1" for value in (0.2, 0.4)
    ]
