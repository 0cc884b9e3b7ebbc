"""Requests of a mixed day against one gateway, bounded in number and time, and a count of the answers.

Knows routes and statuses; nothing of what serves them, but for `crowd`, which goes past the gateway.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub

_TIMEOUT = 60.0
_NO_ANSWER = 0  # in place of a status: the connection was refused or lost

SHORT = {"inputs": ["green bicycle", "a red car in the rain", "tea"]}
PAIRS = {"query": "best tea", "texts": ["oolong from the mountains", "a truck", "an old bridge"]}
LONG = {"inputs": "one two three four five six seven eight nine ten " * 200}
MANY = {"inputs": ["a sentence of some ten words about nothing in particular"] * 400}
EMPTY = {"inputs": ""}


@dataclass(frozen=True, slots=True)
class Client:
    """Sends to one gateway with one key; counts what comes back, by status."""

    base: str
    key: str
    answers: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, path: str, body: dict[str, Any], *, key: str | None = None) -> int:
        """The status of the answer; 0 if there is none."""
        status = self._status(self._request(path, body, self.key if key is None else key))
        with self.lock:
            self.answers[status] += 1
        return status

    def abandon(self, path: str, body: dict[str, Any], seconds: float) -> None:
        """Send, and close the connection after `seconds` without an answer. Not counted."""
        request = self._request(path, body, self.key)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=seconds):
            pass

    def get(self, path: str) -> int:
        """The status of the answer; 0 if there is none. Not counted."""
        return self._status(urllib.request.Request(self.base + path))

    def _request(self, path: str, body: dict[str, Any], key: str) -> urllib.request.Request:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        return urllib.request.Request(self.base + path, json.dumps(body).encode(), headers)

    def _status(self, request: urllib.request.Request) -> int:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
                reply.read()
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return _NO_ANSWER


def ordinary(client: Client, number: int) -> int:
    """Request `number` of a day without surprises: embeddings and reranking, now and then a long text."""
    if number % 5 == 4:
        return client.post("/rerank", PAIRS)
    if number % 7 == 6:
        return client.post("/embed", LONG)
    return client.post(
        "/embed" if number % 2 else "/v1/embeddings", SHORT if number % 2 else {"input": "tea"}
    )


def mistaken(client: Client, number: int) -> int:
    """A request that a client gets wrong: nothing to embed, a header without end, or a wrong key."""
    if number % 3 == 1:
        return client.post("/embed", EMPTY)
    if number % 3 == 2:
        return client.post("/embed", SHORT, key="k" * 100_000)
    return client.post("/embed", SHORT, key="wrong")


def heavy(client: Client, _number: int) -> int:
    """A bulk request."""
    return client.post("/embed", MANY)


def impatient(client: Client, _number: int) -> int:
    """A bulk request whose client does not wait for the answer; no status."""
    client.abandon("/embed", MANY, 0.3)
    return _NO_ANSWER


def send(
    client: Client, kind: Callable[[Client, int], int], *, count: int, workers: int, pause: float = 0.0
) -> Counter[int]:
    """`count` requests from `workers` threads, each pausing between two; the statuses of the answers."""

    def one(number: int) -> int:
        time.sleep(pause)
        return kind(client, number)

    with ThreadPoolExecutor(workers) as pool:
        return Counter(pool.map(one, range(count)))


def crowd(address: str, *, chunks: int, lengths: tuple[int, ...]) -> Counter[str]:
    """Chunks of such sequences sent to a server at once, past every gateway: outcomes by gRPC status."""
    ids = np.full(sum(lengths), 1000, np.int32)
    request = pb.InferRequest(
        token_ids=codec.encode_tensor(ids), lengths=codec.encode_tensor(np.array(lengths, np.int32))
    )
    with grpc.insecure_channel(address, options=codec.CHANNEL_OPTIONS) as channel:
        calls = [InferenceStub(channel).Infer.future(request, timeout=_TIMEOUT) for _ in range(chunks)]
        return Counter(call.code().name for call in calls)
