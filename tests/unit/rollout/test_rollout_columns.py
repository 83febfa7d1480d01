"""Where a run leaves the columns of its completions."""

import json

import pytest

from megatron_rl.config import Config
from megatron_rl.rollout.columns import choose_place

HTTP, OWN, MATH = {"name": "http", "url": "http://host/score"}, {"name": "raising_reward:reward"}, {"name": "math"}


@pytest.mark.parametrize(
    "place, changes",
    [
        ("remote", {}),
        ("remote", {"reward": {"functions": [OWN, MATH]}}),
        ("but_text", {"reward": {"functions": [HTTP, MATH]}}),
        ("here", {"reward": {"functions": [HTTP, OWN]}}),
        ("here", {"train": {"layout": {"tp": 2}}}),
        ("here", {"environment": {"name": "calculator:Calculator"}}),
        ("here", {"agent": {"name": "agent:run"}}),
        ("here", {"replay": {"prompts_per_step": 1}}),
        ("here", {"rollout": {"over_sampling_prompts": 1}}),
    ],
)
def test_columns_pass_rank_0_only_if_something_there_needs_them(place, changes):
    sections = {"model": {"path": "m"}, "train": {"layout": {"dp": 2}}, **changes}
    assert choose_place(Config.model_validate_json(json.dumps(sections))) == place
