"""What is asked: the cells of the tables, and inputs that never repeat.

Knows token ids and texts; nothing of servers' dialects or of clocks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics

import numpy as np
from tokenizers import Tokenizer

Ids = list[int]
Input = Ids | str

FIRST_ID = 100  # below are the special tokens of BERT's vocabulary
_NUMBERS = 10**6
_PLACES = 24  # in the prose that are tried for a text, of which about two thirds end with a word
_MOST_ROUNDS = 8  # of drafts, until all texts have exactly the wanted tokens
_BATCH = 512  # texts that are tokenized at once, by as many threads as there are processors


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a table: requests of `num_inputs` inputs of `num_tokens` each, `concurrency` at once."""

    table: str
    num_inputs: int
    num_tokens: int
    concurrency: int = 1
    processes: int = 1  # of clients, which share the concurrency
    text: bool = False
    score: bool = False

    @property
    def name(self) -> str:
        """As rows are called: `T1 1 x 128`, with the concurrency where there is any."""
        at_once = f", {self.concurrency} at once" if self.concurrency > 1 else ""
        return f"{self.table} {self.num_inputs} x {self.num_tokens}{at_once}"

    @property
    def seed(self) -> int:
        """Of its inputs: those of one cell, or their beginnings, are met in no other."""
        return zlib.crc32(self.name.encode())

    @property
    def task(self) -> str:
        """The kind of folder that it needs."""
        return "score" if self.score else "embed"


def _cells() -> list[Cell]:
    return [
        *(Cell("T1", 1, length) for length in (128, 512, 4096)),
        *(Cell("T2", count, 512, score=True) for count in (5, 25, 50)),
        *(Cell("T3", 100, length, concurrency=4, processes=4) for length in (512, 1024, 4096)),
        *(Cell("T4", 1, 512, concurrency=many, text=True) for many in (1, 2, 4, 8, 16)),
        *(Cell("T5", 1, 24, concurrency=many, processes=min(many, 4), text=True) for many in (1, 16, 64)),
    ]


CELLS = _cells()
TABLES = tuple(dict.fromkeys(cell.table for cell in CELLS))
TITLES = {
    "T1": "low-latency embedding, token ids, one sequence a request, sequential",
    "T2": "low-latency scoring, ready-joined token ids of 512, sequential",
    "T3": "high throughput, token ids, 100 sequences a request, four client processes",
    "T4": "high concurrency, texts of 512 tokens, one a request",
    "T5": "short queries, texts of 24 tokens, one a request",
}


def shortened(cells: Sequence[Cell], longest: int) -> list[Cell]:
    """The cells with no input above `longest` tokens, each once: for models that take no more."""
    return list(dict.fromkeys(replace(cell, num_tokens=min(cell.num_tokens, longest)) for cell in cells))


class InputMaker:
    """Inputs of a cell, each new: random ids, or slices of prose behind a random number.

    `tokenizer_file` is the folder's: texts have exactly the wanted tokens, special ones included, under it.
    """

    def __init__(self, tokenizer_file: Path, vocabulary_size: int, *seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary_size = vocabulary_size
        self._tokenizer_file = tokenizer_file

    def ids(self, num_tokens: int) -> Ids:
        """One sequence of random ids."""
        drawn: Ids = self._random.integers(FIRST_ID, self._vocabulary_size, num_tokens).tolist()
        return drawn

    def texts(self, num_tokens: int, count: int) -> list[str]:
        """Texts of exactly `num_tokens` tokens each."""
        prose = _prose(self._tokenizer_file)
        batches = range(0, count, _BATCH)
        return [
            text
            for start in batches
            for text in prose.texts(num_tokens, min(_BATCH, count - start), self._random)
        ]

    def of(self, cell: Cell) -> list[Input]:
        """The inputs of one request."""
        return self.requests(cell, 1)[0]

    def requests(self, cell: Cell, count: int) -> list[list[Input]]:
        """The inputs of `count` requests."""
        num_inputs = cell.num_inputs * count
        inputs: Sequence[Input] = (
            self.texts(cell.num_tokens, num_inputs)
            if cell.text
            else [self.ids(cell.num_tokens) for _ in range(num_inputs)]
        )
        return [list(inputs[i : i + cell.num_inputs]) for i in range(0, num_inputs, cell.num_inputs)]


class _Prose:
    """English prose of the standard library's own documentation, with the tokens before each of its spaces.

    Tokenizers split at spaces, so that the tokens of a slice are known before it is cut.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer_file)
        self._text = " ".join(" ".join(topics.topics.values()).split())
        encoding = self._tokenizer.encode(self._text, add_special_tokens=False)
        self._spaces = np.array([at for at, character in enumerate(self._text) if character == " "])
        self._tokens_before = np.searchsorted([start for start, _ in encoding.offsets], self._spaces)
        self._num_special = self._tokenizer.num_special_tokens_to_add(False)

    def texts(self, num_tokens: int, count: int, random: np.random.Generator) -> list[str]:
        """Drafts are counted as servers count them, and dropped where a split elsewhere made them longer."""
        texts: list[str] = []
        for _ in range(_MOST_ROUNDS):
            drafts = self._drafts(num_tokens, count - len(texts), random)
            counted = self._tokenizer.encode_batch_fast(drafts)
            texts += [
                text for text, encoding in zip(drafts, counted, strict=True) if len(encoding) == num_tokens
            ]
            if len(texts) == count:
                return texts
        raise RuntimeError(f"no slice of the prose gives a text of {num_tokens} tokens")

    def _drafts(self, num_tokens: int, count: int, random: np.random.Generator) -> list[str]:
        """Numbers, each before a slice between two spaces; fewer where no end of a word is far enough."""
        numbers = [str(number) for number in random.integers(_NUMBERS, size=count)]
        encodings = self._tokenizer.encode_batch_fast(numbers, add_special_tokens=False)
        slice_tokens = num_tokens - self._num_special - np.array([len(encoding) for encoding in encodings])
        num_starts = np.searchsorted(self._tokens_before, self._tokens_before[-1] - num_tokens)
        starts = random.integers(num_starts, size=(count, _PLACES))
        ends_at = self._tokens_before[starts] + slice_tokens[:, None]
        ends = np.searchsorted(self._tokens_before, ends_at)
        fits = self._tokens_before[ends] == ends_at
        place = fits.argmax(axis=1)
        return [
            f"{number} {self._text[self._spaces[starts[i, at]] + 1 : self._spaces[ends[i, at]]]}"
            for i, (number, at) in enumerate(zip(numbers, place, strict=True))
            if fits[i, at]
        ]


@functools.cache
def _prose(tokenizer_file: Path) -> _Prose:
    """Encoded once a process."""
    return _Prose(tokenizer_file)


def load_tokenizer(file: Path) -> Tokenizer:
    """The file's tokenizer without its own truncation and padding."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
