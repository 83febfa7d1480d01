"""NCCL transfers over a fake ProcessGroupNCCL: a lost peer raises an error, and closing aborts the group."""

import os
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.sync import SyncConfig
from parallel.chunking import Chunk
from parallel.transport import PROCESS_GROUP, base, process_group

ErrorType = Enum("ErrorType", ["SUCCESS", "REMOTE_ERROR"])
CHUNKS = [Chunk(0, 0, 0, 64, (), ()), Chunk(0, 0, 64, 32, (), ())]


class FakeWork:
    def __init__(self, group: "FakeNccl") -> None:
        self.group, self.ordered = group, False

    def is_completed(self) -> bool:
        return self.group.moves or self.group.error is not ErrorType.SUCCESS

    def wait(self) -> None:
        self.ordered = True


class FakeNccl:
    """Replaces ProcessGroupNCCL. With `moves = False`, transfers never complete."""

    def __init__(self, store, rank: int, size: int, options) -> None:
        self.handling = os.environ.get(process_group._ERROR_HANDLING)
        self.moves, self.error, self.aborted, self.works = True, ErrorType.SUCCESS, 0, []
        self.seconds = options._timeout.total_seconds()

    def send(self, tensors, peer: int, tag: int) -> FakeWork:
        self.works.append(FakeWork(self))
        return self.works[-1]

    recv = send

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.aborted += 1

    Options = SimpleNamespace


@pytest.fixture
def link(monkeypatch):
    """Return an outbox and an inbox that are connected by the fake group."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(process_group, "buffer_device", lambda on_device: torch.device("cuda"))
    monkeypatch.setattr(process_group, "_make_buffers", lambda nbytes, device: [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)])
    store = dist.HashStore()
    for member in range(2):
        store.set(f"joined {member}", "")
    monkeypatch.setattr(process_group, "_connect_to_store", lambda host, port, timeout: store)
    settings = SyncConfig(transport="process_group", timeout=0.2)
    outbox = PROCESS_GROUP.make_outbox(settings, 0, CHUNKS)
    outbox._store = store
    outbox.open({0: outbox.address})
    inbox = PROCESS_GROUP.make_inbox(base.Link("process_group", {"0": outbox.address}, [0], [0], 64, 0.2), 0, CHUNKS)
    return outbox, inbox


def send(outbox) -> None:
    outbox.start(CHUNKS)
    for chunk in CHUNKS:
        outbox.buffer(chunk)
        outbox.send(chunk)
    outbox.finish()


def receive(inbox) -> None:
    inbox.start(CHUNKS)
    for chunk in CHUNKS:
        inbox.receive(chunk)
        inbox.release(chunk)


@pytest.mark.parametrize("half, run", [(0, send), (1, receive)])
def test_a_lost_peer_raises_and_closing_aborts_the_group(link, half, run):
    side = link[half]
    group = side._group._group
    run(side)
    assert [work.ordered for work in group.works] == [True, True] and not group.aborted
    group.moves = False
    with pytest.raises(PROCESS_GROUP.lost_errors, match=r"^its peer moved no chunk within 0.2 s \(sync.timeout\)$"):
        run(side)
    side.close()
    side.close()
    assert group.aborted == 1


def test_an_error_of_nccl_is_raised(link):
    group = link[1]._group._group
    group.moves, group.error = False, ErrorType.REMOTE_ERROR
    with pytest.raises(RuntimeError, match="NCCL reports REMOTE_ERROR"):
        receive(link[1])
    assert not any(work.ordered for work in group.works)


def test_error_handling_is_set_for_this_group_only_and_waiting_for_a_missing_member_times_out(link, monkeypatch):
    group = link[0]._group._group
    assert group.handling == "2" and group.seconds == 0.2 and process_group._ERROR_HANDLING not in os.environ
    monkeypatch.setenv(process_group._ERROR_HANDLING, "1")
    store = dist.HashStore()
    process_group.NcclGroup(store, 0, 1, 0.2)
    assert os.environ[process_group._ERROR_HANDLING] == "1"
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    with pytest.raises(RuntimeError):
        process_group.NcclGroup(dist.HashStore(), 0, 2, 0.05)
