"""A transport whose outbox or inbox fails as MISDEED says: `send raises` or `receive raises`; see `support.misbehaving`."""

import os

from examples.plugs import tcp
from parallel.transport import base
from support.misbehaving import VARIABLE, do

TRANSPORT = base.Transport(__name__, devices=("cpu",))


def strike(where):
    """Do the misdeed of this place."""
    place, _, misdeed = os.environ.get(VARIABLE, "").partition(" ")
    if place == where:
        do(misdeed)


class Outbox(tcp.Outbox):
    def send(self, chunk):
        strike("send")
        super().send(chunk)


class Inbox(tcp.Inbox):
    def receive(self, chunk):
        strike("receive")
        return super().receive(chunk)
