"""`make demo`: start the whole stack on the bundled model, ask it real questions, show the answers, stop it.

A client like any other: it knows the HTTP routes and nothing behind them.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from ivy_gateway.local_stack import StackError, running_stack

SENTENCES = (
    "The ferry leaves for the island at seven.",
    "A boat sails to the island every morning.",
    "Whisk the eggs before adding the flour.",
    "Beat the eggs, then fold in the flour.",
)
QUERY = "How do plants make their food?"
DOCUMENTS = (
    "The bridge was closed for repairs in March.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar in the leaves.",
    "Gardeners water their plants early in the morning.",
    "Roots take up minerals from the soil.",
)


def main() -> int:
    """Run the demonstration; 0 when every answer came and the stack stopped cleanly."""
    print("Bouquet: starting one server on the CPU and the gateway in front of it ...\n", flush=True)
    try:
        with running_stack("demo", "--device", "cpu") as stack:
            print(f"\nReady after {stack.start_seconds:.1f} s at {stack.base}\n")
            show_similarities(stack.base)
            show_ranking(stack.base)
            show_openai(stack.base)
            show_model(stack.base)
            print("\nStopping ...", flush=True)
    except StackError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print("Stopped cleanly.")
    return 0


def ask(base: str, path: str, body: dict[str, Any] | None = None) -> tuple[Any, float]:
    """POST `body` (or GET) and return the parsed reply and the milliseconds it took."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"content-type": "application/json"})  # noqa: S310
    begin = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from None
    return answer, 1000 * (time.perf_counter() - begin)


def show_similarities(base: str) -> None:
    """Embed a few sentences and print who is close to whom."""
    vectors, milliseconds = ask(base, "/embed", {"inputs": SENTENCES})
    shape = f"{len(SENTENCES)} sentences, {len(vectors[0])} dimensions"
    print(f"POST /embed          {shape}, {milliseconds:.1f} ms")
    for i, sentence in enumerate(SENTENCES):
        row = "  ".join(
            f"{sum(a * b for a, b in zip(vectors[i], other, strict=True)):5.2f}" for other in vectors
        )
        print(f"  {i + 1}  {sentence:44s} {row}")
    print()


def show_ranking(base: str) -> None:
    """Score documents against a question and print them, best first."""
    reply, milliseconds = ask(base, "/score", {"query": QUERY, "documents": DOCUMENTS})
    print(f"POST /score          {QUERY!r}, {len(DOCUMENTS)} documents, {milliseconds:.1f} ms")
    for item in sorted(reply["data"], key=lambda item: -item["score"]):
        print(f"  {item['score']:6.3f}  {DOCUMENTS[item['index']]}")
    print()


def show_openai(base: str) -> None:
    """The same vector twice, as floats and as base64, the way the OpenAI client asks for it."""
    body = {"input": SENTENCES[0], "model": "demo"}
    floats, milliseconds = ask(base, "/v1/embeddings", body)
    packed, _ = ask(base, "/v1/embeddings", {**body, "encoding_format": "base64"})
    raw = base64.b64decode(packed["data"][0]["embedding"])
    unpacked = struct.unpack(f"<{len(raw) // 4}f", raw)
    gap = max(abs(a - b) for a, b in zip(floats["data"][0]["embedding"], unpacked, strict=True))
    usage = floats["usage"]["prompt_tokens"]
    print(
        f"POST /v1/embeddings  {usage} tokens, {milliseconds:.1f} ms, floats and base64 differ by {gap:.0e}"
    )


def show_model(base: str) -> None:
    """What is served."""
    info, _ = ask(base, "/info")
    pooling = info["model_type"]["embedding"]["pooling"]
    limit = f"{info['max_input_length']} tokens at most"
    print(f"GET  /info           {info['model_id']}, {pooling} pooling, {limit}")


if __name__ == "__main__":
    sys.exit(main())
