"""Two servers with engines that sleep and a gateway, all processes, shared by the scenarios that can.

The gateway reaches the first over gRPC and the second over a frame socket.

`BOUQUET_CHAOS=whole` runs the scenarios at full length; without it they are shortened.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.known_answers import KnownAnswers, Question, random_ids
from benchmarks.processes import DIMENSIONS, Cluster, cluster, mixed_addresses


@pytest.fixture(scope="session")
def whole() -> bool:
    """Whether scenarios run at full length."""
    return os.environ.get("BOUQUET_CHAOS") == "whole"


@pytest.fixture(scope="session")
def answers(minilm) -> KnownAnswers:
    return KnownAnswers(minilm, DIMENSIONS)


@pytest.fixture(scope="session")
def mixed(answers) -> list[Question]:
    """Requests of several sizes over several routes, whose answers are known."""
    random = np.random.default_rng(1)
    texts = [f"text {i} about {'tea ' * (i % 9)}and roads" for i in range(90)]
    questions = [answers.embed_ids(random_ids(random, 1 + i % 4, 5 + i % 30)) for i in range(60)]
    for i in range(0, 90, 3):
        questions.append(answers.embed(texts[i : i + 3]))
        questions.append(answers.openai(texts[i : i + 2], encoded=i % 2 == 0))
        questions.append(answers.rerank(texts[i], texts[i + 1 : i + 3]))
    return questions


@pytest.fixture
def questions(mixed) -> Iterator[Question]:
    return itertools.cycle(mixed)


@pytest.fixture(scope="package")
def shared_pair(minilm, tmp_path_factory) -> Iterator[Cluster]:
    steps = ("--max-batch-tokens", "1000")  # of at most 50 ms
    folder = tmp_path_factory.mktemp("pair")
    with cluster(minilm, folder, server_flags=steps, addresses=mixed_addresses) as stack:
        yield stack


@pytest.fixture
def pair(shared_pair) -> Iterator[Cluster]:
    """A gateway and two servers that are ready; a test may stop, end and start them: they are ready after."""
    shared_pair.wait_for_replicas(2)
    yield shared_pair
    for tulip in shared_pair.tulips:
        tulip.heal()
        if not tulip.alive:
            tulip.start()
    shared_pair.wait_for_replicas(2)
    assert shared_pair.get("/health")[0] == 200


@pytest.fixture
def start(minilm, tmp_path):
    """A context manager: `start(*gateway_flags, **settings)` of `cluster`, for stacks of one test."""

    def begin(*flags: str, model: Path = minilm, **settings):
        return cluster(model, tmp_path, *flags, **settings)

    return begin


@pytest.fixture
def numpy_random() -> np.random.Generator:
    return np.random.default_rng(7)
