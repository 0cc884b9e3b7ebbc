"""Our own stack without a model: a real gateway and a real Tulip around the fake engine.

    python -m benchmarks.tables.fake FOLDER --port N [--task score] [flags of the gateway]

FOLDER needs only settings and a tokenizer. What it takes is the price of everything but the model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import random_folders
from benchmarks.tables.dialects import Rows
from benchmarks.tables.servers import OPEN_DOOR
from ivy_gateway.local import find_model
from ivy_gateway.local_stack import free_port
from protos.frames import ADDRESS_PREFIX
from rose_engine.batch import Batch
from rose_engine.batch import Sequence as EngineSequence
from rose_engine.fake import FakeEngine, fake_rows
from rose_engine.limits import EngineLimits
from tulip_server.config import ServerConfig
from tulip_server.server import serve

DIMENSIONS = {"embed": 1024, "score": 1}
VOCABULARY_SIZE = 30_522  # of the bundled tokenizer
_LIMITS = EngineLimits(
    max_length=8192,
    vocabulary_size=VOCABULARY_SIZE,
    num_segments=1,
    max_batch_tokens=32_768,
    max_batch_sequences=512,
)


def write_folder(folder: Path, task: str, max_length: int) -> None:
    """A folder of the Qwen3-0.6B shape that lacks the weights, with the bundled model's tokenizer."""
    shape = random_folders.SHAPES["qwen3-0.6b" if task == "embed" else "qwen3-0.6b-score"]
    config = {**shape.config, "vocab_size": VOCABULARY_SIZE}
    random_folders.write_settings(folder, replace(shape, config=config, max_length=max_length))
    shutil.copyfile(find_model("demo") / "tokenizer.json", folder / "tokenizer.json")


def rows(sequences: Sequence[Sequence[int]], task: str) -> Rows:
    """What the fake engine answers for sequences of ids, `[N, dimensions]`."""
    batch = Batch.pack(EngineSequence(np.array(ids, np.int32)) for ids in sequences)
    return fake_rows(batch, DIMENSIONS[task])


def _engine(folder: Path, task: str) -> FakeEngine:
    engine = FakeEngine(DIMENSIONS[task], _LIMITS)
    engine.description = replace(
        engine.description, task=task, tokenizer_file=folder / "tokenizer.json", pooling="lasttoken"
    )
    return engine


def _end_with(gateway: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    """A gateway that ends by itself takes the server along."""
    gateway.wait()
    if not stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    """Run until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--task", choices=sorted(DIMENSIONS), default="embed")
    args, gateway_flags = parser.parse_known_args(arguments)
    socket = args.folder / "frames.sock"
    server = ServerConfig(model=args.folder, port=free_port(), frames_socket=socket)
    gateway = [sys.executable, "-m", "ivy_gateway", "--model", str(args.folder), "--port", str(args.port)]
    known = ["--alias", "m", "--token-ids", "model", "--replica", f"{ADDRESS_PREFIX}{socket.absolute()}"]
    if args.task == "score":  # the bundled tokenizer has none of the words of a language model's template
        gateway_flags += ["--reranker-template", "none"]
    process = subprocess.Popen([*gateway, *known, *OPEN_DOOR, *gateway_flags])
    stopping = threading.Event()
    threading.Thread(target=_end_with, args=(process, stopping), daemon=True).start()
    try:
        asyncio.run(serve(server, lambda: _engine(args.folder, args.task)))
    finally:
        stopping.set()
        process.terminate()
        process.wait()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    main(sys.argv[1:])
