"""Requests whose right answers are known beforehand, over all main routes and dialects.

For servers with the fixed-rate engine: its rows follow from the token ids alone, so that they are computed
here a second time, without the stack. Scores are cosines of such rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rose_engine import batch
from rose_engine.fake import fake_rows

Json = dict[str, Any]
Vectors = NDArray[np.float32]
TOLERANCE = 2e-6  # of float32 values that went through decimal digits

_FIRST_ID, _LAST_ID = 2_000, 28_000  # ordinary words of the bundled vocabulary


@dataclass(frozen=True, slots=True)
class Question:
    """A request and what makes its answer right: `right` gets the body of a 200.

    `status` is what it deserves: 200, or a client's mistake.
    """

    path: str
    body: bytes
    right: Callable[[bytes], bool]
    num_tokens: int
    status: int = 200


class KnownAnswers:
    """Questions for servers of `model` whose engine makes rows of `dimensions` values."""

    def __init__(self, model: Path, dimensions: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._dimensions = dimensions

    def vectors(self, sequences: Sequence[Sequence[int]]) -> Vectors:
        """The row of each sequence of ids, `[N, D]`."""
        packed = batch.Batch.pack(batch.Sequence(np.array(ids, np.int32)) for ids in sequences)
        return fake_rows(packed, self._dimensions)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, special tokens included."""
        return [list(self._tokenizer.encode(text).ids) for text in texts]

    def embed_ids(self, sequences: Sequence[Sequence[int]]) -> Question:
        """`/embed` of token ids."""
        ids = [list(map(int, sequence)) for sequence in sequences]
        return self._embed("/embed", {"inputs": ids}, ids, lambda reply: reply)

    def embed(self, texts: Sequence[str]) -> Question:
        """`/embed` of texts."""
        return self._embed("/embed", {"inputs": list(texts)}, self.ids(texts), lambda reply: reply)

    def openai(self, texts: Sequence[str], *, encoded: bool = False) -> Question:
        """`/v1/embeddings` of texts, as numbers or in base64."""
        body = {"input": list(texts), "encoding_format": "base64" if encoded else "float"}
        return self._embed("/v1/embeddings", body, self.ids(texts), _openai_vectors)

    def cohere(self, texts: Sequence[str]) -> Question:
        """`/v2/embed` of texts."""
        body = {"texts": list(texts), "input_type": "search_document", "embedding_types": ["float"]}
        return self._embed("/v2/embed", body, self.ids(texts), lambda reply: reply["embeddings"]["float"])

    def pooling(self, texts: Sequence[str]) -> Question:
        """`/pooling` of texts."""
        body = {"input": list(texts)}
        return self._embed(
            "/pooling", body, self.ids(texts), lambda reply: [item["data"] for item in reply["data"]]
        )

    def score(self, query: str, documents: Sequence[str]) -> Question:
        """`/score` of one query with each document, in input order."""
        body = {"query": query, "documents": list(documents)}
        return self._scores("/score", body, query, documents, lambda reply: reply["data"], "score")

    def rerank(self, query: str, documents: Sequence[str]) -> Question:
        """`/rerank` of documents: best first, each once."""
        body = {"query": query, "documents": list(documents)}
        return self._scores("/rerank", body, query, documents, _ranked, "relevance_score")

    def _embed(
        self, path: str, body: Json, ids: Sequence[Sequence[int]], vectors_of: Callable[[Any], list[Any]]
    ) -> Question:
        wanted = self.vectors(ids)

        def right(reply: bytes) -> bool:
            return _same(vectors_of(json.loads(reply)), wanted)

        return Question(path, json.dumps(body).encode(), right, sum(map(len, ids)))

    def _scores(
        self,
        path: str,
        body: Json,
        query: str,
        documents: Sequence[str],
        items_of: Callable[[Json], list[Json]],
        key: str,
    ) -> Question:
        ids = self.ids([query, *documents])
        rows = self.vectors(ids)
        wanted = rows[1:] @ rows[0]

        def right(reply: bytes) -> bool:
            items = items_of(json.loads(reply))
            indices = [item["index"] for item in items]
            if sorted(indices) != list(range(len(documents))):
                return False
            return _same([item[key] for item in items], wanted[indices])

        return Question(path, json.dumps(body).encode(), right, sum(map(len, ids)))


def mistake(path: str, body: bytes, status: int) -> Question:
    """A request that must be refused as the client's mistake."""
    return Question(path, body, lambda _reply: False, 0, status)


def random_ids(random: np.random.Generator, count: int, length: int) -> list[list[int]]:
    """`count` sequences of `length` token ids each."""
    ids: list[list[int]] = random.integers(_FIRST_ID, _LAST_ID, (count, length)).tolist()
    return ids


def _same(got: list[Any], wanted: NDArray[Any]) -> bool:
    values = np.array(got, np.float32)
    return values.shape == wanted.shape and bool(np.allclose(values, wanted, rtol=0, atol=TOLERANCE))


def _openai_vectors(reply: Json) -> list[Any]:
    items = reply["data"]
    if [item["index"] for item in items] != list(range(len(items))):
        return []
    embeddings = [item["embedding"] for item in items]
    return [
        np.frombuffer(base64.b64decode(one), "<f4") if isinstance(one, str) else one for one in embeddings
    ]


def _ranked(reply: Json) -> list[Json]:
    """The results, if they are in order of their scores; none otherwise."""
    results: list[Json] = reply["results"]
    scores = [item["relevance_score"] for item in results]
    return results if scores == sorted(scores, reverse=True) else []
