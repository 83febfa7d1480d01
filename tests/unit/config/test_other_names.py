"""docs/reference/other_names.md has a row for every option that it promises, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from megatron_rl.config import Config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "other_names.md"
OF_THE_ENGINE = {"engine", "engines", "nodes_per_engine", "max_total_tokens", "enable_prefix_caching", "hosts", "max_restarts"}
OF_THE_ENGINE |= {"start_timeout", "request_timeout", "health_timeout"}
"""How engines are placed and watched, which is each project's own."""


@pytest.mark.parametrize("section", ["algorithm", "critic", "lora", "replay", "rollout", "train"])
def test_every_option_has_one_row_with_a_name_for_each_project(section):
    table = PAGE.read_text().split(f"| `[{section}]` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, re.MULTILINE)
    names = [name for name, *_ in rows]
    annotation = Config.model_fields[section].annotation
    model = next((part for part in get_args(annotation) if part is not type(None)), annotation)  # of a section that may be left out
    fields = set(model.model_fields) - OF_THE_ENGINE
    assert len(names) == len(set(names)) and set(names) == fields, set(names) ^ fields
