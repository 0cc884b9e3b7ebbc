"""One chunk there and its row back over the stream between the tiers, without anything at either end.

    python -m benchmarks.hop [--rounds 5] [--messages 1500]

Two processes on loopback, 128 token ids out, 1,024 floats back, one at a time; with gRPC as both tiers set it
up (`protos.GRPC_EXPERIMENTS`) and as it is by default, on uvloop and on asyncio, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop

import protos
from benchmarks import report

AS_SET, BY_DEFAULT = protos.GRPC_EXPERIMENTS, ""
WAYS = {
    "asyncio, gRPC by default": ("asyncio", BY_DEFAULT),
    "uvloop, gRPC by default": ("uvloop", BY_DEFAULT),
    "asyncio, gRPC as set": ("asyncio", AS_SET),
    "uvloop, gRPC as set": ("uvloop", AS_SET),
}
_IDS, _ROW = b"y" * 512, b"x" * 4096


async def serve() -> None:
    """Answer on a free port, which is printed, until killed."""
    import grpc

    from protos.tulip.v1 import inference_pb2 as pb
    from protos.tulip.v1 import inference_pb2_grpc

    class Echo(inference_pb2_grpc.InferenceServicer):
        async def InferStream(  # type: ignore[override]
            self,
            request_iterator: AsyncIterator[pb.RequestFrame],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> None:
            """A row for each message."""
            async for _ in request_iterator:
                frame = pb.ReplyFrame()
                frame.replies.add().reply.rows.data = _ROW
                await context.write(frame)

    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Echo(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def ask(port: int, num_messages: int) -> None:
    """Print the median round trip in microseconds; the first tenth does not count."""
    import grpc

    from protos.tulip.v1 import inference_pb2 as pb
    from protos.tulip.v1.inference_pb2_grpc import InferenceStub

    taken = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = InferenceStub(channel).InferStream()
        for _ in range(num_messages):
            began = time.perf_counter()
            frame = pb.RequestFrame()
            frame.requests.add().infer.token_ids.data = _IDS
            await call.write(frame)
            await call.read()
            taken.append(time.perf_counter() - began)
        call.cancel()
    print(1e6 * statistics.median(taken[num_messages // 10 :]))


def round_trip(way: str, num_messages: int) -> float:
    """Microseconds, in two fresh processes."""
    loop, experiments = WAYS[way]
    environment = {**os.environ, "GRPC_EXPERIMENTS": experiments, "GRPC_VERBOSITY": "NONE"}
    command = [sys.executable, "-m", "benchmarks.hop", "--loop", loop]
    server = subprocess.Popen([*command, "--serve"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        asking = [*command, "--ask", port, "--messages", str(num_messages)]
        return float(subprocess.check_output(asking, text=True, env=environment))
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Measure in turns, print, write `results/hop.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop", help=argparse.SUPPRESS)
    args = parser.parse_args()
    run = uvloop.run if args.loop == "uvloop" else asyncio.run
    if args.serve:
        run(serve())
    elif args.ask:
        run(ask(args.ask, args.messages))
    else:
        publish({way: [] for way in WAYS}, args.rounds, args.messages)


def publish(taken: dict[str, list[float]], rounds: int, num_messages: int) -> None:
    """All ways in turns, so that the machine's moods fall on each of them."""
    for number in range(rounds):
        for way, microseconds in taken.items():
            microseconds.append(round_trip(way, num_messages))
        print(f"round {number + 1} of {rounds}", flush=True)
    rows = [(way, f"{min(t):.0f}", f"{statistics.median(t):.0f}") for way, t in taken.items()]
    print(report.table(("round trip, us", "best round", "median round"), rows))
    report.write_json("hop", {"microseconds": taken})


if __name__ == "__main__":
    main()
