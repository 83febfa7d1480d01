"""Frames on the socket between this process and a worker: four bytes with the length, then that many bytes. What arrives from a worker may
be written by anyone, so the receiving end here never blocks, never holds more than one frame of the largest size, and never unpickles."""

import socket
import struct

LARGEST = 1 << 26
"""Maximum number of bytes of a frame."""
_LENGTH = struct.Struct(">I")
_AT_ONCE = 1 << 20
_MOST_FRAMES = 64  # more than a worker may owe


class FrameError(ValueError):
    """What arrived, or shall be sent, is no frame."""


def pack(content: bytes) -> bytes:
    """Return a frame. Raise FrameError if it would be too large."""
    if len(content) > LARGEST:
        raise FrameError(f"{len(content) / 2**20:.0f} MiB, and a message has at most {LARGEST >> 20} MiB")
    return _LENGTH.pack(len(content)) + content


class Channel:
    """The end of a process that must not wait for the other one."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket, self._arrived, self._waiting, self.closed = end, bytearray(), bytearray(), False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def must_send(self) -> bool:
        return bool(self._waiting) and not self.closed

    @property
    def has_part(self) -> bool:
        """Whether a frame has arrived in part."""
        return bool(self._arrived)

    def put(self, frames: bytes) -> bool:
        """Send frames, at the latest in later calls of `send`. Return False if the other side is gone and has received nothing of them."""
        self._waiting += frames
        return self.send() or len(self._waiting) < len(frames)

    def send(self) -> bool:
        """Send as much as the other side takes at once. Return False if it is gone, which `receive` notices too."""
        try:
            while self._waiting:
                del self._waiting[: self._socket.send(self._waiting[:_AT_ONCE])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def receive(self) -> list[bytes]:
        """Return the frames that have arrived, but only the first of a flood. Afterwards, `closed` tells whether the other side has
        closed its end. Raise FrameError if the next frame is too large."""
        try:
            while len(self._arrived) <= LARGEST:
                part = self._socket.recv(_AT_ONCE)
                self._arrived += part
                if not part:
                    self.closed = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        frames: list[bytes] = []
        while len(self._arrived) >= _LENGTH.size and len(frames) < _MOST_FRAMES:
            end = _LENGTH.size + _LENGTH.unpack_from(self._arrived)[0]
            if end > LARGEST + _LENGTH.size:
                raise FrameError("a message that is too large or none")
            if len(self._arrived) < end:
                break
            frames.append(bytes(self._arrived[_LENGTH.size : end]))
            del self._arrived[:end]
        return frames

    def close(self) -> None:
        self._socket.close()


def receive_frame(end: socket.socket) -> bytes:
    """Wait for a frame. Raise EOFError if the socket closes."""
    return _receive(end, *_LENGTH.unpack(_receive(end, _LENGTH.size)))


def _receive(end: socket.socket, count: int) -> bytes:
    arrived = bytearray()
    while len(arrived) < count:
        part = end.recv(min(count - len(arrived), _AT_ONCE))
        if not part:
            raise EOFError
        arrived += part
    return bytes(arrived)
