"""A transport of the user's own that misbehaves: on both sides, it becomes a line that names the field and the transport."""

import re

import pytest
import torch
from support.misbehaving import VARIABLE

from megatron_rl.config.sync import SyncConfig
from parallel import user_code
from parallel.chunking import Chunk
from parallel.plug import PlugError
from parallel.transport import load_transport
from parallel.transport.base import Link
from parallel.transport.guarded import GuardedTransport

NAME = "support.misbehaving_transport:TRANSPORT"
ENDINGS = {
    "raises": "ValueError: two lines",
    "raises no Exception": "OddError: odd",
    "interrupts": "KeyboardInterrupt",
    "calls sys.exit": "SystemExit: 0",
    "calls os._exit": "os._exit(0)",
}
WRONG_BYTES = {
    "wrong length": "a buffer must be a contiguous tensor, torch.uint8 [64], not torch.uint8 [63]",
    "wrong type": "not str",
    "nan": "not torch.float32 [64]",
}
CHUNK = Chunk(0, 0, 0, 64, (), ())


def make(timeout=5.0):
    """Return the guarded outbox of trainer rank 0, the guarded transport, and the link to it."""
    sync = SyncConfig(transport=NAME, timeout=timeout)
    transport = sync.load_transport()
    assert isinstance(transport, GuardedTransport) and (transport.devices, transport.largest_chunk) == (("cpu",), 16 << 20)
    outbox = transport.make_outbox(sync, 0, [CHUNK])
    return outbox, transport, Link(NAME, {"0": outbox.address}, [0], [0], 64, timeout)


def connect(transport, link, outbox):
    inbox = transport.make_inbox(link, 0, [CHUNK])  # it waits in the listener's queue until it is accepted
    outbox.open({0: outbox.address})
    return inbox


def expect(says):
    return pytest.raises(PlugError, match="^" + re.escape(f"sync.transport = '{NAME}': fails (") + ".*" + re.escape(says))


def test_bytes_arrive_through_the_guards():
    outbox, transport, link = make()
    inbox = connect(transport, link, outbox)
    outbox.start([CHUNK])
    inbox.start([CHUNK])
    outbox.buffer(CHUNK).copy_(torch.arange(64, dtype=torch.uint8))
    outbox.send(CHUNK)
    assert inbox.receive(CHUNK).tolist() == [*range(64)]
    inbox.release(CHUNK)
    for side in (outbox, inbox):
        side.finish()
        side.close()


@pytest.mark.parametrize("misdeed", [*ENDINGS, *WRONG_BYTES])
def test_each_side_names_the_transport(misdeed, monkeypatch):
    says = (ENDINGS | WRONG_BYTES)[misdeed]
    outbox, transport, link = make()
    inbox = connect(transport, link, outbox)
    monkeypatch.setenv(VARIABLE, f"buffer {misdeed}")
    with expect(says):
        outbox.buffer(CHUNK)
    monkeypatch.setenv(VARIABLE, f"receive {misdeed}")
    outbox.buffer(CHUNK)
    outbox.send(CHUNK)
    with expect(says):
        inbox.receive(CHUNK)
    if misdeed in ENDINGS:
        for where, call in (("send", lambda: outbox.send(CHUNK)), ("connect", lambda: transport.make_inbox(link, 0, [CHUNK]))):
            monkeypatch.setenv(VARIABLE, f"{where} {misdeed}")
            with expect(says):
                call()
        monkeypatch.setenv(VARIABLE, f"close {misdeed}")
    outbox.close()  # an error here would hide why it is closed
    inbox.close()


def test_addresses_are_json_hangs_end_and_a_lost_connection_stays_one(monkeypatch):
    monkeypatch.setenv(VARIABLE, "address wrong type")
    with expect("TypeError: Object of type object is not JSON serializable"):
        make()
    monkeypatch.setenv(VARIABLE, "send hangs")
    outbox, transport, link = make(timeout=0.2)
    connect(transport, link, outbox)
    with expect("it did not end within 0.4 s"):
        outbox.send(CHUNK)
    monkeypatch.delenv(VARIABLE)
    outbox, transport, link = make(timeout=0.2)
    with pytest.raises(TimeoutError):
        outbox.open({0: outbox.address})  # nobody connects: the sync is repeated with another engine
    assert load_transport("gloo").make_outbox.__self__ == load_transport("gloo") and user_code.list_running() == []
