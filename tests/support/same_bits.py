"""Results of two runs that must have the same bits; a difference is named by where it is."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch


def assert_same(ours: Any, theirs: Any, unlike: Set[str] = frozenset(), name: str = "") -> None:
    """Compare dictionaries, lists, tensors and numbers, nested in any way; entries of the keys `unlike` may differ."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - unlike:
            assert_same(ours[key], theirs[key], unlike, f"{name} {key}")
    elif isinstance(theirs, list):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, unlike, f"{name} {number}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), name
    else:
        assert ours == theirs, name
