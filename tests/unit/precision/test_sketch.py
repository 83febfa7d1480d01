"""Sketches tell equal rows from others, add up over ranks, and estimate distances; columns have their places in the whole tensor."""

import pytest
import torch

from megatron_rl.precision import sketch
from megatron_rl.precision.activation_hooks import RankHeads, number_columns
from megatron_rl.precision.sketch import RowRecorder, Sketch, add_recordings, pack_recording, unpack_recording


def rows(count=4, width=96, seed=0, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_or_two_exchanged_columns_change_a_rows_digest_and_no_other(dtype):
    x, columns = rows(dtype=dtype), torch.arange(96)
    same, flipped, swapped = Sketch.of(x, columns), x.clone(), x.clone()
    flipped.view(torch.uint8)[2, 5 * x.element_size()] ^= 1
    swapped[1, [3, 4]] = x[1, [4, 3]]
    for other, row in ((flipped, 2), (swapped, 1)):
        differs = same.exact[:, 0] != Sketch.of(other, columns).exact[:, 0]
        assert differs.tolist() == [index == row for index in range(4)]
    assert torch.equal(
        Sketch.of(torch.tensor([[0.0]]), torch.tensor([7])).exact, Sketch.of(torch.tensor([[-0.0]]), torch.tensor([7])).exact
    )
    assert torch.equal(same.exact, Sketch.of(x.float(), columns).exact), "values are compared, whatever their dtype"


def test_distances_are_estimated():
    x, y = rows(64, 512), rows(64, 512) + 1e-3 * rows(64, 512, seed=1)
    one, other = (Sketch.of(each, torch.arange(512)).moments for each in (x, y))
    squared = (one[:, 1:] - other[:, 1:]).square().mean(-1)
    assert torch.allclose(squared.mean(), (x - y).double().square().sum(-1).mean(), rtol=0.2)
    assert torch.allclose(one[:, 0], x.double().square().sum(-1))


@pytest.mark.parametrize("kind", ["whole", "split", "pairs", "kv", "qkv"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_every_column_once(kind, size):
    """With four ranks, two share each of the two heads of keys."""
    heads, dim = {"queries": 4, "keys": 2}, 3
    keys = max(1, 2 // size)
    width = {"whole": 24, "split": 24 // size, "pairs": 24 // size, "kv": keys * dim, "qkv": (4 // size + 2 * keys) * dim}[kind]
    total = {"kv": 2 * dim, "qkv": 8 * dim}.get(kind, 24)
    columns = [number_columns(kind, width, RankHeads(rank, size, **heads)) for rank in range(size)]
    assert sorted(torch.cat([each for each in columns if each is not None]).tolist()) == list(range(total))
    if kind == "qkv" and size == 2:  # queries 2 and 3, key 1, value 1
        assert columns[1].tolist() == [*range(6, 12), *range(15, 18), *range(21, 24)]


def test_the_recordings_of_ranks_add_up_to_that_of_the_whole_and_pass_as_bytes():
    x, whole, parts = rows(), RowRecorder(), [RowRecorder(), RowRecorder()]
    whole.begin_pass(4)
    whole.add("op", torch.arange(4), x, torch.arange(96))
    for rank, part in enumerate(parts):
        part.begin_pass(1)  # of another sequence
        part.begin_pass(4)
        columns = torch.arange(48) + 48 * rank
        part.add("op", torch.arange(4), x[:, columns], columns)
    packed = [unpack_recording(pack_recording(part.select(torch.tensor([4, 1, 5])))) for part in parts]  # row 5 does not exist
    found, expected = add_recordings(packed)["op"], whole.select(torch.tensor([3, 0]))["op"]
    assert torch.equal(found.sketch.exact[:2], expected.sketch.exact) and torch.allclose(found.sketch.moments[:2], expected.sketch.moments)
    assert found.sketch.exact[2].tolist() == [0, 0] and found.dtype == "fp32"
    assert parts[1].get_values("op", 4).values == x[3, 48:].tolist() and parts[1].get_values("op", 4).columns == list(range(48, 96))


def test_values_beyond_the_budget_are_only_sketched(monkeypatch):
    monkeypatch.setattr(sketch, "MAX_KEPT_BYTES", 600)
    recorder = RowRecorder()
    recorder.begin_pass(1)
    for op in ("first", "second"):
        recorder.add(op, torch.arange(1), rows(1), torch.arange(96))
    assert len(recorder.get_values("first", 0).values) == 96 and recorder.get_values("second", 0).values == []
    assert recorder.select(torch.tensor([0]))["second"].sketch.exact[0, 1] == 96
