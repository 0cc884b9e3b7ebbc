"""The least an HTTP server in Python costs: the gateway's own libraries, the same replies, and no work.

    python -m benchmarks.tables.echo --port N

Parses the body as the gateway does and answers one fixed vector of 1,024 floats for each input.
"""

from __future__ import annotations

import argparse
import base64
from typing import Any

import orjson
import uvicorn
from starlette.types import Receive, Scope, Send

_VECTOR = base64.b64encode(bytes(4 * 1024)).decode()
_HEADERS = [(b"content-type", b"application/json")]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """One request, as ASGI has it."""
    if scope["type"] != "http":
        return
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = orjson.dumps(_answer(b"".join(parts)))
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
    await send({"type": "http.response.body", "body": body})


def _answer(raw: bytes) -> dict[str, Any]:
    if not raw:
        return {}
    given = orjson.loads(raw).get("input")
    count = len(given) if isinstance(given, list) and given and isinstance(given[0], list) else 1
    return {"data": [{"object": "embedding", "index": i, "embedding": _VECTOR} for i in range(count)]}


def main() -> None:
    """Run until SIGINT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    settings = uvicorn.Config(
        app, port=port, loop="uvloop", http="httptools", lifespan="off", log_level="warning", access_log=False
    )
    uvicorn.Server(settings).run()


if __name__ == "__main__":
    main()
