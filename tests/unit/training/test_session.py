"""In which order a run takes memory."""

import inspect
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_rl.config import Config
from megatron_rl.training import session
from parallel.layout import Layout


@pytest.fixture
def calls(monkeypatch) -> MagicMock:
    """Everything that a session calls, of this project, in its order."""
    calls = MagicMock()
    calls.find_checkpoint_format.return_value = None
    calls.load_problems.return_value = None, None
    calls.load_actor.return_value = calls.actor, []
    calls.load_critic.return_value = calls.critic
    for name, value in list(vars(session).items()):
        ours = getattr(value, "__module__", "").startswith(("megatron_rl.", "parallel."))
        if ours and value is not session.Session and not (inspect.isclass(value) and issubclass(value, Exception)):
            monkeypatch.setattr(session, name, getattr(calls, name))
    monkeypatch.setattr(Config, "make_geometry", MagicMock())
    monkeypatch.setattr(session, "Rank0", lambda make: MagicMock(value=make()))
    return calls


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
def test_engines_start_when_the_trainer_holds_what_it_holds_in_a_sync(calls, tmp_path, kind):
    """On a shared GPU an engine fills what is free: the reference is there before, and what only an optimizer step needs is not."""
    sections = {"model": {"path": Path("m")}, "algorithm": {"kl_coef": 0.1}, "placement": {"kind": kind}}
    run = session.Session.__new__(session.Session)
    run.config, run.layout, run.contract, run._resources = Config.model_validate(sections), Layout(), MagicMock(), ExitStack()
    run.folder, run.resume_point, run.log = tmp_path, None, MagicMock()
    run._build_loop()
    order = [name for name, *_ in calls.mock_calls]
    assert order.count("start_engines") == 1
    before = order[: order.index("start_engines")]
    assert before.index("load_actor") < before.index("load_reference")
    assert ("actor.offload_optimizer" in before) == ("critic.offload_optimizer" in before) == (kind == "colocated")
