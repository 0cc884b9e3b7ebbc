"""A stream on which nobody says anything stays open: neither side takes the other's pings for abuse."""

from __future__ import annotations

import asyncio

import grpc

from ivy_gateway import grpc_link
from tulip_server import listener

METHOD = "/keepalive.Test/Quiet"
# Both sides' times, hundreds of times shorter. What is not among the options cannot be shortened: a misspelt
# tolerance leaves the library's own five minutes in force.
SHORTER = 100
# A client of the library sends a ping a second at most; the server below ends a stream at the third too many.
QUIET_SECONDS, SECONDS = 4.5, 30.0
# The library itself stops pinging after two pings without data; peers in other languages do not.
TIRELESS = [("grpc.http2.max_pings_without_data", 0)]


def shortened(options):
    return [
        (name, value // SHORTER if "keepalive_t" in name or "ping" in name else value)
        for name, value in options
    ]


def client_options():
    return [*shortened(grpc_link._OPTIONS), *TIRELESS]


def server_options():
    return [*shortened(listener._OPTIONS), ("grpc.http2.max_ping_strikes", 1)]


class Quiet(grpc.GenericRpcHandler):
    """A stream that never answers."""

    def service(self, details):
        async def wait(requests, context):
            await asyncio.sleep(60)
            yield b""

        return grpc.stream_stream_rpc_method_handler(wait) if details.method == METHOD else None


async def outcome_of_silence(options, seconds: float) -> str | None:
    """What ended a quiet stream within the time, or None."""
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Quiet(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as channel:
            call = channel.stream_stream(METHOD)()
            try:
                await asyncio.wait_for(call.read(), seconds)
            except TimeoutError:
                return None
            except grpc.aio.AioRpcError as error:
                return error.debug_error_string()
            return "the stream ended"
    finally:
        await server.stop(None)


async def test_a_quiet_stream_stays_open():
    assert await outcome_of_silence(server_options(), QUIET_SECONDS) is None


async def test_the_silence_is_long_enough_to_tell():
    """Without the server's tolerance the same stream is ended."""
    tolerance = "grpc.http2.min_ping_interval_without_data_ms"
    options = [(name, value) for name, value in server_options() if name != tolerance]
    assert len(options) == len(server_options()) - 1
    assert "too many pings" in str(await outcome_of_silence(options, SECONDS)).lower()
