"""Values of a sealed store: only those who know the secret can write one that others accept."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from parallel.transport.process_group import listening_store
from parallel.transport.sealed_store import SealedStore, SealError

SECRET = b"s" * 32


@pytest.fixture
def open_store():
    return listening_store("127.0.0.1", 5.0)


@pytest.mark.parametrize("value", ["", "text", b"", b"\x00\xff bytes", "\u00e9", b"x" * 100_000])
def test_values_come_back_as_bytes(open_store, value):
    SealedStore(open_store, SECRET).set("key", value)
    assert SealedStore(open_store, SECRET).get("key") == (value.encode() if isinstance(value, str) else value)


def test_values_come_back_below_torchs_prefixes(open_store):
    sealed = SealedStore(dist.PrefixStore("inner", open_store), SECRET)
    store = dist.PrefixStore("outer", sealed)
    store.set("key", "value")
    assert store.get("key") == b"value" and store.add("count", 2) == 2 and store.check(["key"]) and not store.check(["other"])
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError):
        store.wait(["other"])


def copy_other_key(store: dist.Store) -> None:
    SealedStore(store, SECRET).set("other", "value")
    store.set("key", store.get("other"))


PLANTED = {
    "plain text": lambda store: store.set("key", "value"),
    "nothing": lambda store: store.set("key", ""),
    "hexadecimal digits": lambda store: store.set("key", "00" * 40),
    "half a seal": lambda store: store.set("key", store.get("key")[:20]),
    "another secret": lambda store: SealedStore(store, b"t" * 32).set("key", "value"),
    "a value moved from another key": copy_other_key,
    "one bit": lambda store: store.set("key", store.get("key")[:-1] + b"0"),
    "a longer value": lambda store: store.set("key", store.get("key") + b"00"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_a_stranger_writes_is_refused(open_store, kind):
    store = SealedStore(open_store, SECRET)
    store.set("key", "value")
    PLANTED[kind](open_store)
    with pytest.raises(SealError, match="another program has written 'key' into the store at which ranks meet"):
        store.get("key")
