"""Frames on a plain byte stream, for two tiers on one machine: `RequestFrame` there, `ReplyFrame` back.

The same messages as `InferStream` carries, each behind its length in four bytes, little-endian. The server
speaks first, with what `Describe` would answer. Whoever closes ends the stream; there is no half.
`python -m benchmarks.hop` measures what gRPC costs on top.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protos.codec import MAX_MESSAGE_BYTES

ADDRESS_PREFIX = "frames:"  # of an address: a path follows
MAX_SOCKET_PATH_BYTES = 107  # unix(7): sockaddr_un holds 108, the last of them zero
_LENGTH_BYTES = 4

M = TypeVar("M", bound=Message)


class FrameError(ValueError):
    """Bytes that are no frames: nothing that follows on the same stream can be read."""


def framed(message: Message) -> bytes:
    """`message` as it travels."""
    payload = message.SerializeToString()
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def parse(kind: type[M], payload: bytes) -> M:
    """A frame's message. Raises `FrameError` for bytes that are none."""
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise FrameError(f"no {kind.DESCRIPTOR.name}: {error}") from error


class FrameSplitter:
    """Puts together, from pieces as a socket gives them, the payloads of the frames that they hold."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._left = b""  # of what was fed, too little for a frame
        self._more: list[bytes] = []  # what came after it
        self._missing = 0  # bytes without which there is no frame

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order. Raises `FrameError` for a length beyond the limit."""
        self._missing -= len(data)
        if self._missing > 0:  # a large frame comes in many pieces, which are joined once
            self._more.append(data)
            return []
        if self._left or self._more:
            data = b"".join((self._left, *self._more, data))
            self._more.clear()
        payloads, start = [], 0
        while (body := start + _LENGTH_BYTES) <= len(data):
            length = int.from_bytes(data[start:body], "little")
            if length > self._max_bytes:
                raise FrameError(f"a frame of {length} bytes; the limit is {self._max_bytes}")
            if body + length > len(data):
                break
            payloads.append(data[body : body + length])
            start = body + length
        self._left = data[start:]
        self._missing = self._needed(self._left) - len(self._left)
        return payloads

    def _needed(self, beginning: bytes) -> int:
        if len(beginning) < _LENGTH_BYTES:
            return _LENGTH_BYTES
        return _LENGTH_BYTES + int.from_bytes(beginning[:_LENGTH_BYTES], "little")
