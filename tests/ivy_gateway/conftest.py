"""A gateway in this process, over real gRPC to fake servers, asked through httpx."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from ivy_gateway.app import create_app
from ivy_gateway.config import GatewayConfig
from ivy_gateway.pipeline import Pipeline
from ivy_gateway.tokenizer import TextTokenizer
from protos.fingerprint import tokenizer_hash
from tests.ivy_gateway.fake_tulip import FakeTulip, serving


@dataclass
class Gateway:
    client: httpx.AsyncClient
    pipeline: Pipeline
    tulips: tuple[FakeTulip, ...]

    async def post(self, path: str, **body) -> httpx.Response:
        return await self.client.post(path, json=body)


StartGateway = Callable[..., contextlib.AbstractAsyncContextManager[Gateway]]


@pytest.fixture(scope="session")
def ids_of(minilm) -> Callable[[str], np.ndarray]:
    """From a text to the served model's own ids, by the library: int32 [T], special tokens included."""
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: np.array(tokenizer.encode(text).ids, np.int32)


class LoadedOnce:
    """What the many gateways of one folder, that no test changes, read from its tokenizer file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._load_again = TextTokenizer.load
        self._load = functools.cache(TextTokenizer.load)
        self._hash = functools.cache(tokenizer_hash)

    def hash(self, folder: Path) -> str:
        return (self._hash if folder == self._folder else tokenizer_hash)(folder / "tokenizer.json")

    def load(self, folder: Path, *, workers: int, **settings) -> TextTokenizer:
        """A tokenizer with threads of its own."""
        if folder != self._folder:
            return self._load_again(folder, workers=workers, **settings)
        tokenizer = copy.copy(self._load(folder, workers=workers, **settings))
        tokenizer._threads = ThreadPoolExecutor(workers)
        return tokenizer


@pytest.fixture(scope="session")
def start_gateway(minilm) -> StartGateway:
    """A context manager: `start_gateway(*tulips, **settings)`; one default tulip when none is given."""
    loaded_once = LoadedOnce(minilm)

    @contextlib.asynccontextmanager
    async def start(
        *tulips: FakeTulip, wait: bool = True, model: Path = minilm, **settings
    ) -> AsyncIterator[Gateway]:
        ours = loaded_once.hash(model)
        for tulip in tulips or (tulips := (FakeTulip(),)):
            tulip.description.tokenizer_hash = tulip.description.tokenizer_hash or ours
        async with serving(*tulips):
            config = GatewayConfig(
                model=model, name="minilm", replicas=tuple(t.address for t in tulips), **settings
            )
            with mock.patch.object(TextTokenizer, "load", loaded_once.load):
                app = create_app(config)
            async with app.router.lifespan_context(app):
                pool = app.state.pipeline.pool
                while wait and pool.num_ready < len(tulips):
                    await asyncio.sleep(0.01)
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://ivy") as client:
                    yield Gateway(client, app.state.pipeline, tulips)

    return start
