"""A running stack as measurements of quality see it: texts in, vectors and scores out, over HTTP."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TEXTS_PER_REQUEST = 32
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class StackClient:
    """The stack at a base URL. Anything but a 200 raises `RuntimeError` and ends the measurement."""

    base: str

    def embed(self, texts: Sequence[str], prompt_name: str | None = None) -> Iterator[Array]:
        """Vectors of `texts` in order, float32 `[up to TEXTS_PER_REQUEST, D]` at a time."""
        prompt = {} if prompt_name is None else {"prompt_name": prompt_name}
        for start in range(0, len(texts), TEXTS_PER_REQUEST):
            part = list(texts[start : start + TEXTS_PER_REQUEST])
            reply = self._post("/v1/embeddings", {"input": part, "encoding_format": "base64", **prompt})
            yield np.stack(
                [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in reply["data"]]
            )

    def logits(self, query: str, documents: Sequence[str]) -> Array:
        """Raw scores `[documents]` of one query with each document, in order."""
        body = {"query": query, "documents": list(documents), "raw_scores": True}
        items = self._post("/score", body)["data"]
        return np.array([item["score"] for item in sorted(items, key=lambda item: item["index"])], np.float32)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as reply:
                parsed: dict[str, Any] = json.loads(reply.read())
                return parsed
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code}: {error.read()[:300]!r}") from None
