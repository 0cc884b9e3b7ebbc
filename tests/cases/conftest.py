"""A real stack for every kind of model, started when the first case asks for it; ALIVE after each case.

`BOUQUET_CASES=whole` runs the long cases at full length; without it they are shortened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def reference(name: str, build: Callable[[Path, Path], Any], source: str) -> Any:
    """The fixture `reference_<name>`: writes the kind's folder from the files that `source` is of."""

    @pytest.fixture(scope="session", name=f"reference_{name}")
    def written(kinds, request) -> Any:
        return build(kinds / name.upper(), request.getfixturevalue(source))

    return written


def stack(name: str, *flags: str, scores: bool = False) -> Any:
    """The fixture `<name>`: a stack on the kind's folder."""

    @pytest.fixture(scope="session", name=name)
    def serving(fleet, request) -> Stack:
        folder = request.getfixturevalue(f"reference_{name}").folder
        return fleet.start(name.upper(), folder, *flags, scores=scores)

    return serving


reference_e = reference("e", models.encoder, "minilm")
reference_d = reference("d", models.decoder, "shared")
reference_x = reference("x", models.xlm_cross_encoder, "shared")
reference_b = reference("b", models.bert_cross_encoder, "minilm")
reference_y = reference("y", models.yes_no_reranker, "shared")
reference_m = reference("m", models.matryoshka, "minilm")
reference_w = reference("w", models.sliding_window, "minilm")

e = stack("e", *E_FLAGS)
d = stack("d")
x = stack("x", scores=True)
b = stack("b", scores=True)
y = stack("y", "--task", "score", scores=True)
m = stack("m")
w = stack("w")


@pytest.fixture(scope="session")
def faults(tmp_path_factory) -> Path:
    """The folder whose files make steps of the stack `two` fail."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def two(fleet, reference_e, faults) -> Stack:
    """E on two replicas, in small chunks; its steps fail as files in `faults` say."""
    environment = {"IVY_MAX_CHUNK_TOKENS": "1024", "TULIP_THREADS": "1", "BOUQUET_FAULTS": str(faults)}
    environment |= {"IVY_REPLICA_PATIENCE_SECONDS": "0.2"}  # far less than a server takes to start again
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
