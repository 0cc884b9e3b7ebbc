"""The decoder paths on a Hopper card: step times in turns, and a search for the fused path's configurations.

    python -m benchmarks.fused [--shapes 1x128,1x512,...] [--rounds 5] [--search] [--no-early]

Random weights in the Qwen3-0.6B shape; every path is one CUDA graph. GPU: time of a replay by device events,
median. Step: page-locked ids to the device, replay, rows to page-locked memory, wait for the event. Cosine:
the worst row against the plain path's. The search changes one part of a layer at a time and times the whole
model, since what runs beside a GEMM matters. JSON goes to $OUT, or to `benchmarks/results`, after every
shape. A kernel that hangs ends the process, with a traceback and what was written before.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks import report
from benchmarks.decoder_stack import random_batch, random_stack
from rose_engine.attention import load_backend
from rose_engine.attention.base import Attend, AttentionBackend
from rose_engine.errors import EngineConfigError
from rose_engine.kernels.cute.config import Early, GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.pool_normalize import pool_normalize
from rose_engine.kernels.ragged_attention import AttentionTile
from rose_engine.layers.decoder import DecoderPath, FoldedPath, PlainPath, StackWeights
from rose_engine.layers.fused import FusedPath
from rose_engine.layers.fused_config import H200_CONFIGS, H200_EARLY_CONFIGS, ConfigTable, LayerConfig
from rose_engine.staging import DeviceBatch

SHAPES = ("1x32", "1x128", "1x256", "1x512", "1x1024", "5x512", "1x4096", "25x512", "50x512", "16x4096")
SEARCHED = ("1x128", "1x512", "5x512")
FEW_TOKENS = 600  # up to here our own attention kernel is the fastest
HANG_SECONDS = 100
WORTH_IT = 0.9985  # of the best time so far: less is noise
WORTH_A_ROUND = 0.997


class ReplayedModel:
    """A path with its head as one captured graph, and the buffers a step copies from and to."""

    def __init__(self, path: DecoderPath, batch: DeviceBatch, attend: Attend) -> None:
        self._batch = batch
        self._graph, self.rows_BD = capture(lambda: embed(path, batch, attend))
        self._ids = batch.token_ids_T.cpu().pin_memory()
        self._rows = torch.empty(self.rows_BD.shape, pin_memory=True)
        self._done = torch.cuda.Event()

    def gpu_ms(self, replays: int) -> float:
        """Median device time of a replay."""
        times = []
        for _ in range(replays + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[2:])

    def step_ms(self, steps: int) -> list[float]:
        """Wall time of each of `steps` steps, after a few that do not count."""
        times = []
        for _ in range(steps + 3):
            begin = time.perf_counter()
            self._batch.token_ids_T.copy_(self._ids, non_blocking=True)
            self._graph.replay()
            self._rows.copy_(self.rows_BD, non_blocking=True)
            self._done.record()
            self._done.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return times[3:]


def embed(path: DecoderPath, batch: DeviceBatch, attend: Attend) -> Tensor:
    """One vector of unit length for each sequence: the last token's."""
    hidden_TD, layout = path(batch, attend), batch.layout
    return pool_normalize(hidden_TD, layout.cu_lengths, layout.max_length, "last")


def first_backend(names: Sequence[str]) -> AttentionBackend:
    """The first of `names` that is installed."""
    for name in names:
        try:
            return load_backend(name)
        except EngineConfigError as error:
            print(f"attention: {error}")
    raise SystemExit("no attention backend")


def capture(forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run once to compile, then capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows_BD = forward()
    graph.replay()
    torch.cuda.synchronize()
    return graph, rows_BD


def lengths_of(shape: str) -> list[int]:
    """`5x512`: five sequences of 512 tokens."""
    count, length = shape.split("x")
    return [int(length)] * int(count)


def fixed(config: LayerConfig) -> ConfigTable:
    """A table of one configuration for every token count."""
    return ((1 << 31, config),)


@dataclass(frozen=True)
class Bench:
    """The weights, the fused path over them, and how long to measure."""

    weights: StackWeights
    fused: FusedPath | None
    rounds: int
    early: bool
    few_tokens: AttentionBackend
    many_tokens: AttentionBackend

    def model(self, path: DecoderPath, batch: DeviceBatch) -> ReplayedModel:
        """`path`, captured for `batch`."""
        few = batch.token_ids_T.shape[0] <= FEW_TOKENS
        backend = self.few_tokens if few else self.many_tokens
        return ReplayedModel(path, batch, backend.bind(batch.layout))

    def paths(self, num_tokens: int) -> dict[str, DecoderPath]:
        """Every path worth comparing at this size, by name."""
        paths: dict[str, DecoderPath] = {"plain": PlainPath(self.weights)}
        if num_tokens <= 4096:
            paths["folded"] = FoldedPath(self.weights)
        if self.fused is None:
            return paths
        stock = self.fused.config_for(num_tokens)
        paths["fused"] = self.fused.with_configs(fixed(stock))
        early = self.fused.with_configs(H200_EARLY_CONFIGS)
        if self.early and early.config_for(num_tokens) != stock:
            paths["fused, early"] = early
        if stock.down is None:
            whole = dataclasses.replace(
                stock,
                output=GemmConfig(128, 128, cluster_n=2, pingpong=True),
                down=GemmConfig(128, 192, cluster_m=2, pingpong=True),
            )
            paths["fused, no cuBLAS"] = self.fused.with_configs(fixed(whole))
        return paths

    def measure(self, shape: str) -> list[dict[str, Any]]:
        """Times of every path for one shape, taken in turns."""
        lengths = lengths_of(shape)
        batch = random_batch(lengths, self.weights.shape.vocabulary_size)
        models = dict(self._captured(batch, sum(lengths)))
        replays = 40 if sum(lengths) < 5000 else 6
        gpu: dict[str, list[float]] = {name: [] for name in models}
        step: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(self.rounds):
            for name, model in models.items():
                guard()
                gpu[name].append(model.gpu_ms(replays))
                step[name] += model.step_ms(replays)
        plain = models["plain"].rows_BD
        return [
            {
                "shape": shape,
                "path": name,
                "gpu_ms": round(statistics.median(gpu[name]), 3),
                "step_p50_ms": round(report.percentile(step[name], 0.5), 3),
                "step_p99_ms": round(report.percentile(step[name], 0.99), 3),
                "cosine": round(float(cosine_similarity(model.rows_BD, plain).min()), 6),
            }
            for name, model in models.items()
        ]

    def _captured(self, batch: DeviceBatch, num_tokens: int) -> Iterator[tuple[str, ReplayedModel]]:
        for name, path in self.paths(num_tokens).items():
            guard()
            try:
                yield name, self.model(path, batch)
            except Exception as error:  # noqa: BLE001  (the other paths are still worth measuring)
                print(f"{name}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
                torch.cuda.synchronize()


Change = Callable[[LayerConfig], LayerConfig]


def candidates(num_tokens: int, early: bool) -> Iterator[tuple[str, Change]]:
    """Ways to change one part of a configuration for about `num_tokens`, with a name each."""
    fields = few_token_candidates(early) if num_tokens <= 1024 else many_token_candidates()
    for field, values in fields.items():
        for value in values:
            yield f"{field} {value}", partial(dataclasses.replace, **{field: value})


def few_token_candidates(early: bool) -> dict[str, Sequence[Any]]:
    """For tens to a thousand tokens."""
    starts = (Early.ALL, Early.RELEASE | Early.EPILOGUE) if early else (Early.NONE,)

    def started(*gemms: GemmConfig) -> list[GemmConfig]:
        return [gemm.starting(start) for gemm, start in itertools.product(gemms, starts)]

    narrow, square = GemmConfig(64, 32, tile_k=128), GemmConfig(64, 64)
    projections = started(
        narrow, dataclasses.replace(narrow, cluster_m=2), square, GemmConfig(64, 64, tile_k=128)
    )
    deferred = (square, GemmConfig(64, 64, cluster_m=2), GemmConfig(64, 128), GemmConfig(128, 64))
    whole = (GemmConfig(64, 128), GemmConfig(128, 128), GemmConfig(128, 128, cluster_m=2))
    wide = (
        GemmConfig(64, 96, cluster_m=2),
        GemmConfig(64, 96),
        GemmConfig(128, 192, cluster_m=2),
        GemmConfig(128, 192),
    )
    return {
        "qkv": [JoinedQkv(g, deferred_norm=True) for g in started(*deferred)]
        + [JoinedQkv(g) for g in started(*whole)],
        "attention": [
            AttentionTile(64, 128, 2),
            AttentionTile(64, 64, 3, early=True),
            AttentionTile(64, 128, 1),
        ],
        "output": [*projections, None],
        "gate_up": started(*wide),
        "down": projections,
    }


def many_token_candidates() -> dict[str, Sequence[Any]]:
    """For thousands of tokens."""

    def pingpong(tile_m: int, tile_n: int, cluster_m: int, cluster_n: int) -> GemmConfig:
        return GemmConfig(tile_m, tile_n, cluster_m, cluster_n, pingpong=True)

    middle = [pingpong(128, 128, 1, 2), pingpong(128, 128, 2, 1), pingpong(128, 192, 2, 1)]
    return {
        "qkv": [
            SplitQkv(pingpong(192, 128, 1, 2), pingpong(192, 128, 1, 2)),
            SplitQkv(pingpong(128, 128, 1, 2), pingpong(128, 128, 1, 2)),
            SplitQkv(pingpong(128, 128, 2, 1), pingpong(128, 128, 2, 1)),
            JoinedQkv(pingpong(128, 128, 1, 2)),
            JoinedQkv(pingpong(192, 128, 1, 2)),
        ],
        "output": [None, *middle],
        "gate_up": [pingpong(128, 192, 1, 2), pingpong(128, 192, 2, 1), pingpong(128, 128, 2, 1)],
        "down": [None, *middle],
    }


class Search:
    """Coordinate search from the table's configuration; stops when a round gains little, or out of time."""

    def __init__(self, bench: Bench, fused: FusedPath, shape: str, seconds: float) -> None:
        self._bench, self._fused, self._shape = bench, fused, shape
        self._batch = random_batch(lengths_of(shape), bench.weights.shape.vocabulary_size)
        self._deadline = time.monotonic() + seconds
        self._num_tokens = sum(lengths_of(shape))
        table = H200_EARLY_CONFIGS if bench.early else H200_CONFIGS
        self._best = fused.with_configs(table).config_for(self._num_tokens)
        self._best_ms = self._time(self._best)

    def run(self) -> list[dict[str, Any]]:
        """The best configuration found, and its time before and after: one row."""
        start_ms = self._best_ms
        while True:
            before_ms = self._best_ms
            self._round()
            if self._best_ms > before_ms * WORTH_A_ROUND or time.monotonic() > self._deadline:
                break
        parts = {field.name: str(getattr(self._best, field.name)) for field in dataclasses.fields(self._best)}
        times = {"start_ms": round(start_ms, 3), "best_ms": round(self._best_ms, 3)}
        return [{"shape": self._shape, **times, **parts}]

    def _round(self) -> None:
        for name, change in candidates(self._num_tokens, self._bench.early):
            if time.monotonic() > self._deadline:
                return
            try:
                config = change(self._best)
            except ValueError:
                continue  # a deferred norm without its attention tile, say
            if config != self._best and (ms := self._time(config)) < self._best_ms * WORTH_IT:
                print(f"  {self._shape} {ms:.3f} ms: {name}", flush=True)
                self._best, self._best_ms = config, ms

    def _time(self, config: LayerConfig) -> float:
        guard()
        try:
            model = self._bench.model(self._fused.with_configs(fixed(config)), self._batch)
            return model.gpu_ms(30)
        except Exception as error:  # noqa: BLE001  (a configuration that does not compile is not chosen)
            print(f"  {type(error).__name__}: {str(error)[-160:]}".replace("\n", " "), flush=True)
            torch.cuda.synchronize()
            return float("inf")


def guard() -> None:
    """End the process, with a traceback, unless the next section calls again in time."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)


def load_fused(weights: StackWeights) -> FusedPath | None:
    """The fused path, or None, saying why."""
    try:
        return FusedPath(weights, configs=H200_CONFIGS)
    except EngineConfigError as error:
        print(f"fused: {error}")
        return None


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", default=",".join(SHAPES))
    add("--rounds", type=int, default=5)
    add("--search", action="store_true", help=f"search configurations for {', '.join(SEARCHED)}")
    add("--search-seconds", type=float, default=100, help="for each shape searched")
    add("--no-early", action="store_true", help="leave the early starts out")
    add("--attention", default="fa4,fa2,triton", help="backends for many tokens, best first")
    return parser.parse_args()


def sections(bench: Bench, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is measured, in order: the kind of its result, and how to get it."""
    for shape in filter(None, arguments.shapes.split(",")):
        yield "steps", partial(bench.measure, shape)
    if arguments.search and bench.fused is not None:
        for shape in SEARCHED:
            yield "searches", Search(bench, bench.fused, shape, arguments.search_seconds).run


def main() -> None:
    """Run the command: every section stands alone, and what there is is written after each."""
    arguments = parse_arguments()
    guard()
    weights = random_stack()
    bench = Bench(
        weights,
        load_fused(weights),
        arguments.rounds,
        early=not arguments.no_early,
        few_tokens=load_backend("triton"),
        many_tokens=first_backend(arguments.attention.split(",")),
    )
    content: dict[str, Any] = {"device": torch.cuda.get_device_name(), "steps": [], "searches": []}
    for kind, run in sections(bench, arguments):
        try:
            rows = run()
        except Exception:  # noqa: BLE001  (the other sections are still worth running)
            traceback.print_exc()
            continue
        content[kind] += rows
        print(report.table(list(rows[0]), (list(row.values()) for row in rows)), flush=True)
        report.write_json("fused", content, Path(os.environ.get("OUT", report.RESULTS)))
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
