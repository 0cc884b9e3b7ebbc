"""Encode many texts at once by the extension, each in its frame of special tokens.

Knows nothing of requests or of limits by name: a frame says what stands around a text and how much may stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ivy_gateway.compiled_tokenizer import probes

try:
    from ivy_gateway.compiled_tokenizer import _native, pipelines
except ImportError:  # built without a compiler
    _native = None  # type: ignore[assignment]

Int32Array = NDArray[np.int32]

_WHOLE, _CUT, _NOT_UNICODE, _NOT_ENCODED = range(4)  # states of a text, as the extension gives them
_ENCODED = bytes((_WHOLE, _CUT))


class NoEncoder(Exception):
    """The library has to encode; the message says why."""


class NotUnicode(ValueError):
    """A text holds half of a surrogate pair; `index` is its place among the texts."""

    def __init__(self, index: int) -> None:
        super().__init__(f"text {index} is not valid Unicode")
        self.index = index


@dataclass(frozen=True, slots=True)
class Side:
    """Special tokens on one side of a text: `[n]` ids and the segment of each."""

    ids: Sequence[int] = ()
    segments: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around a text, and how many of its own tokens may stay."""

    prefix: Side = Side()
    suffix: Side = Side()
    text_segment: int = 0
    room: int | None = None  # `None`: all
    keeps_end: bool = False  # of a text that is too long, its end stays instead of its start


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The tokens of B texts, one after the other: text `i` has those from `cu_seqlens[i]` to the next."""

    ids: Int32Array  # [T]
    segments: Int32Array | None  # [T], where asked for
    cu_seqlens: Int32Array  # [B + 1]
    states: NDArray[np.uint8]  # [B]

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Whether tokens of each text are missing: [B]."""
        cut: NDArray[np.bool_] = self.states == _CUT
        return cut

    def lists(self) -> list[list[int]]:
        """The ids of each text."""
        ids, ends = self.ids.tolist(), self.cu_seqlens.tolist()
        return [ids[start:end] for start, end in itertools.pairwise(ends)]


class FastEncoder:
    """An encoder for any number of threads at once. Make it by `fast_encoder`."""

    def __init__(self, native: _native.Encoder, library: Tokenizer) -> None:
        self._native = native
        self._library = library
        self._whole = [_native_frame(Frame())]

    def encode(
        self,
        texts: list[str],
        frames: Sequence[Frame] = (),
        frame_of: Sequence[int] | None = None,
        *,
        with_segments: bool = False,
    ) -> Encoded:
        """Encode `texts`, each in the frame that `frame_of` names; without it all in the first, or in none.

        Raises `NotUnicode` for the first text that is not valid Unicode.
        """
        chosen = None if frame_of is None else np.array(frame_of, np.int32)
        native_frames = [_native_frame(frame) for frame in frames] or self._whole
        encoded = Encoded(*self._native.encode(texts, native_frames, chosen, with_segments))
        if not encoded.states.tobytes().strip(_ENCODED):
            return encoded
        if (unreadable := np.flatnonzero(encoded.states == _NOT_UNICODE)).size:
            raise NotUnicode(int(unreadable[0]))
        return self._completed(encoded, texts, frames or (Frame(),), frame_of)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, alone. Raises as `encode`."""
        return self.encode(texts).lists()

    def _completed(
        self,
        encoded: Encoded,
        texts: list[str],
        frames: Sequence[Frame],
        frame_of: Sequence[int] | None,
    ) -> Encoded:
        """`encoded` with the texts that only the library can encode."""
        parts = np.split(encoded.ids, encoded.cu_seqlens[1:-1])
        segments = None if encoded.segments is None else np.split(encoded.segments, encoded.cu_seqlens[1:-1])
        states = encoded.states.copy()
        for i in np.flatnonzero(states == _NOT_ENCODED).tolist():
            frame = frames[0 if frame_of is None else frame_of[i]]
            found = self._library.encode(texts[i], add_special_tokens=False).ids
            kept = _kept(found, frame)
            states[i] = _CUT if len(kept) < len(found) else _WHOLE
            parts[i] = np.array([*frame.prefix.ids, *kept, *frame.suffix.ids], np.int32)
            if segments is not None:
                own = [frame.text_segment] * len(kept)
                segments[i] = np.array([*frame.prefix.segments, *own, *frame.suffix.segments], np.int32)
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        return Encoded(
            np.concatenate(parts), None if segments is None else np.concatenate(segments), ends, states
        )


def fast_encoder(tokenizer: Tokenizer, num_threads: int = 0) -> FastEncoder:
    """An encoder that gives the ids of `tokenizer`, with `num_threads` besides the caller's.

    Raises `NoEncoder` where there is none: no extension, another pipeline, or a probe that tells them apart.
    """
    if _native is None:
        raise NoEncoder("the extension was not built")
    try:
        native, pieces = pipelines.build(tokenizer, num_threads)
    except (pipelines.Unsupported, ValueError) as error:
        raise NoEncoder(f"not supported by it: {error}") from error
    encoder = FastEncoder(native, tokenizer)
    _check(encoder, tokenizer, probes.texts(pieces))
    return encoder


def _check(encoder: FastEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    """Raise `NoEncoder` unless both give the same ids for `texts`."""
    expected = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    for text, ours, theirs in zip(texts, encoder.ids(texts), expected, strict=True):
        if ours != theirs:
            raise NoEncoder(f"it gives other ids for {text!r}")


def _kept(ids: list[int], frame: Frame) -> list[int]:
    if frame.room is None or len(ids) <= frame.room:
        return ids
    return ids[len(ids) - frame.room :] if frame.keeps_end else ids[: frame.room]


def _native_frame(frame: Frame) -> _native.Frame:
    return _native.Frame(
        prefix=np.array(frame.prefix.ids, np.int32),
        suffix=np.array(frame.suffix.ids, np.int32),
        prefix_segments=np.array(frame.prefix.segments, np.int32),
        suffix_segments=np.array(frame.suffix.segments, np.int32),
        text_segment=frame.text_segment,
        room=frame.room,
        keeps_end=frame.keeps_end,
    )
