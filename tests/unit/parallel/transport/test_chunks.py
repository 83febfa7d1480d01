"""Chunks and their deltas: bounded and complete, every byte arrives once, encoding is lossless, and a wrong base changes the digest."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.geometries import SMALL_MOE, small_model

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.transfer import DeltaBase
from parallel.chunking import Chunk, clip_transfer, make_chunks
from parallel.digest import digest, digest_all, flat_bytes, make_stored_tensors, view_bytes
from parallel.formats import BF16, FP8, TensorFormat
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer
from parallel.shards import Rect, Shard
from parallel.transport import TRANSPORTS
from parallel.transport.pack import (
    MAX_CHANGED_SHARE,
    ChunkPacker,
    check_targets,
    decode_delta,
    encode_delta,
    make_source_packer,
    make_target_packer,
)


def whole(name: str, rows: int, cols: int, format: TensorFormat) -> Transfer:
    return Transfer(0, name, Rect(0, 0, rows, cols), 0, name, Rect(0, 0, rows, cols), format)


@given(st.data())
def test_every_row_of_every_tensor_lies_in_one_chunk_of_bounded_size(data):
    itemsize = {FP8: 1, BF16: 2, FP8.scale: 4}
    shape = st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from(list(itemsize)))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=8))
    transfers = [whole(f"p{index}", *shape) for index, shape in enumerate(shapes)]
    limit = data.draw(st.integers(48, 300))
    rows: dict[str, list[int]] = {transfer.target: [] for transfer in transfers}
    end = 0
    for chunk in make_chunks(transfers, limit):
        assert chunk.sources == chunk.targets and chunk.offset == end
        end += chunk.nbytes
        nbytes = 0
        for name, rect in chunk.targets:
            format, cols = next((transfer.format, transfer.target_rect.cols) for transfer in transfers if transfer.target == name)
            assert rect.rows > 0 and (rect.col, rect.cols) == (0, cols)
            nbytes += rect.rows * cols * itemsize[format]
            rows[name] += range(rect.row, rect.row + rect.rows)
        assert 0 < nbytes == chunk.nbytes <= limit
    assert rows == {transfer.target: list(range(transfer.target_rect.rows)) for transfer in transfers}


def test_a_row_larger_than_a_chunk_is_refused_and_transfers_are_clipped():
    with pytest.raises(ValueError, match="one row of wide.weight is 1024 bytes, a chunk holds 1000"):
        make_chunks([whole("wide.weight", 3, 512, BF16)], 1000)
    assert len(make_chunks([whole("wide.weight", 3, 512, BF16)], 1024)) == 3
    transfer = Transfer(0, "a", Rect(100, 7, 10, 5), 0, "b", Rect(10, 3, 10, 5), FP8)
    for start, end, row, rows in ((0, 11, 0, 1), (12, 16, 2, 4), (18, 27, 8, 2)):
        assert clip_transfer(transfer, start, end) == (Rect(100 + row, 7, rows, 5), Rect(10 + row, 3, rows, 5))


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
    for places, nbytes in (([3, 3], 70_001), ([9, 3], 70_001), ([3, 70_000], 70_000)):
        delta = encode_delta(np.array(places), np.zeros(2, np.uint8), 70_001)
        with pytest.raises(ValueError, match="do not ascend within it"):
            decode_delta(delta, nbytes)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_applying_a_delta_gives_the_trainers_bytes_and_hash(data):
    named_rects = []
    for name, (rows, cols) in (("w", (300, 700)), ("v", (40, 3))):
        row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
        named_rects.append((name, Rect(row, col, data.draw(st.integers(1, rows - row)), data.draw(st.integers(1, cols - col)))))
    count = data.draw(st.sampled_from([0, 1, 50, 5000, 100_000]))  # bytes to change, also too many for a delta
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
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


CONTRACT = PrecisionContract.from_config(PrecisionConfig())


def tensors_of(shards: list[Shard], fill: int | None = None) -> dict[str, torch.Tensor]:
    """Return tensors of the shards in the default precision, whose bytes are random or `fill`."""
    tensors = make_stored_tensors(shards, CONTRACT.format_of)
    for tensor in tensors.values():
        tensor.view(torch.uint8).random_(256) if fill is None else tensor.view(torch.uint8).fill_(fill)
    return tensors


DENSE = small_model()


@pytest.mark.parametrize("limit", [4096, 100_000, 1 << 30])
@pytest.mark.parametrize("geometry, train, rollout", [
    (DENSE, Layout(), 1),
    (DENSE, Layout(tp=2), 1),
    (DENSE, Layout(), 2),
    (DENSE, Layout(tp=2, pp=2), 2),
    (DENSE, Layout(tp=4), 2),
    (DENSE, Layout(dp=2), 2),
    (SMALL_MOE, Layout(ep=2, dp=2), 1),
    (SMALL_MOE, Layout(tp=2, ep=2, etp=1), 2),
])  # fmt: skip
def test_chunks_of_any_size_deliver_every_byte(geometry: ModelGeometry, train: Layout, rollout: int, limit: int):
    plan = SyncPlan.make(geometry, train, (rollout, 1), CONTRACT, limit)
    chunks = plan.chunks
    assert max(chunk.nbytes for chunk in chunks) <= limit
    assert sum(chunk.nbytes for chunk in chunks) == sum(transfer.nbytes for transfer in plan.transfers)
    trainer = build_trainer_shards(geometry, train, format_of=CONTRACT.format_of)
    named_tensors = {rank: tensors_of(shards) for rank, shards in trainer.items()}
    live = {rank: tensors_of(shards, fill=7) for rank, shards in plan.targets.items()}
    sources = {rank: make_source_packer(named_tensors[rank], chunks, rank) for rank in named_tensors}
    targets = {rank: make_target_packer(live[rank], [chunk for chunk in chunks if chunk.target == rank]) for rank in live}
    sent = dict.fromkeys(named_tensors, 0)
    for chunk in chunks:
        assert chunk.offset == sent[chunk.source]
        sent[chunk.source] += chunk.nbytes
        flat = torch.empty(chunk.nbytes, dtype=torch.uint8).numpy()
        received = Chunk.from_json(chunk.target, json.loads(json.dumps(chunk.to_json())))
        assert received == replace(chunk, sources=())
        before = sources[chunk.source].pack(chunk.sources, flat, hashing=True)
        assert targets[chunk.target].unpack(received.targets, flat, hashing=True) == before
    for transfer in plan.transfers:
        source, target = named_tensors[transfer.source_rank][transfer.source], live[transfer.target_rank][transfer.target]
        assert digest(source, transfer.source_rect) == digest(target, transfer.target_rect)
    vocabulary = live[rollout - 1]["model.embed_tokens.weight"].view(torch.uint8)
    padding = rollout * vocabulary.shape[0] - geometry.vocab
    assert padding > 0 and vocabulary[-padding:].eq(7).all()  # padding of the vocabulary is not sent


def test_engine_ranks_alternate_and_chunks_respect_the_setting():
    plan = SyncPlan.make(small_model(), Layout(), (2, 1), CONTRACT, 50_000)
    assert [chunk.target for chunk in plan.chunks[:6]] == [0, 1] * 3
    assert SyncConfig(bucket_mb=1).chunk_bytes == 512 << 10
    for transport in TRANSPORTS.builtin:
        for bucket_mb in (1, 2, 16, 4096):
            assert 2 * SyncConfig(transport=transport, bucket_mb=bucket_mb).chunk_bytes <= bucket_mb << 20


def test_padding_columns_are_not_packed():
    """Transformer Engine stores scales as views of wider tensors."""
    padded = torch.arange(4 * 8, dtype=torch.float32).reshape(4, 8)
    memory = ChunkPacker({"scale": padded[:, :5]}, ["scale"])
    flat = _packed(memory, [("scale", Rect(1, 2, 2, 3))], 2 * 3 * 4)
    assert flat.view(np.float32).tolist() == [10, 11, 12, 18, 19, 20]
    with pytest.raises(ValueError, match="are 24 bytes here, 25 on the other side"):
        memory.pack([("scale", Rect(1, 2, 2, 3))], torch.empty(25, dtype=torch.uint8).numpy(), hashing=False)


def test_one_wrong_byte_changes_the_digest():
    """The tensor is larger than a hashing batch, and hashed as a whole or as a range of columns. Staged bytes are hashed after the copy."""
    for rect, byte in itertools.product((Rect(0, 0, 700, 1024), Rect(0, 1024, 700, 1024)), (0, 100_000, 1024 * 700 - 1)):
        values = torch.randint(0, 256, (700, 2048), dtype=torch.uint8)
        named_rects, flat = [("w", rect)], torch.empty(700 * 1024, dtype=torch.uint8).numpy()
        sent = ChunkPacker({"w": values}, ["w"]).pack(named_rects, flat, hashing=True)
        staging, live = (ChunkPacker({"w": torch.zeros(700, 2048, dtype=torch.uint8)}, ["w"]) for _ in range(2))
        assert staging.unpack(named_rects, flat, hashing=True) == sent == live.copy(named_rects, staging, hashing=True)
        flat[byte] ^= 1
        assert staging.unpack(named_rects, flat, hashing=True) != sent != live.copy(named_rects, staging, hashing=True)
        assert live.hash_seconds > 0


def test_byte_matrices_are_writable_views_and_a_single_value_of_any_stride_has_bytes():
    for tensor in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, 5), torch.zeros(4, 6, dtype=torch.float8_e4m3fn)):
        matrix = view_bytes(tensor)
        assert matrix.shape == (tensor.shape[0], tensor[0].numel() * tensor.element_size())
        matrix[...] = 1
        assert tensor.view(torch.uint8).eq(1).all()
    with pytest.raises(ValueError, match="no contiguous rows"):
        view_bytes(torch.zeros(3, 5).T)
    scales = torch.arange(8, dtype=torch.float32).view(2, 4).t()[2:3, :1]
    assert scales.stride() == (1, 4) and scales.is_contiguous()
    assert flat_bytes(scales.t()).view(torch.float32).tolist() == [2.0]
    whole = Rect(0, 0, 1, 1)
    assert digest_all({"scales": scales.t()}, [("scales", whole)]) == [digest(torch.tensor([[2.0]]), whole)]


@pytest.mark.parametrize("place, nbytes, line", [
    (("x", Rect(0, 0, 1, 1)), 4, "there is no tensor x"),
    (("w", Rect(2, 0, 2, 5)), 40, r"w: rows 2\.\.3 lie outside"),
    (("w", Rect(-1, 0, 1, 5)), 20, r"w: rows -1\.\.-1 lie outside"),
    (("w", Rect(0, 3, 3, 3)), 36, "w and its neighbors are 24 bytes in the engine, 36 are coming"),
    (("w", Rect(0, 0, 3, 5)), 15, "w and its neighbors are 60 bytes in the engine, 15 are coming"),
])  # fmt: skip
def test_a_chunk_that_does_not_fit_names_the_tensor(place, nbytes, line):
    chunk = Chunk(0, 0, 0, nbytes, (), (place,))
    with pytest.raises(ValueError, match=line):
        check_targets(make_target_packer({"w": torch.zeros(3, 5)}, [chunk]), [chunk])
