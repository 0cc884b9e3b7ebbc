"""How each server is spoken to: bodies of requests, and what their replies hold.

Knows JSON shapes; nothing of connections, processes or clocks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.tables.workloads import Cell, Input

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Routes and habits of one kind of server."""

    embed_path: str = "/v1/embeddings"
    native: bool = False  # TEI's own body and bare list of vectors instead of OpenAI's
    no_ids: str = ""  # why the server gets no token ids; empty: it does
    score_path: str | None = None  # of ready-joined token ids; None: no such route
    score_field: str = "input_ids"
    raw_scores: bool = False  # whether replies can hold logits; else they hold sigmoid's values

    def refusal(self, cell: Cell) -> str | None:
        """Why the server cannot run `cell`; `None` where it can."""
        if cell.score and self.score_path is None:
            return "no route that scores ready-joined token ids"
        return None if cell.text else self.no_ids or None

    def path(self, cell: Cell) -> str:
        """The route of `cell`."""
        return (self.score_path or "") if cell.score else self.embed_path

    def body(self, cell: Cell, model: str, inputs: Sequence[Input]) -> bytes:
        """The JSON of one request: one input alone is not in a list, as clients send it."""
        if cell.score:
            return json.dumps({"model": model, self.score_field: inputs}).encode()
        given = inputs[0] if len(inputs) == 1 else inputs
        if self.native:
            return json.dumps({"inputs": given}).encode()
        return json.dumps({"model": model, "input": given, "encoding_format": "base64"}).encode()

    def check_body(self, cell: Cell, model: str, inputs: Sequence[Input]) -> bytes:
        """As `body`, with logits asked for where the server has them."""
        body = json.loads(self.body(cell, model, inputs))
        return json.dumps(body | ({"raw_scores": True} if cell.score and self.raw_scores else {})).encode()

    def rows(self, cell: Cell, reply: bytes) -> Rows:
        """The vectors `[N, D]`, or scores `[N, 1]`, in the order of the inputs."""
        content = json.loads(reply)
        if self.native:
            return np.asarray(content, np.float32)
        items = sorted(content["data"], key=lambda item: item["index"])
        return np.stack([_score(item) if cell.score else _vector(item["embedding"]) for item in items])


def _vector(embedding: str | list[float]) -> Rows:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.asarray(embedding, np.float32)


def _score(item: dict[str, Any]) -> Rows:
    return np.asarray(item["probs"] if "probs" in item else [item["score"]], np.float32)


OURS = Dialect(score_path="/score", raw_scores=True)
VLLM = Dialect(score_path="/classify", score_field="input")
TEXT_ONLY = Dialect(no_ids="takes no token ids")
INFINITY = Dialect(embed_path="/embeddings", no_ids="takes no token ids")
_DECODES = "decodes token ids and encodes that text again: not the sequence that was sent"
TEI = Dialect(no_ids=_DECODES)
TEI_NATIVE = Dialect(embed_path="/embed", native=True, no_ids=_DECODES)
