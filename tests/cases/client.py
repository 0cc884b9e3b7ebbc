"""A client for the cases, that sees status, headers and body; and what ALIVE, SAME and bounds mean here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import numpy as np

from ivy_gateway.local_stack import LocalStack

CONTROL = "a fixed control text"
ALIVE_SECONDS = 5.0
SECONDS = 60.0

# Bounds in float32 on the CPU, where all our replies are computed: far tighter than those for half precision.
SAME_VECTOR = 1e-5  # largest difference of any value
SAME_SCORE = 1e-5
NEAR_REF = 1e-4


class Stack:
    """One running stack, asked over HTTP."""

    def __init__(self, running: LocalStack, *, scores: bool = False, key: str | None = None) -> None:
        self.base = running.base
        self.pid = running.pid
        self.used = False
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.base, timeout=SECONDS, trust_env=False, headers=headers)
        self._scores = scores
        self._baseline = self._control()

    def close(self) -> None:
        """Close the client's connections."""
        self.http.close()

    def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        """POST `body`, or `fields` as its keys, as JSON."""
        self.used = True
        return self.http.post(path, json=fields if body is None else body)

    def post_raw(
        self, path: str, body: bytes, content_type: str | None = "application/json"
    ) -> httpx.Response:
        """POST these bytes."""
        self.used = True
        headers = {} if content_type is None else {"content-type": content_type}
        return self.http.post(path, content=body, headers=headers)

    def get(self, path: str) -> httpx.Response:
        """GET."""
        self.used = True
        return self.http.get(path)

    def embed(self, inputs: Any, **fields: Any) -> np.ndarray:
        """Vectors of `/embed`, which must be a 200."""
        reply = self.post("/embed", inputs=inputs, **fields)
        assert reply.status_code == 200, reply.text
        return np.array(reply.json(), np.float32)

    def openai(self, texts: Any, **fields: Any) -> dict[str, Any]:
        """The body of `/v1/embeddings`, which must be a 200."""
        reply = self.post("/v1/embeddings", input=texts, **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def score(self, query: str, documents: Sequence[str], **fields: Any) -> np.ndarray:
        """Scores of `/score`, in input order."""
        reply = self.post("/score", query=query, documents=list(documents), **fields)
        assert reply.status_code == 200, reply.text
        data = reply.json()["data"]
        assert [item["index"] for item in data] == list(range(len(documents)))
        return np.array([item["score"] for item in data], np.float32)

    def rerank(self, query: str, documents: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
        """Results of `/rerank`."""
        reply = self.post("/rerank", query=query, documents=list(documents), **fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["results"]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of `name` that carry these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    def assert_alive(self) -> None:
        """Ready, and the control text gives what it gave at the start; within a few seconds."""
        deadline = time.monotonic() + ALIVE_SECONDS
        while True:
            try:
                assert self.http.get("/health", timeout=ALIVE_SECONDS).status_code == 200
                np.testing.assert_allclose(self._control(), self._baseline, atol=SAME_VECTOR)
                return
            except (AssertionError, httpx.HTTPError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _control(self) -> np.ndarray:
        if self._scores:
            reply = self.http.post("/score", json={"query": CONTROL, "documents": [CONTROL, "another"]})
            assert reply.status_code == 200, reply.text
            return np.array([item["score"] for item in reply.json()["data"]], np.float32)
        reply = self.http.post("/embed", json={"inputs": CONTROL})
        assert reply.status_code == 200, reply.text
        return np.array(reply.json(), np.float32)


def together(stack: Stack, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run `work` with an asynchronous client on `stack`, for many requests at once."""
    stack.used = True

    async def run() -> Any:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=stack.base, timeout=SECONDS, limits=limits, trust_env=False
        ) as client:
            return await work(client)

    return asyncio.run(run())


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until `condition()` is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def message_of(reply: httpx.Response) -> str:
    """What a refusal says, in either family's shape."""
    error = reply.json()["error"]
    return error if isinstance(error, str) else error["message"]


def assert_refused(reply: httpx.Response, *needles: str, status: Sequence[int] = (400, 422)) -> None:
    """A client's mistake, told in words that hold `needles`."""
    assert reply.status_code in status, reply.text
    for needle in needles:
        assert needle in message_of(reply), reply.text


def assert_same(got: np.ndarray, wanted: np.ndarray, tolerance: float = SAME_VECTOR) -> None:
    """SAME between two of our own replies."""
    np.testing.assert_allclose(got, wanted, atol=tolerance)


def assert_near_reference(got: np.ndarray, wanted: np.ndarray) -> None:
    """NEAR-REF, in float32."""
    np.testing.assert_allclose(got, wanted, atol=NEAR_REF)
