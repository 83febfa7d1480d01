"""The documentation covers all options and all built-in plugs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from megatron_rl import plugs
from megatron_rl.config import Config
from parallel.transport import TRANSPORTS

ROOT = Path(__file__).parents[3]
PAGES = [
    (plugs.LOSSES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.ADVANTAGES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.REWARDS, "config/reward.py", "guides/rewards.md"),
    (plugs.DATA_FORMATS, "config/data.py", "guides/data.md"),
    (TRANSPORTS, "config/sync.py", "reference/sync.md"),
]
ENGINE_OPTIONS = {"engine", "engines", "nodes_per_engine", "max_total_tokens", "enable_prefix_caching", "hosts", "max_restarts"}
ENGINE_OPTIONS |= {"start_timeout", "request_timeout", "health_timeout"}  # other projects have no equivalent


@pytest.mark.parametrize("plug, config, page", PAGES, ids=[plug.field for plug, *_ in PAGES])
def test_every_built_in_plug_is_documented(plug, config, page):
    texts = (ROOT / "megatron_rl" / config).read_text(), (ROOT / "docs" / page).read_text()
    assert [name for name in plug.builtin for text in texts if f"`{name}`" not in text] == []


@pytest.mark.parametrize("section", ["algorithm", "critic", "lora", "replay", "rollout", "train"])
def test_other_names_has_one_row_for_each_option(section):
    page = (ROOT / "docs/reference/other_names.md").read_text()
    table = page.split(f"| `[{section}]` |")[1].split("\n\n")[0]
    names = [name for name, *_ in re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)]
    annotation = Config.model_fields[section].annotation
    model = next((part for part in get_args(annotation) if part is not type(None)), annotation)  # the section may be optional
    assert sorted(names) == sorted(set(model.model_fields) - ENGINE_OPTIONS)
