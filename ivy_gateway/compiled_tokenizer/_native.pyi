"""The compiled extension; its sources are in `src`."""

from numpy import float64, int32, uint8
from numpy.typing import NDArray

class Frame:
    """What stands around a text, and how many of its own tokens may stay (`room`; `None`: all)."""

    def __init__(
        self,
        prefix: NDArray[int32],
        suffix: NDArray[int32],
        prefix_segments: NDArray[int32],
        suffix_segments: NDArray[int32],
        text_segment: int = 0,
        room: int | None = None,
        keeps_end: bool = False,
    ) -> None: ...

class Encoder:
    """One tokenizer, with its threads and its memory."""

    def encode(
        self,
        texts: list[str],
        frames: list[Frame],
        frame_of: NDArray[int32] | None = None,
        with_segments: bool = False,
    ) -> tuple[NDArray[int32], NDArray[int32] | None, NDArray[int32], NDArray[uint8]]:
        """Ids [T], segments [T], where each text's tokens start [B + 1], and a state for each text [B].

        States: 0 whole, 1 cut, 2 not valid Unicode, 3 only the library can encode it.
        """

def unigram(
    pieces: list[str],
    scores: list[float] | NDArray[float64],
    unknown_token: int,
    charsmap: bytes,
    splits_white_space: bool,
    collapses_spaces: bool,
    added_tokens: list[tuple[str, int, bool, bool]],
    num_threads: int,
) -> Encoder:
    """An encoder for a Unigram model; `num_threads` besides the caller's."""

def wordpiece(
    pieces: list[tuple[str, int]],
    continuing_prefix: str,
    unknown_token: int,
    max_characters: int,
    normalized: list[tuple[str, str]],
    removed: list[tuple[int, int]],
    isolated: str,
    punctuation: str,
    reordering: str,
    added_tokens: list[tuple[str, int, bool, bool]],
    num_threads: int,
) -> Encoder:
    """An encoder for a WordPiece model; `num_threads` besides the caller's."""

def byte_bpe(
    pieces: list[tuple[bytes, int]],
    merges: NDArray[int32],
    ignores_merges: bool,
    adds_space: bool,
    cl100k: bool,
    max_digits: int,
    letters: list[tuple[int, int]],
    numbers: list[tuple[int, int]],
    white_space: list[tuple[int, int]],
    form_c: tuple[list[tuple[int, str]], list[tuple[int, int]], list[tuple[int, int, int]]] | None,
    added_tokens: list[tuple[str, int, bool, bool]],
    normalized_tokens: list[tuple[str, int, bool, bool]],
    num_threads: int,
) -> Encoder:
    """An encoder for a byte-level BPE model, `num_threads` besides the caller's.

    `merges`: left, right and merged token of each, `[M, 3]`. `form_c`: the tables of `code_points.form_c`.
    """

def grapheme_ranges() -> list[tuple[int, int, str, str]]:
    """The table of grapheme clusters that the extension was built with."""

def num_allocations() -> int:
    """How many times any encoder's containers asked for memory."""
