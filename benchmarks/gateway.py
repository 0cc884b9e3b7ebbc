"""What the gateway costs: p50 through it and a Tulip without a model, against an echo in the same run.

    python -m benchmarks.gateway [--rounds 300] [--ref REVISION]

One client and one request at a time, the sides taking turns, so that what the machine does meanwhile hits
all of them alike. The echo runs under the same HTTP server with the same settings, reads the whole body and
answers as many bytes as the gateway does. `--ref` adds the gateway of another revision, from a copy of its
files, in front of the same Tulip: what `now` loses against it is the price of the work in between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.child import Child, ended
from ivy_gateway.local import find_model

ROOT = Path(__file__).resolve().parent.parent
DIMENSIONS, MAX_LENGTH = 384, 512
ALLOWED_LOSS = 0.10  # of a hot route, against the other revision
_READY_SECONDS = 60.0
_SEEN_ONCE = 5  # requests of each case and side before any is timed


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Side:
    """Something that answers: the gateway of a revision, or the echo."""

    name: str
    connection: http.client.HTTPConnection

    def seconds(self, case: Case, reply_bytes: int) -> tuple[float, int]:
        """Ask once: how long it took, and the bytes of the reply. Anything but a 200 ends the measurement."""
        headers = {"content-type": "application/json", "x-reply-bytes": str(reply_bytes)}
        began = time.perf_counter()
        self.connection.request("POST", case.path, case.body, headers)
        reply = self.connection.getresponse()
        content = reply.read()
        took = time.perf_counter() - began
        if reply.status != 200:
            raise SystemExit(f"{self.name} {case.path}: {reply.status}: {content[:300]!r}")
        return took, len(content)


def cases() -> list[Case]:
    """The hot routes: token ids of full length, alone and in batches, and a batch of short texts."""
    texts = [f"passage {i}: a ferry crosses the lake at noon" for i in range(64)]
    ids = [[101, *(1000 + (7 * i + n) % 20_000 for n in range(MAX_LENGTH - 2)), 102] for i in range(100)]
    bodies: list[tuple[str, str, dict[str, object]]] = [
        *((f"{n} x {MAX_LENGTH} ids", "/embed", {"inputs": ids[:n]}) for n in (1, 25, 100)),
        ("64 short texts", "/embed", {"inputs": texts}),
        ("64 short texts", "/v1/embeddings", {"input": texts, "encoding_format": "base64"}),
        ("a query, 64 short texts", "/score", {"query": "When does it leave?", "documents": texts}),
    ]
    return [Case(name, path, json.dumps(body).encode()) for name, path, body in bodies]


def measure(sides: Sequence[Side], rounds: int) -> list[dict[str, Any]]:
    """p50 in milliseconds of every case and side, and what `now` loses against `before`, if that is there."""
    rows = []
    for case in cases():
        gateway = sides[0]
        size = max(gateway.seconds(case, 0)[1] for _ in range(_SEEN_ONCE))
        for side in sides[1:]:
            for _ in range(_SEEN_ONCE):
                side.seconds(case, size)
        taken: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(rounds):
            for i in range(len(sides)):
                side = sides[(i + turn) % len(sides)]
                taken[side.name].append(1000 * side.seconds(case, size)[0])
        p50 = {name: statistics.median(values) for name, values in taken.items()}
        rows.append({"case": case.name, "path": case.path, "reply_bytes": size, "p50_ms": p50})
        if "before" in taken:
            ratios = [now / before for now, before in zip(taken["now"], taken["before"], strict=True)]
            rows[-1]["loss"] = statistics.median(ratios) - 1
        print(f"{case.path} {case.name}: " + ", ".join(f"{n} {v:.2f} ms" for n, v in p50.items()), flush=True)
    return rows


def markdown(rows: Sequence[Mapping[str, Any]], ref: str | None, rounds: int) -> str:
    """The table for people."""
    header = ["request", "echo, ms", "gateway, ms", "above the echo, ms"]
    header += [f"gateway at {ref}, ms", "loss"] if ref else []
    lines = []
    for row in rows:
        p50 = row["p50_ms"]
        line = [f"{row['path']}: {row['case']}", f"{p50['echo']:.2f}", f"{p50['now']:.2f}"]
        line.append(f"{p50['now'] - p50['echo']:.2f}")
        lines.append(line + ([f"{p50['before']:.2f}", f"{100 * row['loss']:+.1f} %"] if ref else []))
    about = report.environment()
    return (
        "# What the gateway costs\n\n"
        f"{about['date']}, {about['processor']}, {about['cores']} cores, Python {about['python']}: p50 of"
        f" {rounds} requests, one after the other, the sides taking turns. Behind the gateway a Tulip whose"
        f" engine has no model and gives rows of {DIMENSIONS} numbers at once; the echo answers as many"
        " bytes. A loss is the median of the rounds' own ratios."
        " Written by `python -m benchmarks.gateway`.\n\n" + report.table(header, lines) + "\n"
    )


# ---- the processes ----


# An editable install finds its own packages before any path is looked at.
_FROM_ANOTHER_TREE = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.argv[:] = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def write_folder(folder: Path) -> None:
    """The bundled model's settings and tokenizer without its weights, for inputs of full length."""
    model = find_model("demo")
    for name in ("config.json", "modules.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, folder / name)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))


@contextlib.contextmanager
def running(command: Sequence[str], tree: Path, scratch: Path, name: str) -> Iterator[int]:
    """A module of `tree` as a process; the port that it listens on."""
    start = ["-m"] if tree == ROOT else ["-c", _FROM_ANOTHER_TREE]
    ready = scratch / f"{name}.json"
    child = Child(
        name,
        [sys.executable, *start, *command, "--ready-file", str(ready)],
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
        folder=tree,
    )
    with ended(child):
        child.start()
        yield int(child.wait_for_file(ready, _READY_SECONDS)["port"])


@contextlib.contextmanager
def connected(name: str, port: int) -> Iterator[Side]:
    """A kept-alive connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        yield Side(name, connection)


@contextlib.contextmanager
def revision_tree(revision: str, scratch: Path) -> Iterator[Path]:
    """The files of another revision of this repository."""
    tree = scratch / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    for module in ("gateway.py", "child.py"):  # their `--serve rows`, over that revision
        shutil.copyfile(ROOT / "benchmarks" / module, tree / "benchmarks" / module)
    yield tree


def serve_echo(ready: Path, _folder: Path) -> None:
    """A bare application under the gateway's HTTP server settings."""
    import socket

    import uvicorn

    async def echo(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI's own types
        while (await receive()).get("more_body"):
            pass
        size = next(int(value) for name, value in scope["headers"] if name == b"x-reply-bytes")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"0" * size})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = uvicorn.Config(
            echo, loop="uvloop", http="httptools", lifespan="off", log_config=None, access_log=False
        )
        unfinished = ready.with_suffix(".part")
        unfinished.write_text(json.dumps({"port": listener.getsockname()[1]}))
        unfinished.replace(ready)
        uvicorn.Server(settings).run([listener])


def serve_rows(ready: Path, folder: Path) -> None:
    """A real Tulip around the engine without a model, which says that it serves `folder`."""
    from rose_engine.fake import FakeEngine
    from rose_engine.limits import EngineLimits
    from tulip_server.config import ServerConfig
    from tulip_server.server import serve

    limits = EngineLimits(
        max_length=MAX_LENGTH,
        vocabulary_size=30_522,
        num_segments=2,
        max_batch_tokens=16_384,
        max_batch_sequences=256,
    )
    arguments = ["--model", "none", "--port", "0", "--ready-file", str(ready)]
    config = ServerConfig.from_command_line(arguments, {})
    engine = FakeEngine(DIMENSIONS, limits)
    engine.description = replace(engine.description, tokenizer_file=folder / "tokenizer.json")
    asyncio.run(serve(config, lambda: engine))


def run(rounds: int, ref: str | None) -> list[dict[str, Any]]:
    """Start everything, measure, stop everything."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        scratch = Path(name)
        folder = scratch / "model"
        folder.mkdir()
        write_folder(folder)
        own = ["benchmarks.gateway", "--folder", str(folder), "--serve"]
        rows = stack.enter_context(running([*own, "rows"], ROOT, scratch, "rows"))
        echo = stack.enter_context(running([*own, "echo"], ROOT, scratch, "echo"))
        gateway = ["ivy_gateway", "--model", str(folder), "--port", "0", "--replica"]
        ports = {"now": stack.enter_context(running([*gateway, f"127.0.0.1:{rows}"], ROOT, scratch, "now"))}
        if ref is not None:
            tree = stack.enter_context(revision_tree(ref, scratch))
            rows = stack.enter_context(running([*own, "rows"], tree, scratch, "rows-before"))
            command = [*gateway, f"127.0.0.1:{rows}"]
            ports["before"] = stack.enter_context(running(command, tree, scratch, "before"))
        ports["echo"] = echo
        sides = [stack.enter_context(connected(side, port)) for side, port in ports.items()]
        return measure(sides, rounds)


def main() -> int:
    """Measure, print, write `results/gateway.json` and `.md`; 1 where a hot route lost too much."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--ref", help="a revision to compare with")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--serve", choices=("rows", "echo"), help=argparse.SUPPRESS)
    parser.add_argument("--ready-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        {"rows": serve_rows, "echo": serve_echo}[args.serve](args.ready_file, args.folder)
        return 0
    rows = run(args.rounds, args.ref)
    page = markdown(rows, args.ref, args.rounds)
    print(page)
    report.write_json("gateway", {"rounds": args.rounds, "ref": args.ref, "rows": rows}, args.out)
    report.write_markdown("gateway", page, args.out)
    return int(any(row.get("loss", 0) > ALLOWED_LOSS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
