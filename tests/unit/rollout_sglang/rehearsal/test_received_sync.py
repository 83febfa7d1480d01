"""A sync without data: bytes that are not written, or are written twice, are reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from parallel.chunking import Chunk
from parallel.shards import Rect
from rollout_sglang.rehearsal.sync import receive

LEFT, RIGHT = ("w", Rect(0, 0, 6, 3)), ("w", Rect(0, 3, 6, 5))
SCALES = ("s", Rect(0, 0, 4, 1))


def make_chunk(*targets: tuple[str, Rect]) -> Chunk:
    return Chunk(0, 0, 0, sum(rect.rows * rect.cols * (2 if name == "w" else 4) for name, rect in targets), (), targets)


def live() -> dict[str, torch.Tensor]:
    return {
        "w": torch.empty(2, 3, 8, dtype=torch.bfloat16, device="meta"),
        "s": torch.empty(4, dtype=torch.float32, device="meta"),
    }


def test_all_bytes_written_once():
    receive(live(), [make_chunk(LEFT), make_chunk(RIGHT, SCALES)])


@pytest.mark.parametrize(
    ("chunks", "fault"),
    [
        ([make_chunk(LEFT, RIGHT)], "s: a sync writes row 0, bytes 0..3 0 times"),
        ([make_chunk(LEFT, SCALES)], "w: a sync writes row 0, bytes 6..15 0 times"),
        ([make_chunk(LEFT, SCALES), make_chunk(("w", Rect(0, 3, 5, 5)))], "w: a sync writes row 5, bytes 6..15 0 times"),
        ([make_chunk(LEFT, RIGHT), make_chunk(SCALES, ("w", Rect(2, 0, 1, 4)))], "w: a sync writes row 2, bytes 0..5 2 times"),
        ([make_chunk(LEFT, RIGHT, ("s", Rect(0, 0, 5, 1)))], "s: rows 0..4 lie outside"),
        ([make_chunk(LEFT, RIGHT, SCALES, ("gone", Rect(0, 0, 1, 1)))], "there is no tensor gone"),
    ],
)
def test_a_fault_has_the_name_of_its_tensor(chunks: Sequence[Chunk], fault: str):
    with pytest.raises(ValueError, match=fault):
        receive(live(), chunks)


def test_two_names_of_one_memory_are_written_twice():
    shared = torch.empty(6, 8, dtype=torch.bfloat16, device="meta")
    whole = Rect(0, 0, 6, 8)
    with pytest.raises(ValueError, match=r"w: a sync writes row 0, bytes 0\.\.15 2 times"):
        receive({"w": shared, "tied": shared}, [Chunk(0, 0, 0, 192, (), (("w", whole), ("tied", whole)))])
