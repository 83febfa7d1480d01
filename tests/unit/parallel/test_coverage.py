"""Arithmetic on rectangles: what is left out, and whether the chunks of a plan are all of an engine rank's tensors."""

import random
from dataclasses import replace

import numpy as np
import pytest
from support.geometries import SMALL_MOE, published_model, small_model
from support.golden.slow_cut import as_fp8

from parallel.adapters import AdapterGeometry
from parallel.chunking import make_chunks
from parallel.coverage import Gaps, as_matrix, check_chunks, find_gaps
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import add_scale_transfers, list_stored_tensors, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Rect


def test_gaps_are_what_a_mask_leaves_out():
    drawing = random.Random(3)
    for _ in range(200):
        rows, cols = drawing.randint(1, 12), drawing.randint(1, 12)
        mask, rects = np.zeros((rows, cols), bool), []
        for _ in range(drawing.randint(0, 8)):
            row, col = drawing.randrange(rows), drawing.randrange(cols)
            rect = Rect(row, col, drawing.randint(1, rows - row), drawing.randint(1, cols - col))
            place = mask[row : row + rect.rows, col : col + rect.cols]
            if not place.any():
                place[...] = True
                rects.append(rect)
        gaps = find_gaps(Rect(0, 0, rows, cols), drawing.sample(rects, len(rects)))
        for row, col, height, width in gaps:
            place = mask[row : row + height, col : col + width]
            assert place.size and not place.any(), "gaps are disjoint, and no rectangle covers them"
            place[...] = True
        assert mask.all()


def take_layers(name: str, count: int) -> ModelGeometry:
    model = published_model(name)
    return replace(model, attention=model.attention[:count])


@pytest.mark.parametrize(
    "rects", [[Rect(0, 0, 3, 4), Rect(2, 0, 2, 4)], [Rect(0, 0, 4, 4), Rect(0, 0, 4, 4)], [Rect(0, 0, 5, 4)], [Rect(-1, 0, 2, 4)]]
)
def test_rectangles_that_overlap_or_lie_outside_are_refused(rects):
    """A hole as large as an overlap would else go unnoticed."""
    with pytest.raises(ValueError, match=r"^rows -?\d\.\.\d, columns 0\.\.3 are written twice, or lie outside$"):
        find_gaps(Rect(0, 0, 4, 4), rects)


def test_equal_rectangles_are_compared_once(monkeypatch):
    asked = []
    monkeypatch.setattr("parallel.coverage.find_gaps", lambda *key: asked.append(key) or [])
    gaps = Gaps()
    for _ in range(5):
        assert gaps.find(Rect(0, 0, 4, 4), [Rect(0, 0, 4, 4)]) is None
    assert len(asked) == 1


@pytest.mark.parametrize("model, tp, ep", [
    (small_model(), 1, 1), (small_model(), 2, 1), (small_model(vocab=300, tied=True), 4, 1), (SMALL_MOE, 2, 2), (SMALL_MOE, 2, 1),
    (small_model(adapters=AdapterGeometry(8, ("linear_qkv", "linear_fc1")), kv_scales=True), 2, 1),
    (take_layers("DeepSeek-V3", 4), 8, 4), (take_layers("GLM-4.5", 4), 4, 1), (take_layers("Qwen3.5-35B-A3B", 4), 4, 2),
], ids=lambda value: getattr(value, "family", str(value)))  # fmt: skip
def test_a_plan_covers_what_engines_hold(model, tp, ep):
    targets = build_engine_shards(model, tp, ep, engines=2)
    transfers = add_scale_transfers(reshard(build_trainer_shards(model, Layout(), format_of=as_fp8), targets, as_fp8))
    sizes = check_chunks(targets, make_chunks(transfers, 1 << 24), as_fp8)
    for rank, shards in targets.items():
        stored = list_stored_tensors(shards, as_fp8).values()
        nbytes = sum(format.element_bytes * (whole := as_matrix(shape)).rows * whole.cols for format, shape in stored)
        assert sizes[rank] == (len(stored), nbytes)
