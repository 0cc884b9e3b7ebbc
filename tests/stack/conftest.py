"""Real stacks, as a user would start them: processes, sockets, real weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from benchmarks.xquad import Xquad
from ivy_gateway.local_stack import LocalStack, running_stack

# A request of 500 texts takes a busy machine longer than the deadline that suits a service.
PATIENT = {"IVY_REQUEST_TIMEOUT": "300"}


@dataclass(frozen=True)
class Client:
    """Just enough of an HTTP client to see status, headers and body."""

    stack: LocalStack

    def call(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, dict[str, str], Any]:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.stack.base + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, dict(reply.headers), parsed(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), parsed(error.read())

    def embed(self, texts: list[str]) -> np.ndarray:
        status, _, rows = self.call("/embed", {"inputs": texts})
        assert status == 200, rows
        return np.array(rows, np.float32)


def parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


@pytest.fixture(scope="session")
def one_replica() -> Iterator[Client]:
    with running_stack("demo", "--device", "cpu", environment=PATIENT) as stack:
        yield Client(stack)


@pytest.fixture(scope="session")
def two_replicas() -> Iterator[Client]:
    # Small chunks, so that every request of more than a few texts is spread over both.
    small = {**PATIENT, "IVY_MAX_CHUNK_TOKENS": "512", "TULIP_THREADS": "1"}
    with running_stack("demo", "--device", "cpu", "--replicas", "2", environment=small) as stack:
        yield Client(stack)


@pytest.fixture(scope="session")
def xquad(shared) -> Xquad:
    return Xquad.load("en", shared / "data" / "xquad")


@pytest.fixture(scope="session")
def reference(minilm):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
