"""All CPU transports with real sockets, memory files, gloo and folders, one thread per rank: bytes, order, memory and lost peers."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import UserError
from megatron_rl.sync.checks import check_one_host, check_transport
from parallel.chunking import CHUNKS_IN_FLIGHT, Chunk, resize
from parallel.transport import TRANSPORTS, cuda_ipc, load_transport, process_group, shared_memory
from parallel.transport.base import Link

TCP = "examples.plugs.tcp:TRANSPORT"
ON_CPU = [name for name in (*TRANSPORTS.builtin, TCP) if "cpu" in load_transport(name).devices]
CONNECTED = [name for name in ON_CPU if not load_transport(name).needs_dir]
"""Transports that notice the end of the other side."""


def chunks_between(sources: int, targets: int, sizes: list[int]) -> list[Chunk]:
    """Return a chunk of every size for every pair of ranks, with alternating pairs."""
    sent = dict.fromkeys(range(sources), 0)
    results = []
    for size, target, source in itertools.product(sizes, range(targets), range(sources)):
        results.append(Chunk(source, target, sent[source], size, (), ()))
        sent[source] += size
    return results


def content(chunk: Chunk, turn: int) -> torch.Tensor:
    seed = hash((chunk.source, chunk.target, chunk.offset, turn)) % 2**31
    return torch.randint(0, 256, (chunk.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def settings(transport: str, folder: Path, timeout: float = 20.0) -> SyncConfig:
    return SyncConfig(transport=transport, dir=folder, timeout=timeout)


def link_of(sync: SyncConfig, chunks: list[Chunk], addresses: dict[int, object]) -> Link:
    sources, targets = sorted({chunk.source for chunk in chunks}), sorted({chunk.target for chunk in chunks})
    named = {str(rank): address for rank, address in addresses.items()}
    return Link(sync.transport, named, sources, targets, max(chunk.nbytes for chunk in chunks), sync.timeout)


def run_all(*calls):
    """Run all calls at once, and return their results or raise the first exception."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def open_all(sync: SyncConfig, chunks: list[Chunk]):
    """Return connected outboxes and inboxes, by rank."""
    sources, targets = sorted({chunk.source for chunk in chunks}), sorted({chunk.target for chunk in chunks})
    outboxes = {rank: sync.load_transport().make_outbox(sync, rank, chunks) for rank in sources}
    addresses = {rank: outbox.address for rank, outbox in outboxes.items()}
    link = link_of(sync, chunks, addresses)
    opening = [lambda outbox=outbox: outbox.open(addresses) for outbox in outboxes.values()]
    by_target = {rank: [chunk for chunk in chunks if chunk.target == rank] for rank in targets}
    entering = [lambda rank=rank: load_transport(link.transport).make_inbox(link, rank, by_target[rank]) for rank in targets]
    inboxes = run_all(*opening, *entering)[len(opening) :]
    return outboxes, dict(zip(targets, inboxes, strict=True))


def send_all(outbox, rank: int, chunks: list[Chunk], turn: int) -> None:
    outbox.start(chunks)
    for chunk in chunks:
        if chunk.source == rank:
            outbox.buffer(chunk).copy_(content(chunk, turn))
            outbox.send(chunk)
    outbox.finish()


def receive_all(inbox, rank: int, chunks: list[Chunk], turn: int) -> int:
    """Check the bytes of all chunks, and return the number of chunks."""
    count = 0
    inbox.start([chunk for chunk in chunks if chunk.target == rank])
    for chunk in chunks:
        if chunk.target == rank:
            assert torch.equal(inbox.receive(chunk), content(chunk, turn)), chunk
            inbox.release(chunk)
            count += 1
    inbox.finish()
    return count


@pytest.mark.parametrize("transport", ON_CPU)
@pytest.mark.parametrize("sources, targets", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_every_chunk_arrives_in_order_in_every_sync(transport, sources, targets, tmp_path):
    """This includes syncs with fewer bytes and without bytes."""
    whole = chunks_between(sources, targets, [1, 4096, 70001, 7, 65536])
    outboxes, inboxes = open_all(settings(transport, tmp_path), whole)
    for turn, sizes in enumerate(((1, 4096, 70001, 7, 65536), (1, 0, 1000, 7, 3), (0,) * 5, (0, 0, 0, 0, 65536))):
        every = [size for size in sizes for _ in range(sources * targets)]
        chunks = [chunk for chunk in resize(whole, every) if chunk.nbytes]
        count = sources * sum(size > 0 for size in sizes)
        sending = [lambda r=rank, o=outbox, c=chunks, t=turn: send_all(o, r, c, t) for rank, outbox in outboxes.items()]
        receiving = [lambda r=rank, i=inbox, c=chunks, t=turn: receive_all(i, r, c, t) for rank, inbox in inboxes.items()]
        assert run_all(*sending, *receiving)[len(sending) :] == [count] * targets
    for end in (*outboxes.values(), *inboxes.values()):
        end.close()
        end.close()
    assert list(tmp_path.iterdir()) == []


def memory_of(buffers: list[torch.Tensor]) -> int:
    """Return the bytes of all storages behind these views."""
    storages = [buffer.untyped_storage() for buffer in buffers]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("transport", CONNECTED)
def test_at_most_two_chunks_are_in_flight(transport, tmp_path):
    """A sender waits before it fills a third buffer, and uses memory for two chunks. Each chunk exceeds a socket's buffer."""
    size = 16 << 20
    chunks = chunks_between(1, 1, [size] * 5)
    outboxes, inboxes = open_all(settings(transport, tmp_path), chunks)
    outbox, inbox, filled = outboxes[0], inboxes[0], []
    outbox.start(chunks)
    inbox.start(chunks)
    sent: list[torch.Tensor] = []
    received: list[torch.Tensor] = []

    def send() -> None:
        for number, chunk in enumerate(chunks):
            sent.append(outbox.buffer(chunk).fill_(number))
            filled.append(number)
            outbox.send(chunk)
        outbox.finish()

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(0.5)
    assert sender.is_alive() and len(filled) <= CHUNKS_IN_FLIGHT
    for number, chunk in enumerate(chunks):
        received.append(inbox.receive(chunk))
        assert received[-1].eq(number).all()
        inbox.release(chunk)
    sender.join(60)
    assert not sender.is_alive() and filled == list(range(5))
    assert max(memory_of(sent), memory_of(received)) <= CHUNKS_IN_FLIGHT * size
    outbox.close()
    inbox.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("transport", CONNECTED)
def test_a_side_that_ends_is_noticed_at_once(transport, who, tmp_path):
    chunks = chunks_between(1, 1, [200_000] * 8)
    outboxes, inboxes = open_all(settings(transport, tmp_path), chunks)
    if who == "sender":
        outboxes[0].close()
        outboxes.clear()
        with pytest.raises((OSError, RuntimeError)):
            receive_all(inboxes[0], 0, chunks, 0)
    else:
        inboxes[0].close()
        inboxes.clear()
        with pytest.raises(load_transport(transport).lost_errors):
            send_all(outboxes[0], 0, chunks, 0)


@pytest.mark.parametrize("transport", CONNECTED)
def test_waiting_for_a_silent_engine_ends(transport, tmp_path):
    """One engine never connects, one connects but reads nothing."""
    chunks = chunks_between(1, 1, [1 << 20] * 40)
    sync = settings(transport, tmp_path, timeout=0.5)
    outbox = sync.load_transport().make_outbox(sync, 0, chunks)
    with pytest.raises(load_transport(transport).lost_errors):
        outbox.open({0: outbox.address})
    outbox.close()
    outboxes, inboxes = open_all(sync, chunks)
    with pytest.raises(load_transport(transport).lost_errors):
        send_all(outboxes[0], 0, chunks, 0)
    outboxes[0].close()
    inboxes[0].close()


@pytest.mark.parametrize("transport", ON_CPU)
def test_waiting_for_a_silent_trainer_ends(transport, tmp_path):
    chunks = chunks_between(1, 1, [10])
    _, inboxes = open_all(settings(transport, tmp_path, timeout=0.5), chunks)
    inboxes[0].start(chunks)
    with pytest.raises((OSError, RuntimeError)):
        inboxes[0].receive(chunks[0])


def test_an_unreachable_trainer_is_named_and_a_truncated_file_refused(tmp_path):
    chunks = chunks_between(1, 1, [1000])
    link = link_of(settings("shared_memory", tmp_path), chunks, {0: str(tmp_path / "nowhere")})
    with pytest.raises(OSError, match="cannot reach trainer rank 0 at .*; is it on this host"):
        load_transport("shared_memory").make_inbox(link, 0, chunks)
    outboxes, inboxes = open_all(settings("disk", tmp_path), chunks)
    send_all(outboxes[0], 0, chunks, 0)
    (data,) = tmp_path.glob("*.bin")
    data.write_bytes(data.read_bytes()[:-1])
    inboxes[0].start(chunks)
    with pytest.raises(OSError, match="holds 999 bytes, its manifest says 1000"):
        inboxes[0].receive(chunks[0])


def test_unsuitable_transports_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="sync.dir: must be set for sync.transport = disk"):
        check_transport(SyncConfig(transport="disk"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sync.transport = 'cuda_ipc': needs CUDA.*; use shared_memory"):
        check_transport(SyncConfig(transport="cuda_ipc"))
    for transport in ("shared_memory", "cuda_ipc"):
        with pytest.raises(UserError, match="needs trainer and engines on one host; the trainer's ranks are on 2; use process_group, gloo"):
            check_one_host(SyncConfig(transport=transport), "the trainer's ranks are on 2")
    for transport in ("process_group", "gloo"):
        check_one_host(SyncConfig(transport=transport), "the trainer's ranks are on 2")
        check_transport(SyncConfig(transport=transport), shared=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_transport(SyncConfig(transport="gloo"), shared=True)
    with pytest.raises(UserError, match="sync.delta = 'on': compares weights in host memory, but they are on GPUs here; set"):
        check_transport(SyncConfig(transport="gloo", delta="on"))
    check_transport(SyncConfig(transport="process_group"), shared=False)
    with pytest.raises(UserError, match="'process_group': cannot use the same GPU twice.*; use cuda_ipc on one host, gloo on sev"):
        check_transport(SyncConfig(transport="process_group"), shared=True)
    for transport in ("shared_memory", "disk"):
        with pytest.raises(UserError, match="reads weights from host memory, but trainer and engines are on GPUs here; use cuda_ipc"):
            check_transport(SyncConfig(transport=transport, dir=tmp_path))


def test_a_users_transport_is_checked(tmp_path, monkeypatch):
    line = "import parallel.transport.base as base\nT = base.Transport(__name__)\nclass Outbox: ...\n"
    (tmp_path / "own_transport.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="sync.transport = 'own_transport:Inbox': cannot be imported .AttributeError: module .* has no"):
        check_transport(SyncConfig(transport="own_transport:T"))
    with pytest.raises(UserError, match="'own_transport:Outbox': must be a parallel.transport.base.Transport, not a type; see"):
        check_transport(SyncConfig(transport="own_transport:Outbox"))
    with pytest.raises(UserError, match="'own_transport:U': cannot be imported .AttributeError"):
        check_transport(SyncConfig(transport="own_transport:U"))
    with pytest.raises(ValueError, match="must be one of shared_memory, .*, or your own as module:attribute"):
        SyncConfig(transport="nccl")


def test_gloo_copies_chunks_packed_on_a_gpu_to_the_host(tmp_path, monkeypatch):
    packed: list[torch.Tensor] = []  # stands in for GPU memory: one buffer on each side

    def make_gpu_buffer(nbytes: int) -> torch.Tensor:
        packed.append(torch.zeros(nbytes, dtype=torch.uint8))
        return packed[-1]

    monkeypatch.setattr(process_group, "make_gpu_buffer", make_gpu_buffer)
    monkeypatch.setattr(process_group, "buffer_device", lambda on_device: torch.device("cuda" if on_device else "cpu"))
    chunks = chunks_between(1, 1, [100, 4096, 7])
    outboxes, inboxes = open_all(settings("gloo", tmp_path), chunks)
    for turn in range(2):
        assert run_all(lambda t=turn: send_all(outboxes[0], 0, chunks, t), lambda t=turn: receive_all(inboxes[0], 0, chunks, t))[1] == 3
    assert len(packed) == 2 and all(torch.equal(buffer[:7], content(chunks[-1], 1)) for buffer in packed)


def test_ipc_handles_survive_json():
    shared = dict(zip(cuda_ipc.HANDLE_FIELDS, (0, bytes(range(64)), 1 << 21, 512, b"ref\xff", 7, b"\x00event", True), strict=True))
    assert cuda_ipc.decode(cuda_ipc.encode(shared, "GPU-1")) == (shared, "GPU-1")
    assert cuda_ipc.device_index("b", ["a", "b"]) == 1
    with pytest.raises(OSError, match="does not see the trainer's device c"):
        cuda_ipc.device_index("c", ["a", "b"])
    assert issubclass(cuda_ipc.Outbox, shared_memory.Outbox) and issubclass(cuda_ipc.Inbox, shared_memory.Inbox)
