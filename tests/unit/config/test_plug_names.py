"""Every built-in plug is named where its field is documented and on its reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl import plugs
from parallel.transport import TRANSPORTS

ROOT = Path(__file__).parents[3]
PAGES = [
    (plugs.LOSSES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.ADVANTAGES, "config/algorithm.py", "reference/algorithms.md"),
    (plugs.REWARDS, "config/reward.py", "guides/rewards.md"),
    (plugs.DATA_FORMATS, "config/data.py", "guides/data.md"),
    (TRANSPORTS, "config/sync.py", "reference/sync.md"),
]


@pytest.mark.parametrize("plug, config, page", PAGES, ids=[plug.field for plug, *_ in PAGES])
def test_every_builtin_is_documented(plug, config, page):
    texts = (ROOT / "megatron_rl" / config).read_text(), (ROOT / "docs" / page).read_text()
    assert [name for name in plug.builtin for text in texts if f"`{name}`" not in text] == []
