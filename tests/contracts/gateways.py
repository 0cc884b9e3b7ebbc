"""Gateways of every kind of model, in a thread of this process, over real sockets to fake servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from protos.tulip.v1 import inference_pb2 as pb
from tests.ivy_gateway.fake_tulip import FakeTulip, quantizing

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SECONDS = 60.0


@dataclass(frozen=True)
class Kind:
    """What a gateway serves: its server, its folder, and how it is started."""

    tulip: FakeTulip
    folder: Path
    settings: dict


def contextual_folder(minilm: Path, target: Path) -> Path:
    """The small model, said to be contextual, with a chat template."""
    shutil.copytree(minilm, target, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.PPLXQwen3ContextualModel"}
    (target / "config.json").write_text(json.dumps(config))
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return target


def kinds(minilm: Path, contextual: Path) -> dict[str, Kind]:
    """An embedder that can do everything, a contextual one that quantises, and one that scores."""
    outputs = [pb.OUTPUT_OWN, pb.OUTPUT_BITS, pb.OUTPUT_TOKENS]
    settings = {"token_ids": "model", "any_dimensions": True}
    return {
        "embedder": Kind(FakeTulip(outputs=outputs, hidden_size=8), contextual, settings),
        "codes": Kind(quantizing(), contextual, settings),
        "scorer": Kind(FakeTulip(task=pb.TASK_SCORE, dimensions=1), minilm, settings),
    }


@contextlib.contextmanager
def serving_all(start_gateway, wanted: dict[str, Kind]) -> Iterator[dict[str, str]]:
    """Base URLs by name, for as long as the block lasts."""
    ready, stop, bases = threading.Event(), threading.Event(), {}

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, kind in wanted.items():
                start = start_gateway(kind.tulip, model=kind.folder, **kind.settings)
                gateway = await stack.enter_async_context(start)
                bases[name] = await stack.enter_async_context(listening(gateway.client._transport.app))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(SECONDS), "the gateways did not start"
        yield bases
    finally:
        stop.set()
        thread.join(SECONDS)


@contextlib.asynccontextmanager
async def listening(app):
    """An application on a free port of this host."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
