"""Known inputs of every length, and whether a server's rows for them are those of the reference.

A server is asked in requests of each cell's own shape, its known inputs among new ones, before the cell is
timed. One that is off, or cannot be asked, is not reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.http_client import Connection, encode_request
from benchmarks.tables.closed_loop import body_of
from benchmarks.tables.crew import Target
from benchmarks.tables.dialects import Rows
from benchmarks.tables.workloads import Cell, Ids, Input, InputMaker, load_tokenizer

LEAST_COSINE = 0.999  # a divergence of 0.1 %
LARGEST_LOGIT_GAP = 0.05  # random heads give logits of a deviation of 0.6; sigmoid's slope is a quarter
LEAST_CORRELATION = 0.99
_PROBES = {"embed": 2, "score": 8}  # of each length
_SEED = 2**31


class Diverged(RuntimeError):
    """A server's rows are not those of the reference."""


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """Known inputs of one kind, and the reference's rows for them."""

    inputs: list[Input]
    rows: Rows


class Checker:
    """Probes for every kind of input in `cells`. `reference`: from sequences of ids and a task to rows."""

    def __init__(
        self,
        cells: Sequence[Cell],
        target: Target,
        reference: Callable[[Sequence[Ids], str], Rows],
    ) -> None:
        kinds = list(dict.fromkeys((cell.task, cell.text, cell.num_tokens) for cell in cells))
        maker = InputMaker(target.tokenizer_file, target.vocabulary_size, _SEED)
        tokenizer = load_tokenizer(target.tokenizer_file)
        self._maker = maker
        self._probes: dict[tuple[str, bool, int], Probes] = {}
        for task in dict.fromkeys(task for task, _, _ in kinds):
            mine = [kind for kind in kinds if kind[0] == task]
            inputs = [
                maker.texts(length, _PROBES[task])
                if text
                else [maker.ids(length) for _ in range(_PROBES[task])]
                for _, text, length in mine
            ]
            ids = [
                tokenizer.encode(given).ids if isinstance(given, str) else given
                for group in inputs
                for given in group
            ]
            rows = np.split(reference(ids, task), len(mine))
            self._probes |= {
                kind: Probes(list(own), part) for kind, own, part in zip(mine, inputs, rows, strict=True)
            }

    def check(self, target: Target, cell: Cell) -> float:
        """The least cosine, or correlation, of a request of the cell's shape. Raises `Diverged`."""
        probes = self._probes[cell.task, cell.text, cell.num_tokens]
        count = min(cell.num_inputs, len(probes.inputs))
        parts = []
        with contextlib.closing(Connection.to(target.address)) as connection:
            for start in range(0, len(probes.inputs) - count + 1, count):
                known = probes.inputs[start : start + count]
                others = self._maker.of(cell)[count:]
                body = target.dialect.check_body(cell, target.model, [*known, *others])
                reply = connection.ask(encode_request("POST", target.dialect.path(cell), body))
                parts.append(target.dialect.rows(cell, body_of(reply))[:count])
        got = np.concatenate(parts)
        wanted = probes.rows[: len(got)]
        if cell.score:
            return _check_scores(got, wanted, raw=target.dialect.raw_scores)
        return _check_vectors(got, wanted)


def _check_vectors(got: Rows, wanted: Rows) -> float:
    if got.shape != wanted.shape:
        raise Diverged(f"rows {got.shape} where the reference has {wanted.shape}")
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    least = float(((got * wanted).sum(axis=1) / norms).min())
    if not least >= LEAST_COSINE:
        raise Diverged(f"cosine {least:.5f} to the reference, where {LEAST_COSINE} is the least")
    return least


def _check_scores(got: Rows, wanted: Rows, *, raw: bool) -> float:
    """Logits within `LARGEST_LOGIT_GAP`, or sigmoid's values within a quarter of it, and in line."""
    expected, most = (
        (wanted, LARGEST_LOGIT_GAP) if raw else (1 / (1 + np.exp(-wanted)), LARGEST_LOGIT_GAP / 4)
    )
    gap = float(np.abs(got - expected).max())
    correlation = float(np.corrcoef(got.ravel(), expected.ravel())[0, 1])
    if not (gap <= most and correlation >= LEAST_CORRELATION):
        raise Diverged(f"scores are {gap:.4f} off (at most {most}), correlation {correlation:.4f}")
    return correlation
