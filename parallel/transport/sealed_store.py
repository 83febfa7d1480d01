"""A torch store whose values carry a seal, so that only those who know a secret can write a value that others accept.

torch's TCPStore has no password: whoever reaches its socket reads and writes every key. Ranks find each other by what they read there, so a
stranger who replaced an address would take a rank's place. A seal is a keyed hash of key and value. Counters carry none.
"""

import hashlib
import hmac
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_SEAL_BYTES = hashlib.sha256().digest_size


class SealError(RuntimeError):
    """Raised for a value without a seal."""


class SealedStore(dist.Store):
    """Seals what is written to `store`, and raises SealError for a value without the seal of `secret`.

    Keep a reference: torch's own stores and groups keep only the C++ part of the object. NCCL does not use it, because that was not tried.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, (self._seal(key, data) + data).hex())

    def get(self, key: str) -> bytes:
        text = self._store.get(key)
        try:
            sealed = bytes.fromhex(text.decode())
        except ValueError:
            sealed = b""
        seal, data = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise SealError(f"another program has written {key!r} into the store at which ranks meet")
        return data

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> "SealedStore":
        """Return a store with a connection of its own, for another thread."""
        return SealedStore(self._store.clone(), self._secret)  # type: ignore[attr-defined]

    def _seal(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")
