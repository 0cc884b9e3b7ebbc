"""Measure servers over HTTP on loopback, side by side, each one checked against the reference first.

    python -m benchmarks.tables --folder EMBED --score-folder SCORE --device cuda:0 --server ours,vllm
    python -m benchmarks.tables --folder EMBED --device cuda:0 --tables T1,T3 --client aiohttp --seconds 5
    python -m benchmarks.tables --folder EMBED --score-folder SCORE --device cuda:0 --tables "" --trace
    python -m benchmarks.tables --folder EMBED --server ours,infinity --python infinity=VENV/bin/python
    python -m benchmarks.tables --folder EMBED --server tei --url http://127.0.0.1:3000
    python -m benchmarks.tables --fake --quick

A peer that lives in a virtual environment of its own is started by that one's interpreter: `--python`. One
that somebody else runs is asked under `--url`. A run that is cut by SIGTERM or Ctrl-C writes what it has.
Folders come from `python -m benchmarks.random_folders qwen3-0.6b` and `qwen3-0.6b-score`, or are anybody's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.tables import checks, crew, dialects, measure, servers, summary, tracing
from benchmarks.tables.measure import Outcome, ServerResult
from benchmarks.tables.workloads import CELLS, TABLES, Cell, Ids, shortened
from protos.stamps import FOLDER_VARIABLE

_LARGEST_RANDOM_ID = 151_000  # of Qwen's vocabulary: its special tokens lie above
_TASKS = ("embed", "score")
_CUTTING = (signal.SIGTERM, signal.SIGINT)
_QUICK_LENGTH, _FULL_LENGTH = 128, 8192  # tokens that an input of a fake model may have


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 when every cell that was asked for has figures."""
    args = _parse(arguments)
    num_clients = max((cell.processes for cell in CELLS if cell.table in args.tables), default=0)
    with tempfile.TemporaryDirectory(prefix="tables-") as scratch, crew.Crew(num_clients) as clients:
        session = Session(args, Path(scratch), clients)
        traces = [session.trace(name) for name in session.names] if args.trace else []
        if traces:
            written = report.write_markdown("trace", "\n".join(traces), args.out)
            print(f"written: {written}")
        results = [ServerResult(name) for name in session.names] if args.tables else []
        cut = None
        try:
            cut = session.measure_all(results)
        finally:
            if any(result.outcomes or result.failure for result in results):
                session.write(results, cut)
    if cut is not None:
        raise cut
    complete = all(o.figures for result in results for o in result.outcomes)
    return 0 if complete and not any(result.failure for result in results) else 1


class Cut(SystemExit):
    """A signal ended the run; its code is the shell's: 128 and the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.by = signal.Signals(number).name


def _cut(number: int, _frame: object) -> None:
    for one in _CUTTING:  # `timeout` sends two; what is being ended is not cut again
        signal.signal(one, signal.SIG_IGN)
    raise Cut(number)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="model folder with a tokenizer.json")
    parser.add_argument("--score-folder", type=Path, help="the same shape with a head of one label, for T2")
    parser.add_argument(
        "--server", default="ours", help=f"with commas, of {', '.join(servers.ADAPTERS)} (ours)"
    )
    parser.add_argument("--url", help="of the one server that somebody else runs: http://host:port")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter that a server is installed for, if not this one; once for each such server",
    )
    parser.add_argument("--model-name", default="m", help="what --url's server calls the model (m)")
    parser.add_argument(
        "--extra", default="", help="further flags of the servers that are started, one string"
    )
    parser.add_argument("--tables", default=",".join(TABLES), help="with commas; empty: none (all)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, or what the server takes (cpu)")
    parser.add_argument("--seconds", type=float, help="of each cell (10; with --quick 0.5)")
    parser.add_argument("--quick", action="store_true", help="half a second a cell")
    parser.add_argument(
        "--fake", action="store_true", help="our stack around a fake engine, and an echo server"
    )
    parser.add_argument("--trace", action="store_true", help="also: where one request's microseconds go")
    parser.add_argument("--trace-requests", type=int, default=300, help="of each traced cell (300)")
    parser.add_argument("--client", choices=crew.CLIENTS, default="raw", help="which client sends (raw)")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--name", default="tables", help="of the results' files (tables)")
    args = parser.parse_args(arguments)
    args.tables = tuple(args.tables.split(",")) if args.tables else ()
    if unknown := set(args.tables) - set(TABLES):
        parser.error(f"--tables: {', '.join(sorted(unknown))}: known are {', '.join(TABLES)}")
    if args.fake == (args.folder is not None):
        parser.error("one of --folder and --fake is needed")
    args.server = ("echo", "fake") if args.fake else tuple(args.server.split(","))
    if unknown := set(args.server) - set(servers.ADAPTERS):
        parser.error(f"--server: {', '.join(sorted(unknown))} is not known")
    args.python = dict(_interpreter(parser, given) for given in args.python)
    return args


def _interpreter(parser: argparse.ArgumentParser, given: str) -> tuple[str, str]:
    name, _, path = given.partition("=")
    if name not in servers.ADAPTERS or servers.ADAPTERS[name].command is None:
        parser.error(f"--python: {given}: {name} is no server that is started here")
    if not Path(path).is_file():
        parser.error(f"--python: {given}: there is no such file")
    return name, str(Path.cwd() / path)  # not resolved: a virtual environment's interpreter is a link


class Session:
    """Folders, checks and clients that all servers of one run share."""

    def __init__(self, args: argparse.Namespace, scratch: Path, clients: crew.Crew) -> None:
        self.names: tuple[str, ...] = args.server
        pace = measure.QUICK if args.quick else measure.PACE
        self.pace = pace if args.seconds is None else replace(pace, seconds=args.seconds)
        self._args = args
        self._scratch = scratch
        self._clients = clients
        self._folders = (
            _fake_folders(scratch, args.quick)
            if args.fake
            else {"embed": args.folder, "score": args.score_folder}
        )
        self._cells = [cell for task in _TASKS for cell in self._cells_of(task)]
        self._checkers: dict[str, checks.Checker] = {}
        self.model = "fake" if args.fake else args.folder.name

    def _cells_of(self, task: str) -> list[Cell]:
        folder = self._folders[task]
        if folder is None:
            return []
        wanted = [cell for cell in CELLS if cell.task == task and cell.table in self._args.tables]
        return shortened(wanted, _longest(folder))

    def measure_all(self, results: Sequence[ServerResult]) -> Cut | None:
        """Every server; what cut the run short, if anything did."""
        for result in results:
            try:
                self.measure(result)
            except Cut as cut:
                print(f"cut by {cut.by}", flush=True)
                if any(one.outcomes for one in results):
                    for one in results:
                        one.cut(self._cells)
                return cut
        return None

    def write(self, results: Sequence[ServerResult], cut: Cut | None) -> None:
        """What was measured, also of a run that was cut."""
        details = {
            "model": self.model,
            "device": self._args.device,
            "seconds": self.pace.seconds,
            "client": self._args.client,
            **({} if cut is None else {"cut": f"by {cut.by}"}),
        }
        peers = self._args.device.startswith("cuda")
        files = summary.write(results, details, self._args.out, self._args.name, peers=peers)
        print("\n".join(f"written: {file}" for file in files))

    def measure(self, result: ServerResult) -> None:
        """Every cell of one server, which is started once for each kind of folder."""
        adapter = servers.ADAPTERS[result.name]
        if adapter.packages:
            result.packages = servers.versions(adapter, self._python(adapter))
        for task in _TASKS:
            cells = [cell for cell in self._cells if cell.task == task]
            able = [cell for cell in cells if adapter.dialect.refusal(cell) is None]
            result.outcomes.extend(
                Outcome(cell, reason=adapter.dialect.refusal(cell) or "")
                for cell in cells
                if cell not in able
            )
            if able:
                self._measure_task(adapter, task, able, result)

    def _measure_task(
        self, adapter: servers.Adapter, task: str, cells: list[Cell], result: ServerResult
    ) -> None:
        started_here = adapter.command is not None
        print(f"{adapter.name}, {task}: {'starting' if started_here else self._args.url}", flush=True)
        checker = None if adapter.name == "echo" else self._checker(task)
        try:
            with self._running(adapter, task) as server:
                if server.start_seconds is not None:
                    print(f"{adapter.name}, {task}: healthy after {server.start_seconds:.1f} s", flush=True)
                target = self._target(server, adapter, task)
                for outcome in measure.measure(self._clients, target, cells, checker, self.pace):
                    result.outcomes.append(outcome)
                result.starts.append({"task": task, "seconds": server.start_seconds, **server.held()})
        except servers.ServerFailed as error:
            print(f"{adapter.name}, {task}: {error}", flush=True)
            result.failure = f"{task}: {error}"

    def trace(self, name: str) -> str:
        """One request after the other through our own stack with its stamps on, as a Markdown table."""
        adapter, sent, parts = servers.ADAPTERS[name], [], self._scratch / f"stamps-{name}"
        if adapter.command is None or adapter.dialect is not dialects.OURS or name == "echo":
            return f"{name}: leaves no stamps"
        parts.mkdir()
        for task in (task for task in _TASKS if self._folders[task] is not None):
            longest = _longest(self._folders[task])
            cells = [cell for cell in shortened(tracing.CELLS, longest) if cell.task == task]
            with self._running(adapter, task, {FOLDER_VARIABLE: str(parts)}) as server:
                target = self._target(server, adapter, task)
                sent += [tracing.send(target, cell, self._args.trace_requests, 60.0) for cell in cells]
        table = tracing.table(sent, parts)
        print(table, flush=True)
        return f"{name}, {self._args.device}, one request at a time\n\n{table}\n"

    def _running(
        self, adapter: servers.Adapter, task: str, environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[servers.Running]:
        if adapter.command is None:
            return nullcontext(servers.by_url(self._args.url or "", self._args.model_name))
        log = self._args.out / f"{adapter.name}-{task}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        extra = [*shlex.split(self._args.extra), *(("--task", task) if adapter.name == "fake" else ())]
        folder = self._folders[task]
        launch = servers.Launch(
            folder.resolve(), _longest(folder), self._args.device, self._python(adapter), extra
        )
        return servers.running(adapter, launch, log, environment)

    def _python(self, adapter: servers.Adapter) -> str:
        path: str = self._args.python.get(adapter.name, sys.executable)
        return path

    def _target(self, server: servers.Running, adapter: servers.Adapter, task: str) -> crew.Target:
        folder = self._folders[task]
        vocabulary_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        return crew.Target(
            server.address,
            server.model,
            adapter.dialect,
            folder / "tokenizer.json",
            min(vocabulary_size, _LARGEST_RANDOM_ID),
            self._args.client,
        )

    def _checker(self, task: str) -> checks.Checker:
        if task not in self._checkers:
            cells = [cell for cell in self._cells if cell.task == task]
            nobody = servers.Running(("", 0), "", None, None, None)
            target = self._target(nobody, servers.ADAPTERS["ours"], task)
            self._checkers[task] = checks.Checker(cells, target, self._reference)
        return self._checkers[task]

    def _reference(self, sequences: Sequence[Ids], task: str) -> dialects.Rows:
        if self._args.fake:
            from benchmarks.tables import fake

            return fake.rows(sequences, task)
        from benchmarks.tables.reference import reference_rows

        print(f"reference: transformers float32 of {len(sequences)} sequences, {task}", flush=True)
        return np.asarray(reference_rows(self._folders[task], task, self._args.device, sequences))


def _longest(folder: Path) -> int:
    """Tokens that an input of the folder's model may have, as sentence-transformers reads it."""
    config = json.loads((folder / "config.json").read_text())
    limits = [config["max_position_embeddings"]]
    sentences = folder / "sentence_bert_config.json"
    if sentences.exists():
        limits.append(json.loads(sentences.read_text()).get("max_seq_length") or limits[0])
    longest: int = min(limits)
    return longest


def _fake_folders(scratch: Path, quick: bool) -> dict[str, Path]:
    from benchmarks.tables import fake

    folders = {task: scratch / task for task in _TASKS}
    for task, folder in folders.items():
        fake.write_folder(folder, task, _QUICK_LENGTH if quick else _FULL_LENGTH)
    return folders


if __name__ == "__main__":
    for one in _CUTTING:
        signal.signal(one, _cut)
    raise SystemExit(main())
