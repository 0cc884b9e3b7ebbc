"""What part of a rerank request tokenization is: `/score` of one query with 100 documents, by phase.

The stack as served, gateway and Tulip as processes, around an engine of fixed rate that scores; times are
the gateway's own phase metrics. XLM-R's vocabulary and Qwen3's (byte-level BPE), with the compiled encoder
and without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import lzma
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.child import Child, ended
from benchmarks.xquad import SHARED, Xquad

TOKENS_PER_SECOND = 400_000.0  # about XLM-R base in float16 on one recent card
MAX_LENGTH = 512
NUM_DOCUMENTS = 100
ROUNDS = 20
_PHASES = ("tokenize", "queue", "inference", "total")
_READY_SECONDS = 60.0
# The gateway as it is where the extension was not built.
_WITHOUT = (
    "import ivy_gateway.compiled_tokenizer.encoder as encoder, runpy; encoder._native = None;"
    "runpy.run_module('ivy_gateway', run_name='__main__', alter_sys=True)"
)


def write_folder(folder: Path, tokenizer: str) -> None:
    """A cross-encoder's folder with a shared tokenizer, and without weights."""
    raw = lzma.decompress((SHARED / "tokenizers" / tokenizer / "tokenizer.json.xz").read_bytes())
    (folder / "tokenizer.json").write_bytes(raw)
    config = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "max_position_embeddings": MAX_LENGTH + 2,
        "pad_token_id": 1,
        "vocab_size": 250_002,
    }
    (folder / "config.json").write_text(json.dumps(config))


def serve_scores(ready: Path, folder: Path) -> None:
    """A real Tulip around an engine of fixed rate, which says that it scores with `folder`."""
    from rose_engine.fixed_rate import FixedRateEngine
    from rose_engine.limits import EngineLimits
    from tulip_server.config import ServerConfig
    from tulip_server.server import serve

    limits = EngineLimits(MAX_LENGTH, 250_002, 1, 16_384, 256)
    config = ServerConfig.from_command_line(
        ["--model", "none", "--port", "0", "--ready-file", str(ready)], {}
    )
    engine = FixedRateEngine(TOKENS_PER_SECOND, 0.001, 1, limits)
    engine.description = replace(engine.description, task="score", tokenizer_file=folder / "tokenizer.json")
    asyncio.run(serve(config, lambda: engine))


@contextlib.contextmanager
def running(command: Sequence[str], ready: Path) -> Iterator[dict[str, Any]]:
    """A process of this Python; what its ready file says."""
    child = Child(
        ready.stem,
        [sys.executable, *command, "--ready-file", str(ready)],
        environment={"OMP_NUM_THREADS": "1"},
    )
    with ended(child):
        child.start()
        yield child.wait_for_file(ready, _READY_SECONDS)


def phase_sums(metrics: str) -> dict[str, float]:
    """Seconds spent in each phase so far."""
    sums = {}
    for line in metrics.splitlines():
        for phase in _PHASES:
            if line.startswith(f'ivy_phase_seconds_sum{{phase="{phase}"}}'):
                sums[phase] = float(line.rsplit(" ", 1)[1])
    return sums


def ask(port: int, bodies: Sequence[bytes]) -> dict[str, float]:
    """Mean milliseconds of each phase over requests of `bodies`, one after the other."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def call(method: str, path: str, body: bytes | None = None) -> str:
        connection.request(method, path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        content = reply.read().decode()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status}: {content[:300]}")
        return content

    with contextlib.closing(connection):
        _wait_until_healthy(connection)
        call("POST", "/score", bodies[0])
        before = phase_sums(call("GET", "/metrics"))
        for body in bodies[1:]:
            call("POST", "/score", body)
        after = phase_sums(call("GET", "/metrics"))
    return {phase: 1000 * (after[phase] - before[phase]) / (len(bodies) - 1) for phase in _PHASES}


def _wait_until_healthy(connection: http.client.HTTPConnection) -> None:
    for _ in range(int(_READY_SECONDS / 0.1)):
        connection.request("GET", "/health")
        reply = connection.getresponse()
        reply.read()
        if reply.status == 200:
            return
        time.sleep(0.1)
    raise SystemExit("no server became ready")


def requests() -> list[bytes]:
    """Bodies of `/score`: in turn of seven languages, a question and 100 passages."""
    bodies = []
    for number in range(ROUNDS + 1):
        xquad = Xquad.load(("ar", "de", "en", "hi", "ru", "th", "zh")[number % 7])
        start = 60 * (number // 7)
        documents = xquad.passages[start : start + NUM_DOCUMENTS]
        bodies.append(json.dumps({"text_1": xquad.questions[number], "text_2": documents}).encode())
    return bodies


def measure(tokenizer: str, *, with_extension: bool) -> dict[str, Any]:
    """Phases of the requests with one tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, tokenizer)
        server = ["-m", "benchmarks.tokenizer_share", "--serve", str(folder)]
        gateway = ["-m", "ivy_gateway"] if with_extension else ["-c", _WITHOUT]
        with running(server, folder / "tulip.json") as tulip:
            replica = f"127.0.0.1:{tulip['port']}"
            flags = ["--model", str(folder), "--replica", replica, "--port", "0"]
            with running([*gateway, *flags], folder / "ivy.json") as ivy:
                phases = ask(ivy["port"], requests())
    share = phases["tokenize"] / phases["total"]
    return {"tokenizer": tokenizer, "extension": with_extension, **phases, "share": share}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The report."""
    header = ("tokenizer", "extension", *(f"{phase} ms" for phase in _PHASES), "share")
    lines = [
        (
            row["tokenizer"],
            "yes" if row["extension"] else "no",
            *(f"{row[phase]:.2f}" for phase in _PHASES),
            f"{100 * row['share']:.1f} %",
        )
        for row in rows
    ]
    return (
        f"# The share of tokenization in `/score`, 1 x {NUM_DOCUMENTS} documents\n\n"
        f"`python -m benchmarks.tokenizers --share`: an engine of {TOKENS_PER_SECOND:,.0f} tokens a second,"
        f" {ROUNDS} requests of unseen XQuAD passages in seven languages, means of the gateway's phase"
        f" metrics. Without the extension the library encodes.\n\n"
        f"{report.table(header, lines)}\n"
    )


def main(out: Path) -> int:
    """Measure, print, write `tokenizer-share.json` and `.md`."""
    cases = [(name, extension) for name in ("xlm-roberta", "qwen3") for extension in (False, True)]
    rows = [measure(name, with_extension=extension) for name, extension in cases]
    print(markdown(rows))
    report.write_json("tokenizer-share", {"rows": rows}, out)
    report.write_markdown("tokenizer-share", markdown(rows), out)
    return 0


if __name__ == "__main__":
    serve_scores(
        Path(sys.argv[sys.argv.index("--ready-file") + 1]), Path(sys.argv[sys.argv.index("--serve") + 1])
    )
