"""Agents behind a proxy that drops, delays, loses, and repeats: what is trained is what they have received, token for token."""

from collections import Counter

import engine_checks
import pytest
import torch
from support.lossy_agents import FAULTS


@pytest.mark.long
def test_what_is_trained_is_what_was_received(unified, tmp_path):
    asked = unified.call(engine_checks.sample_behind_a_proxy, 4, 200, tmp_path)[0]
    assert asked["errors"] == [""] * 4 and asked["notes"] == []
    for trained, noted in zip(asked["trained"], asked["received"], strict=True):
        assert trained == sorted(noted["received"]) and len(trained) == 6
    faults = Counter(fault for noted in asked["received"] for fault in noted["faults"])
    assert faults.total() > 24 and faults.keys() == set(FAULTS), faults
    assert torch.equal(asked["engine"], asked["trainer"])
