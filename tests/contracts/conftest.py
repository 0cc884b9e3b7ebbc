"""One embedder and one reranker, both real, both small, for the tables of facts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases import models
from tests.cases.client import Stack
from tests.cases.fleet import E_FLAGS, FLEET, Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    yield FLEET
    FLEET.stop()


@pytest.fixture(scope="session")
def embedder(fleet, minilm, tmp_path_factory) -> Stack:
    reference = models.encoder(tmp_path_factory.mktemp("facts") / "E", minilm)
    return fleet.start("E", reference.folder, *E_FLAGS)


@pytest.fixture(scope="session")
def reranker(fleet, minilm, tmp_path_factory) -> Stack:
    reference = models.bert_cross_encoder(tmp_path_factory.mktemp("facts") / "B", minilm)
    return fleet.start("B", reference.folder, scores=True)
