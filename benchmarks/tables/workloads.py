"""What is asked: the cells of the tables, and inputs that never repeat.

Knows token ids and texts; nothing of servers' dialects or of clocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data import topics

import numpy as np
from tokenizers import Tokenizer

Ids = list[int]
Input = Ids | str

FIRST_ID = 100  # below are the special tokens of BERT's vocabulary
_MOST_SLICES, _MOST_TRIES = 24, 4  # for a text of exactly so many tokens: places in the prose, lengths there
_NUMBERS = 10**6


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

    def __init__(self, tokenizer_file: Path, vocabulary_size: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary_size = vocabulary_size
        self._tokenizer_file = tokenizer_file

    def ids(self, num_tokens: int) -> Ids:
        """One sequence of random ids."""
        drawn: Ids = self._random.integers(FIRST_ID, self._vocabulary_size, num_tokens).tolist()
        return drawn

    def text(self, num_tokens: int) -> str:
        """One text of exactly `num_tokens` tokens."""
        return _prose(self._tokenizer_file).text(num_tokens, lambda bound: int(self._random.integers(bound)))

    def of(self, cell: Cell) -> list[Input]:
        """The inputs of one request."""
        make: Callable[[int], Input] = self.text if cell.text else self.ids
        return [make(cell.num_tokens) for _ in range(cell.num_inputs)]


class _Prose:
    """English prose of the standard library's own documentation, as token ids to cut slices from."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = load_tokenizer(tokenizer_file)
        prose = " ".join(" ".join(topics.topics.values()).split())
        self._ids: Ids = self._tokenizer.encode(prose, add_special_tokens=False).ids

    def text(self, num_tokens: int, draw: Callable[[int], int]) -> str:
        """A slice behind a number, made longer or shorter until it counts `num_tokens`."""
        for _ in range(_MOST_SLICES):
            start, number = draw(len(self._ids) - 2 * num_tokens), draw(_NUMBERS)
            length = num_tokens
            for _ in range(_MOST_TRIES):
                slice_ids = self._ids[start : start + max(1, length)]
                text = f"{number} {self._tokenizer.decode(slice_ids).strip()}"
                counted = len(self._tokenizer.encode(text).ids)
                if counted == num_tokens:
                    return text
                length += num_tokens - counted
        raise RuntimeError(f"no slice of the prose gives a text of {num_tokens} tokens")


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
