"""One chunk there and its row back between two processes on one machine, without anything at either end.

    python -m benchmarks.hop [--rounds 5] [--messages 1000]

128 token ids out, 1,024 floats back, one at a time, with 0.8 ms at the server in between, in which its loop
turns as Tulip's does while a device computes; these do not count. gRPC by default, gRPC as both tiers set it
up (`protos.GRPC_EXPERIMENTS`) and frames on a Unix socket (`protos.frames`), with loops that sleep when there
is nothing to do and with loops that stay awake, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop

import protos
from benchmarks import report
from benchmarks.child import Child, ended
from protos.frames import FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb

_IDS, _ROW = b"y" * 512, b"x" * 4096
_WORK_SECONDS = 0.0008  # about a step of 128 tokens
_PAUSE_SECONDS = 0.0004  # between two requests of one client
_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Way:
    """How the two sides are joined, and whether their loops rest."""

    carrier: str
    experiments: str = protos.GRPC_EXPERIMENTS
    server_awake: bool = True
    client_awake: bool = False


WAYS = {
    "gRPC by default, both sleep": Way("grpc", experiments="", server_awake=False),
    "gRPC as set, both sleep": Way("grpc", server_awake=False),
    "gRPC as set, server awake": Way("grpc"),
    "gRPC as set, both awake": Way("grpc", client_awake=True),
    "frames, both sleep": Way("frames", server_awake=False),
    "frames, server awake": Way("frames"),
    "frames, both awake": Way("frames", client_awake=True),
}


def stay_awake() -> None:
    """Let the running loop turn for ever."""
    asyncio.get_running_loop().call_soon(stay_awake)


async def work() -> None:
    """What a server does between a chunk and its row."""
    end = time.perf_counter() + _WORK_SECONDS
    while time.perf_counter() < end:
        await asyncio.sleep(0)


def reply() -> pb.ReplyFrame:
    """One row."""
    frame = pb.ReplyFrame()
    frame.replies.add().reply.rows.data = _ROW
    return frame


def request() -> pb.RequestFrame:
    """One chunk."""
    frame = pb.RequestFrame()
    frame.requests.add().infer.token_ids.data = _IDS
    return frame


class FrameConnection(asyncio.Protocol):
    """One side of a socket with frames on it."""

    def __init__(self, on_payload: Callable[[FrameConnection, bytes], None]) -> None:
        self._on_payload = on_payload
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        """Bytes of one frame or of several."""
        for payload in self._splitter.feed(data):
            self._on_payload(self, payload)

    def send(self, message: pb.RequestFrame | pb.ReplyFrame) -> None:
        """Write one message."""
        assert self._transport is not None
        self._transport.write(framed(message))


async def serve_frames(path: Path) -> None:
    """A row for each message, until killed."""
    loop = asyncio.get_running_loop()
    answering: set[asyncio.Task[None]] = set()

    async def answer(connection: FrameConnection, payload: bytes) -> None:
        parse(pb.RequestFrame, payload)
        await work()
        connection.send(reply())

    def begin(connection: FrameConnection, payload: bytes) -> None:
        task = loop.create_task(answer(connection, payload))
        answering.add(task)
        task.add_done_callback(answering.discard)

    await loop.create_unix_server(lambda: FrameConnection(begin), path)
    await asyncio.Event().wait()


async def serve_grpc(path: Path) -> None:
    """A row for each message, until killed."""
    import grpc

    from protos.tulip.v1 import inference_pb2_grpc

    class Echo(inference_pb2_grpc.InferenceServicer):
        async def InferStream(  # type: ignore[override]
            self,
            request_iterator: AsyncIterator[pb.RequestFrame],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> None:
            """A row for each message."""
            async for _ in request_iterator:
                await work()
                await context.write(reply())

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)  # type: ignore[abstract]
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


async def ask_frames(path: Path, num_messages: int) -> list[float]:
    """Seconds of each round trip, the server's work included."""
    loop, taken = asyncio.get_running_loop(), []
    arrived: list[asyncio.Future[pb.ReplyFrame]] = []

    def arrive(_connection: FrameConnection, payload: bytes) -> None:
        arrived.pop().set_result(parse(pb.ReplyFrame, payload))

    _, connection = await loop.create_unix_connection(lambda: FrameConnection(arrive), str(path))
    for _ in range(num_messages):
        began = time.perf_counter()
        future: asyncio.Future[pb.ReplyFrame] = loop.create_future()
        arrived.append(future)
        connection.send(request())
        await future
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(_PAUSE_SECONDS)
    return taken


async def ask_grpc(path: Path, num_messages: int) -> list[float]:
    """Seconds of each round trip, the server's work included."""
    import grpc

    from protos.tulip.v1.inference_pb2_grpc import InferenceStub

    taken = []
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = InferenceStub(channel).InferStream()
        for _ in range(num_messages):
            began = time.perf_counter()
            await call.write(request())
            await call.read()
            taken.append(time.perf_counter() - began)
            await asyncio.sleep(_PAUSE_SECONDS)
        call.cancel()
    return taken


async def be_server(way: Way, path: Path) -> None:
    """The server's process."""
    if way.server_awake:
        stay_awake()
    await (serve_grpc(path) if way.carrier == "grpc" else serve_frames(path))


async def be_client(way: Way, path: Path, num_messages: int) -> None:
    """The client's process: print the median of the hop in microseconds; the first tenth does not count."""
    if way.client_awake:
        stay_awake()
    taken = await (ask_grpc if way.carrier == "grpc" else ask_frames)(path, num_messages)
    print(1e6 * (statistics.median(taken[num_messages // 10 :]) - _WORK_SECONDS))


def round_trip(name: str, num_messages: int) -> float:
    """Microseconds of one way, in two fresh processes."""
    environment = {"GRPC_EXPERIMENTS": WAYS[name].experiments, "GRPC_VERBOSITY": "NONE"}
    with tempfile.TemporaryDirectory(prefix="hop-") as folder:
        path = Path(folder) / "socket"
        command = [sys.executable, "-m", "benchmarks.hop", "--way", name, "--socket", str(path)]
        server = Child("server", [*command, "--serve"], environment=environment)
        with ended(server):
            server.start()
            server.wait_until(path.exists, _START_SECONDS)
            asking = [*command, "--messages", str(num_messages)]
            return float(subprocess.check_output(asking, text=True, env={**os.environ, **environment}))


def main() -> None:
    """Measure in turns, print, write `results/hop.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is None:
        publish(args.rounds, args.messages)
    elif args.serve:
        uvloop.run(be_server(WAYS[args.way], args.socket))
    else:
        uvloop.run(be_client(WAYS[args.way], args.socket, args.messages))


def publish(rounds: int, num_messages: int) -> None:
    """All ways in turns, so that the machine's moods fall on each of them."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, microseconds in taken.items():
            microseconds.append(round_trip(way, num_messages))
        print(f"round {number + 1} of {rounds}", flush=True)
    rows = [(way, f"{min(t):.0f}", f"{statistics.median(t):.0f}") for way, t in taken.items()]
    print(report.table(("hop there and back, us", "best round", "median round"), rows))
    report.write_json("hop", {"microseconds": taken})


if __name__ == "__main__":
    main()
