"""Where Tulip's steps run, and how their results are noticed: the ways measured against each other.

    python -m benchmarks.dispatch FOLDER --device cuda:0 [--rounds 3] [--messages 400]

One engine, loaded once; around it, in turns, a server that launches inline on its event loop or on a worker
thread, and that asks the device for results or is told by a thread that waits, with CPython's switch interval
at its default of 5 ms and at 0.5 ms. A client process sends chunks over the stream, some at once, and takes
the time of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import report
from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch
from rose_engine.config import EngineConfig
from rose_engine.engine import Engine
from tulip_server.config import ServerConfig
from tulip_server.listener import Listener
from tulip_server.server import Server

LOADS = ((128, 1), (512, 1), (24, 64))  # tokens of a chunk, chunks at once
_WARM_UP = 30  # requests that do not count: shapes are seen, captured, and replayed


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run steps."""

    on_thread: bool
    polled: bool
    switch_seconds: float = 0.005

    @property
    def name(self) -> str:
        """For tables."""
        where = "worker thread" if self.on_thread else "inline"
        how = "asked for" if self.polled else "announced"
        return f"{where}, {how}, switch interval {1e3 * self.switch_seconds:g} ms"


WAYS = (
    Way(on_thread=False, polled=True),
    Way(on_thread=False, polled=False),
    Way(on_thread=True, polled=True),
    Way(on_thread=True, polled=False),
    Way(on_thread=False, polled=False, switch_seconds=0.0005),
    Way(on_thread=True, polled=False, switch_seconds=0.0005),
)


class Dispatched:
    """An engine that is dispatched in another way than it says of itself."""

    def __init__(self, engine: Engine, way: Way) -> None:
        self._engine = engine
        self._way = way
        self.polled = way.polled

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the engine has
        return getattr(self._engine, name)

    def would_block(self, batch: Batch) -> bool:
        """Whether the server is to launch on its worker thread."""
        return self._engine.would_block(batch) or self._way.on_thread


async def ask(port: int, num_tokens: int, at_once: int, num_messages: int) -> None:
    """Print the milliseconds of each of `num_messages` chunks, `at_once` under way all the time."""
    ids = np.random.default_rng(1).integers(100, 20_000, (num_messages + _WARM_UP, num_tokens), np.int32)
    began: dict[int, float] = {}
    taken: list[float] = []
    async with grpc_channel(port) as channel:
        call = InferenceStub(channel).InferStream()

        async def send(number: int) -> None:
            frame = pb.RequestFrame()
            request = frame.requests.add(correlation_id=number + 1)
            codec.fill_tensor(request.infer.token_ids, ids[number])
            codec.fill_tensor(request.infer.lengths, np.array([num_tokens], np.int32))
            began[number] = time.perf_counter()
            await call.write(frame)

        for number in range(at_once):
            await send(number)
        following = at_once
        while len(taken) < len(ids):
            for reply in (await call.read()).replies:
                if reply.HasField("failure"):
                    raise SystemExit(f"refused: {reply.failure.message}")
                if reply.HasField("reply"):
                    taken.append(1e3 * (time.perf_counter() - began[reply.correlation_id - 1]))
                    if following < len(ids):
                        await send(following)
                        following += 1
        call.cancel()
    print(json.dumps(taken[_WARM_UP:]))


def grpc_channel(port: int) -> Any:  # noqa: ANN401 - grpc.aio.Channel
    """An unencrypted channel to a server of this machine."""
    import grpc

    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=codec.CHANNEL_OPTIONS)


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """CPython's, while the context lasts."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def measure(engine: Engine, way: Way, num_messages: int) -> list[list[float]]:
    """Milliseconds of each chunk, for each of `LOADS`."""
    listener = Listener.bind("127.0.0.1", 0)
    await listener.open()
    server = Server(Dispatched(engine, way), ServerConfig(model=Path("measured")), listener)
    await server.start()
    try:
        with switch_interval(way.switch_seconds):
            return [await _ask_from_outside(listener.port, load, num_messages) for load in LOADS]
    finally:
        await server.drain()


async def _ask_from_outside(port: int | None, load: tuple[int, int], num_messages: int) -> list[float]:
    numbers = [str(value) for value in (port, *load, num_messages * load[1] // min(load[1], 8))]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.dispatch", "--ask", *numbers, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await client.communicate()
    taken: list[float] = json.loads(output)
    return taken


async def publish(engine: Engine, rounds: int, num_messages: int, out: Path) -> None:
    """All ways in turns; the table on the screen, and `dispatch.json`."""
    taken: dict[Way, list[list[float]]] = {way: [[] for _ in LOADS] for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            for all_rounds, this_round in zip(
                taken[way], await measure(engine, way, num_messages), strict=True
            ):
                all_rounds.extend(this_round)
        print(f"round {number + 1} of {rounds}", flush=True)
    header = ["p50 (p99) ms", *(f"{tokens} tokens, {at_once} at once" for tokens, at_once in LOADS)]
    rows = [(way.name, *(_shown(values) for values in loads)) for way, loads in taken.items()]
    print(report.table(header, rows))
    figures = {way.name: [_figures(values) for values in loads] for way, loads in taken.items()}
    report.write_json("dispatch", {"loads": LOADS, "milliseconds": figures}, out)


def _figures(values: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(values), "p99": report.percentile(values, 0.99)}


def _shown(values: list[float]) -> str:
    figures = _figures(values)
    return f"{figures['p50']:.3f} ({figures['p99']:.3f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=400, help="of each load, way and round")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--ask", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        uvloop.run(ask(*args.ask))
        return
    if args.folder is None:
        parser.error("a model's folder is needed")
    engine = Engine.load(EngineConfig(args.folder, device=args.device))
    try:
        uvloop.run(publish(engine, args.rounds, args.messages, args.out))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
