"""Two running stacks, and the client libraries: absent ones skip their tests, but fail under CI.

The libraries are other people's code: what they warn about is no error here (see `pytestmark` in each file).
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from tests.cases import models
from tests.cases.client import Stack
from tests.cases.fleet import FLEET, Fleet

Library = Callable[[str], ModuleType]

TEXTS = ["The ferry leaves at noon.", "A ship that carries people.", "Bread needs yeast."]
QUERY = "How do I cross the lake?"


@pytest.fixture
def library() -> Library:
    """Imports a client library by name, inside the test, where warnings are scoped."""

    def load(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"{name} is not installed (the extra `clients` has it)")

    return load


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """What a library leaves unclosed is found while its warnings are in scope, not in a later test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    yield FLEET
    FLEET.stop()


@pytest.fixture(scope="session")
def embedder(fleet, minilm) -> Stack:
    """The bundled model: real weights, so that near texts are near."""
    return fleet.start("demo", "demo")


@pytest.fixture(scope="session")
def reranker(fleet, minilm, tmp_path_factory) -> Stack:
    """A small cross-encoder with random weights, under the name `B`."""
    folder = tmp_path_factory.mktemp("clients") / "B"
    models.bert_cross_encoder(folder, minilm)
    return fleet.start("B", folder, scores=True)


@pytest.fixture(scope="session")
def vectors(embedder) -> np.ndarray:
    """What every client must get for `TEXTS`."""
    return embedder.embed(TEXTS)


@pytest.fixture(scope="session")
def order(reranker) -> list[int]:
    """The order that every client must get for `TEXTS` and `QUERY`."""
    scores = reranker.score(QUERY, TEXTS, raw_scores=True)
    return np.argsort(-scores, kind="stable").tolist()
