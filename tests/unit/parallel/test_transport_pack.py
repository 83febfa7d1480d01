"""Packing chunks: all bytes are covered once, hashes are computed from live memory, and unsuitable tensors are refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from support.geometries import SMALL_MOE, small_model

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import Chunk
from parallel.digest import digest, digest_all, flat_bytes, make_stored_tensors, view_bytes
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect, Shard
from parallel.transport import TRANSPORTS
from parallel.transport.pack import ChunkPacker, check_targets, make_source_packer, make_target_packer

CONTRACT = PrecisionContract.from_config(PrecisionConfig())


def tensors_of(shards: list[Shard], fill) -> dict[str, torch.Tensor]:
    """Return tensors of the shards in the default precision. `fill(shape)` returns their raw bytes."""
    tensors = make_stored_tensors(shards, CONTRACT.format_of)
    for tensor in tensors.values():
        tensor.view(torch.uint8).copy_(fill(tensor.view(torch.uint8).shape))
    return tensors


def random_bytes(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


DENSE = small_model()


@pytest.mark.parametrize("limit", [4096, 100_000, 1 << 30])
@pytest.mark.parametrize(
    "geometry, train, rollout",
    [
        (DENSE, Layout(), 1),
        (DENSE, Layout(tp=2), 1),
        (DENSE, Layout(), 2),
        (DENSE, Layout(tp=2, pp=2), 2),
        (DENSE, Layout(tp=4), 2),
        (DENSE, Layout(dp=2), 2),
        (SMALL_MOE, Layout(ep=2, dp=2), 1),
        (SMALL_MOE, Layout(tp=2, ep=2, etp=1), 2),
    ],
)
def test_chunks_of_any_size_deliver_every_byte(geometry: ModelGeometry, train: Layout, rollout: int, limit: int):
    plan = SyncPlan.make(geometry, train, (rollout, 1), CONTRACT, limit)
    chunks = plan.chunks
    assert max(chunk.nbytes for chunk in chunks) <= limit
    assert sum(chunk.nbytes for chunk in chunks) == sum(transfer.nbytes for transfer in plan.transfers)
    trainer = build_trainer_shards(geometry, train, format_of=CONTRACT.format_of)
    named_tensors = {rank: tensors_of(shards, random_bytes) for rank, shards in trainer.items()}
    live = {rank: tensors_of(shards, lambda shape: torch.full(shape, 7, dtype=torch.uint8)) for rank, shards in plan.targets.items()}
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
    flat = torch.empty(2 * 3 * 4, dtype=torch.uint8)
    memory.pack([("scale", Rect(1, 2, 2, 3))], flat.numpy(), hashing=False)
    assert flat.view(torch.float32).tolist() == [10, 11, 12, 18, 19, 20]
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


def test_byte_matrices_are_writable_views():
    for tensor in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, 5), torch.zeros(4, 6, dtype=torch.float8_e4m3fn)):
        matrix = view_bytes(tensor)
        assert matrix.shape == (tensor.shape[0], tensor[0].numel() * tensor.element_size())
        matrix[...] = 1
        assert tensor.view(torch.uint8).eq(1).all()
    with pytest.raises(ValueError, match="no contiguous rows"):
        view_bytes(torch.zeros(3, 5).T)


@pytest.mark.parametrize(
    "place, nbytes, line",
    [
        (("x", Rect(0, 0, 1, 1)), 4, "there is no tensor x"),
        (("w", Rect(2, 0, 2, 5)), 40, r"w: rows 2\.\.3 lie outside"),
        (("w", Rect(-1, 0, 1, 5)), 20, r"w: rows -1\.\.-1 lie outside"),
        (("w", Rect(0, 3, 3, 3)), 36, "w and its neighbors are 24 bytes in the engine, 36 are coming"),
        (("w", Rect(0, 0, 3, 5)), 15, "w and its neighbors are 60 bytes in the engine, 15 are coming"),
    ],
)
def test_a_chunk_that_does_not_fit_names_the_tensor(place, nbytes, line):
    chunk = Chunk(0, 0, 0, nbytes, (), (place,))
    with pytest.raises(ValueError, match=line):
        check_targets(make_target_packer({"w": torch.zeros(3, 5)}, [chunk]), [chunk])


def test_a_single_value_of_any_stride_has_bytes():
    """`contiguous()` returns the scale of one block of a transposed matrix unchanged, with any stride."""
    scales = torch.arange(8, dtype=torch.float32).view(2, 4).t()[2:3, :1]
    assert scales.stride() == (1, 4) and scales.is_contiguous()
    assert flat_bytes(scales.t()).view(torch.float32).tolist() == [2.0]
    whole = Rect(0, 0, 1, 1)
    assert digest_all({"scales": scales.t()}, [("scales", whole)]) == [digest(torch.tensor([[2.0]]), whole)]
