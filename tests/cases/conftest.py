"""A real stack for every kind of model, started when the first case asks for it; ALIVE after each case.

`BOUQUET_CASES=whole` runs the long cases at full length; without it they are shortened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import models
from tests.cases.client import Stack
from tests.cases.fleet import E_FLAGS, FLEET, Fleet, running

WHOLE = os.environ.get("BOUQUET_CASES") == "whole"


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    """After every case, all stacks that it used still serve."""
    for stack in running:
        stack.used = False
    yield
    for stack in running:
        if stack.used:
            stack.assert_alive()


@pytest.fixture(scope="session")
def whole() -> bool:
    """Whether long cases run at full length."""
    return WHOLE


@pytest.fixture(scope="session")
def kinds(tmp_path_factory) -> Path:
    """Where the small models are written."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    yield FLEET
    FLEET.stop()


# References: they write their folders too.


@pytest.fixture(scope="session")
def reference_e(kinds, minilm) -> models.Embedder:
    return models.encoder(kinds / "E", minilm)


@pytest.fixture(scope="session")
def reference_d(kinds, shared) -> models.Embedder:
    return models.decoder(kinds / "D", shared)


@pytest.fixture(scope="session")
def reference_x(kinds, shared) -> models.CrossEncoder:
    return models.xlm_cross_encoder(kinds / "X", shared)


@pytest.fixture(scope="session")
def reference_b(kinds, minilm) -> models.CrossEncoder:
    return models.bert_cross_encoder(kinds / "B", minilm)


@pytest.fixture(scope="session")
def reference_y(kinds, shared) -> models.YesNoReranker:
    return models.yes_no_reranker(kinds / "Y", shared)


@pytest.fixture(scope="session")
def reference_m(kinds, minilm) -> models.Embedder:
    return models.matryoshka(kinds / "M", minilm)


@pytest.fixture(scope="session")
def reference_w(kinds, minilm) -> models.Embedder:
    return models.sliding_window(kinds / "W", minilm)


# Stacks.


@pytest.fixture(scope="session")
def e(fleet, reference_e) -> Stack:
    return fleet.start("E", reference_e.folder, *E_FLAGS)


@pytest.fixture(scope="session")
def d(fleet, reference_d) -> Stack:
    return fleet.start("D", reference_d.folder)


@pytest.fixture(scope="session")
def x(fleet, reference_x) -> Stack:
    return fleet.start("X", reference_x.folder, scores=True)


@pytest.fixture(scope="session")
def b(fleet, reference_b) -> Stack:
    return fleet.start("B", reference_b.folder, scores=True)


@pytest.fixture(scope="session")
def y(fleet, reference_y) -> Stack:
    return fleet.start("Y", reference_y.folder, "--task", "score", scores=True)


@pytest.fixture(scope="session")
def m(fleet, reference_m) -> Stack:
    return fleet.start("M", reference_m.folder)


@pytest.fixture(scope="session")
def w(fleet, reference_w) -> Stack:
    return fleet.start("W", reference_w.folder)


@pytest.fixture(scope="session")
def faults(tmp_path_factory) -> Path:
    """The folder whose files make steps of the stack `two` fail."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def two(fleet, reference_e, faults) -> Stack:
    """E on two replicas, in small chunks; its steps fail as files in `faults` say."""
    environment = {"IVY_MAX_CHUNK_TOKENS": "1024", "TULIP_THREADS": "1", "BOUQUET_FAULTS": str(faults)}
    return fleet.start("two", reference_e.folder, "--replicas", "2", **environment)


STRICT_BODY_BYTES = 64 * 1024
STRICT_WAITING_TOKENS = 4096


@pytest.fixture(scope="session")
def strict(fleet, reference_e) -> Stack:
    """E with everything an operator can make stricter, and token ids allowed on every route."""
    flags = ["--no-auto-truncate", "--token-ids", "model", "--max-body-bytes", str(STRICT_BODY_BYTES)]
    flags += ["--max-chunk-tokens", "1024", "--max-waiting-tokens", str(STRICT_WAITING_TOKENS)]
    return fleet.start("strict", reference_e.folder, *flags)


@pytest.fixture(scope="session")
def demo(fleet, minilm) -> Stack:
    """The bundled model: real weights."""
    return fleet.start("demo", "demo")
