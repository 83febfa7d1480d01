"""A transport whose outbox or inbox misbehaves as MISDEED says: `WHERE WHAT`, such as `send hangs`; see `support.misbehaving`."""

import os

from examples.plugs import tcp
from parallel.transport import base
from support.misbehaving import VARIABLE, do

TRANSPORT = base.Transport(__name__, devices=("cpu",))
WRONG_ERRORS = base.Transport(__name__, devices=("cpu",), lost_errors=OSError)


def strike(where):
    """Do the misdeed of this place. Return what was asked of it, or ""."""
    place, _, misdeed = os.environ.get(VARIABLE, "").partition(" ")
    return do(misdeed) if place == where else ""


class Outbox(tcp.Outbox):
    def __init__(self, settings, rank, chunks, route):
        super().__init__(settings, rank, chunks, route)
        if strike("address") == "wrong type":
            self.address = object()

    def buffer(self, chunk):
        flat = super().buffer(chunk)
        return {"wrong length": flat[1:], "wrong type": "bytes", "nan": flat.float()}.get(strike("buffer"), flat)

    def send(self, chunk):
        if strike("send") == "mutates":
            self._buffer[0] ^= 1
        super().send(chunk)

    def close(self):
        super().close()
        strike("close")


class Inbox(tcp.Inbox):
    def __init__(self, link, rank, chunks):
        super().__init__(link, rank, chunks)
        strike("connect")

    def receive(self, chunk):
        flat = super().receive(chunk)
        return {"wrong length": flat[1:], "wrong type": "bytes", "nan": flat.float()}.get(strike("receive"), flat)
