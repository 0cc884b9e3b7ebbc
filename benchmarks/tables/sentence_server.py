"""sentence-transformers behind the simplest server that one would write: one model, one lock, no batching.

    python -m benchmarks.tables.sentence_server FOLDER --port N --device cuda:0

Texts in, base64 out, under OpenAI's route.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
from typing import Any

import numpy as np
import orjson
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from sentence_transformers import SentenceTransformer


def make_app(model: SentenceTransformer) -> FastAPI:
    """`/v1/embeddings` and `/health` over `model`."""
    app, one_at_a_time = FastAPI(), asyncio.Lock()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        given = orjson.loads(await request.body())["input"]
        texts = [given] if isinstance(given, str) else given
        async with one_at_a_time:
            vectors = await asyncio.to_thread(model.encode, texts, normalize_embeddings=True)
        return Response(orjson.dumps({"data": _data(vectors)}), media_type="application/json")

    return app


def _data(vectors: object) -> list[dict[str, Any]]:
    rows = np.ascontiguousarray(vectors, np.float32)
    return [
        {"object": "embedding", "index": i, "embedding": base64.b64encode(row).decode()}
        for i, row in enumerate(rows)
    ]


def main() -> None:
    """Run until SIGINT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = SentenceTransformer(args.folder, device=args.device, model_kwargs={"dtype": dtype})
    uvicorn.run(make_app(model), host="127.0.0.1", port=args.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
