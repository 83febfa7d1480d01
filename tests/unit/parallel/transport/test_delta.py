"""Deltas of chunks: encoding is lossless for any change, deltas are small, and a wrong base changes the digest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.sync.delta import DeltaBase
from parallel.chunking import Chunk
from parallel.shards import Rect
from parallel.transport.pack import MAX_CHANGED_SHARE, ChunkPacker, decode_delta, encode_delta


@given(st.integers(1, 300_000), st.data())
@settings(max_examples=40, deadline=None)
def test_deltas_are_lossless(nbytes, data):
    places = np.array(sorted(data.draw(st.sets(st.integers(0, nbytes - 1), max_size=50))), np.int64)
    values = np.arange(len(places), dtype=np.uint8)
    delta = encode_delta(places, values, nbytes)
    assert len(delta) == (3 * len(places) + 4 * -(-nbytes // 65536) if len(places) else 0)
    assert [part.tolist() for part in decode_delta(delta, nbytes)] == [places.tolist(), values.tolist()]
    if len(delta):
        with pytest.raises(ValueError, match="are not a delta of a chunk"):
            decode_delta(delta[:-1], nbytes)


def test_invalid_positions_are_refused():
    delta = encode_delta(np.array([3, 70_000]), np.zeros(2, np.uint8), 70_001)
    for wrong in (
        encode_delta(np.array([3, 3]), np.zeros(2, np.uint8), 70_001),
        encode_delta(np.array([9, 3]), np.zeros(2, np.uint8), 70_001),
    ):
        with pytest.raises(ValueError, match="do not ascend within it"):
            decode_delta(wrong, 70_001)
    with pytest.raises(ValueError, match="do not ascend within it"):
        decode_delta(delta, 70_000)


@st.composite
def rects_and_changes(draw):
    """Return rectangles of two tensors, the number of bytes to change (also too many for a delta), and a seed."""
    rects = []
    for name, (rows, cols) in (("w", (300, 700)), ("v", (40, 3))):
        row, col = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
        rects.append((name, Rect(row, col, draw(st.integers(1, rows - row)), draw(st.integers(1, cols - col)))))
    return rects, draw(st.sampled_from([0, 1, 50, 5000, 100_000])), draw(st.integers(0, 9))


@given(rects_and_changes())
@settings(max_examples=60, deadline=None)
def test_applying_a_delta_gives_the_trainers_bytes_and_hash(case):
    named_rects, count, seed = case
    random = torch.Generator().manual_seed(seed)
    live = {"w": torch.randint(0, 256, (300, 700), dtype=torch.uint8, generator=random), "v": torch.randn(40, 3, generator=random)}
    engine = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    source, target = ChunkPacker(live, live), ChunkPacker(engine, engine)
    nbytes = sum(source.view_named_rect(named_rect).size for named_rect in named_rects)
    flat, base, chunk = np.empty(nbytes, np.uint8), DeltaBase(), Chunk(0, 0, 0, nbytes, tuple(named_rects), tuple(named_rects))
    source.pack(named_rects, flat, hashing=False)
    target.unpack(named_rects, flat, hashing=False)
    base.remember(chunk, flat)
    live["w"].view(-1)[torch.randint(0, 210_000, (count,), generator=random)] += 1
    for _ in range(2):  # the second time nothing has changed
        found = base.compare(source, {4: chunk, 7: chunk}, hashing=True)
        assert found[4] is found[7]
        changed = int((flat != (flat := _packed(source, named_rects, nbytes))).sum())
        assert found[4].changed == changed and found[4].digest == source.hash_all([named_rects])[0]
        assert (found[4].delta is None) == (changed > nbytes * MAX_CHANGED_SHARE)
        if found[4].delta is None:
            target.unpack(named_rects, flat, hashing=False)
        else:
            assert len(found[4].delta) < nbytes and (changed == 0) == (len(found[4].delta) == 0)
            assert target.apply(named_rects, found[4].delta, nbytes, hashing=True) == found[4].digest
        assert np.array_equal(_packed(target, named_rects, nbytes), flat)
    target.view_named_rect(named_rects[0])[-1, -1] ^= 1  # a byte that was not sent
    assert target.apply(named_rects, found[4].delta, nbytes, hashing=True) != found[4].digest


def _packed(packer: ChunkPacker, named_rects, nbytes: int) -> np.ndarray:
    flat = np.empty(nbytes, np.uint8)
    packer.pack(named_rects, flat, hashing=False)
    return flat
