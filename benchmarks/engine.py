"""The engine alone on one CUDA device: a Qwen3-0.6B-shaped encoder, random weights, bf16.

    python -m benchmarks.engine [--out DIR] [--sections check steps attention mixed sync] [--quick]

Checks the rows against plain float32 first. A step is what a server does: host ids in, host rows out. Each
section and each row stands alone: what fails is reported and the rest goes on.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.random_qwen3 import Floor, RandomQwen3, random_qwen3
from rose_engine.attention import choose_backend
from rose_engine.attention.base import AttentionBackend, AttentionSpec, RaggedLayout
from rose_engine.attention.choice import loadable
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.batch import Batch
from rose_engine.batch import Sequence as TokenSequence
from rose_engine.config import ResolvedConfig
from rose_engine.cuda import CudaGraphRecorder
from rose_engine.cuda_runner import CudaRunner
from rose_engine.cuda_timing import CudaTimer
from rose_engine.lazy_tensor import LazyTensor
from rose_engine.staging import DeviceBatch

SHAPES: tuple[tuple[int, int], ...] = (
    (1, 32),
    (1, 128),
    (1, 512),
    (16, 32),
    (5, 512),
    (1, 4096),
    (25, 512),
    (50, 512),
    (32, 1024),
    (16, 4096),
)
CHECKED: tuple[tuple[int, ...], ...] = (
    (7, 128, 300, 64),
    (1,),
    (64,),
    (1, 1, 1),
    (512,),
    (512,) * 5,
    (700,) * 6,
)
ATTENTION_SHAPES: tuple[tuple[int, ...], ...] = (
    (32,),
    (128,),
    (512,),
    (4096,),
    (32,) * 16,
    (512,) * 25,
    (4096,) * 8,
)
ATTENTION_SPECS = {
    "16/8 x 128 causal": AttentionSpec(16, 8, 128, 128**-0.5, (-1, 0)),
    "16/8 x 128 full": AttentionSpec(16, 8, 128, 128**-0.5, (-1, -1)),
    "16/16 x 64 full": AttentionSpec(16, 16, 64, 64**-0.5, (-1, -1)),
    "12/12 x 64 local 64": AttentionSpec(12, 12, 64, 64**-0.5, (64, 64)),
}
MIN_COSINE = 0.999
DEPTH = 2
MAX_TOKENS = 65_536

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One shape: milliseconds unless named otherwise."""

    shape: str
    tokens: int
    p50: float
    p90: float
    p99: float
    max: float
    gpu: float
    floor: float
    gpu_over_floor: float
    launches: int
    cpu_us: float  # of one hot `step` call
    capture: float
    eager_launch: float
    tokens_per_second: float  # two steps in flight
    would_replay: bool


class Bench:
    """The model, its runner, and what the sections share."""

    def __init__(self, out: Path, quick: bool) -> None:
        self.out = out
        self.quick = quick
        self.device = torch.device("cuda", 0)
        self.random: RandomQwen3 = random_qwen3(self.device, torch.bfloat16)
        specs = self.random.model.facts.attention_specs
        self.settings = ResolvedConfig(
            device=self.device,
            dtype=torch.bfloat16,
            attention=choose_backend("auto", specs, torch.bfloat16, self.device),
            max_batch_tokens=MAX_TOKENS,
            max_batch_sequences=256,
            threads=1,
        )
        started = time.perf_counter()
        self.runner = CudaRunner(self.random.model, self.settings)
        self.start_seconds = time.perf_counter() - started
        self.timer = CudaTimer(self.device, 100_000)

    def device_batch(self, lengths: tuple[int, ...]) -> DeviceBatch:
        """Random ids on the device, planned for the backends that plan."""
        batch = self.timer.random_batch(lengths)
        cu_lengths = batch.layout.cu_lengths.cpu().numpy()
        self.runner.attention.plan(batch.layout, cu_lengths, torch.bfloat16, captured=True)
        return batch

    def repeats(self, tokens: int) -> int:
        """Enough for a p99 where steps are short."""
        many = 300 if tokens <= 4096 else 40 if tokens <= 26_000 else 15
        return max(5, many // 10) if self.quick else many


def batch_of(lengths: Sequence[int], seed: int = 0) -> Batch:
    """Random ids."""
    rng = np.random.default_rng(seed)
    return Batch.pack(TokenSequence(rng.integers(0, 150_000, n, dtype=np.int32)) for n in lengths)


def check(bench: Bench) -> Rows:
    """Cosine to float32, worst row, for the eager run, the capture and the replay of each layout."""
    return [_attempt({"lengths": _short(lengths)}, lambda n=lengths: _check(bench, n)) for lengths in CHECKED]


def _check(bench: Bench, lengths: tuple[int, ...]) -> dict[str, Any]:
    batch = batch_of(lengths, seed=len(lengths))
    ids = torch.split(torch.from_numpy(batch.token_ids_T).to(bench.device), list(lengths))
    expected = bench.random.reference.rows(ids).cpu().numpy()
    passes = [bench.runner.step(batch).result() for _ in range(3)]
    worst = [float((rows * expected).sum(1).min()) for rows in passes]
    assert min(worst) >= MIN_COSINE, f"cosine {worst}"
    same = bool((passes[1] == passes[2]).all())
    eager = float(np.abs(passes[0] - passes[2]).max())
    return {"cosine": min(worst), "replays_equal": same, "eager_to_replay": eager}


def steps(bench: Bench) -> Rows:
    """The table of shapes."""
    return [
        _attempt({"shape": f"{count} x {length}"}, lambda n=(length,) * count: asdict(_step_row(bench, n)))
        for count, length in SHAPES
    ]


def _step_row(bench: Bench, lengths: tuple[int, ...]) -> StepRow:
    batch, tokens = batch_of(lengths), sum(lengths)
    count = bench.repeats(tokens)
    for _ in range(4):
        bench.runner.step(batch).result()
    wall = [1e3 * _seconds(lambda: bench.runner.step(batch).result()) for _ in range(count)]
    gpu, capture = _graph_ms(bench, lengths, min(count, 50))
    floor = 1e3 * Floor().seconds(lengths)
    eager = bench.timer.forward(bench.runner.forward, bench.device_batch(lengths))
    return StepRow(
        shape=f"{len(lengths)} x {lengths[0]}",
        tokens=tokens,
        p50=report.percentile(wall, 0.5),
        p90=report.percentile(wall, 0.9),
        p99=report.percentile(wall, 0.99),
        max=max(wall),
        gpu=gpu,
        floor=floor,
        gpu_over_floor=gpu / floor,
        launches=_attempt({"launches": -1}, lambda: {"launches": _launches(bench, lengths)})["launches"],
        cpu_us=1e6 * _hot_cpu_seconds(bench.runner, batch, min(count, 100)),
        capture=capture,
        eager_launch=1e3 * eager.launch_seconds,
        tokens_per_second=tokens / _overlapped_seconds(bench.runner, batch, count),
        would_replay=not bench.runner.would_block(batch),
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _hot_cpu_seconds(runner: CudaRunner, batch: Batch, count: int) -> float:
    """Median time of the call alone, the device idle before it."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        rows = runner.step(batch)
        taken.append(time.perf_counter() - start)
        rows.result()
    return statistics.median(taken)


def _overlapped_seconds(runner: CudaRunner, batch: Batch, count: int) -> float:
    """Seconds a step with two in flight."""
    in_flight: deque[LazyTensor] = deque()
    start = time.perf_counter()
    for _ in range(count):
        if len(in_flight) == DEPTH:
            in_flight.popleft().result()
        in_flight.append(runner.step(batch))
    while in_flight:
        in_flight.popleft().result()
    return (time.perf_counter() - start) / count


@torch.inference_mode()
def _graph_ms(bench: Bench, lengths: tuple[int, ...], count: int) -> tuple[float, float]:
    """Milliseconds of one replay on the device, and of the capture."""
    batch = bench.device_batch(lengths)
    batch = replace(batch, layout=replace(batch.layout, lengths=None))
    recorder = CudaGraphRecorder(bench.device)
    bench.runner.forward(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph = recorder.capture(lambda: bench.runner.forward(batch))
    capture = 1e3 * (time.perf_counter() - start)
    taken = []
    for _ in range(count + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[3:]), capture


@torch.inference_mode()
def _launches(bench: Bench, lengths: tuple[int, ...]) -> int:
    """Kernels and copies on the device in one forward pass."""
    forward, batch = bench.runner.forward, bench.device_batch(lengths)
    forward(batch)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        forward(batch)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(1 for event in profile.events() if event.device_type == on_device)


def attention(bench: Bench) -> Rows:
    """Microseconds a call, every backend that can, and whether a NaN in one sequence stays there."""
    rows: Rows = []
    for label, spec in ATTENTION_SPECS.items():
        for name, backend in loadable().items():
            if refusal := backend.refusal(spec, torch.bfloat16, bench.device):
                rows.append({"spec": label, "backend": name, "refusal": refusal})
                continue
            row: dict[str, Any] = {"spec": label, "backend": name}
            for lengths in ATTENTION_SHAPES:
                if name != "sdpa" or sum(lengths) <= 4096:
                    row |= _attempt({}, lambda b=backend, s=spec, n=lengths: _attention_cell(bench, b, s, n))
            rows.append(row | _attempt({}, lambda b=backend, s=spec: _isolation(bench, b, s)))
    return rows


def _attention_cell(
    bench: Bench, backend: AttentionBackend, spec: AttentionSpec, lengths: tuple[int, ...]
) -> dict[str, Any]:
    seconds = bench.timer.attention(backend, spec, lengths, torch.bfloat16)
    return {_short(lengths): round(1e6 * seconds, 2)}


@torch.inference_mode()
def _isolation(bench: Bench, backend: AttentionBackend, spec: AttentionSpec) -> dict[str, Any]:
    """Values of NaN in the middle of three sequences must not reach the others."""
    lengths = (37, 50, 41)
    cu = torch.tensor([0, 37, 87, 128], dtype=torch.int32, device=bench.device)
    layout = RaggedLayout(cu, 64, 3, lengths)
    if isinstance(backend, FlashInferBackend):
        backend.plan(layout, cu.cpu().numpy(), spec, torch.bfloat16, captured=False)
    q, k, v = (
        torch.randn(128, n, spec.head_dim, device=bench.device, dtype=torch.bfloat16)
        for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    expected = SdpaBackend().bind(layout)(q, k, v, spec)
    error = (backend.bind(layout)(q, k, v, spec).float() - expected.float()).abs().max().item()
    v[37:87] = float("nan")
    out = backend.bind(layout)(q, k, v, spec)
    isolated = bool(out[:37].isfinite().all() and out[87:].isfinite().all())
    return {"error_to_sdpa": round(error, 5), "nan_isolated": isolated}


def mixed(bench: Bench) -> Rows:
    """Random small batches, as queries come: the first pass finds new shapes, the later ones replay."""
    rng = np.random.default_rng(1)
    batches = [batch_of(rng.integers(4, 200, rng.integers(1, 9)), seed) for seed in range(200)]
    rows: Rows = []
    for number in range(3):
        before = asdict(bench.runner.counters)
        wall = [1e3 * _seconds(lambda b=batch: bench.runner.step(b).result()) for batch in batches]
        after = asdict(bench.runner.counters)
        rows.append(
            {
                "pass": number + 1,
                "p50": report.percentile(wall, 0.5),
                "p99": report.percentile(wall, 0.99),
                "max": max(wall),
                **{name: after[name] - before[name] for name in ("eager", "captured", "replayed", "evicted")},
                "graph_mib": after["num_bytes"] >> 20,
            }
        )
    return rows


def sync(bench: Bench) -> Rows:
    """Waiting by spinning against waiting asleep, for the caller and for a callback."""
    rows: Rows = []
    for blocking in (False, True):
        runner = CudaRunner(bench.random.model, replace(bench.settings, blocking_sync=blocking))
        for tokens in (128, 512):
            batch = batch_of((tokens,))
            for _ in range(4):
                runner.step(batch).result()
            wall = [1e3 * _seconds(lambda b=batch, r=runner: r.step(b).result()) for _ in range(200)]
            called = [1e3 * _callback_seconds(runner, batch) for _ in range(200)]
            rows.append(
                {
                    "blocking_sync": blocking,
                    "tokens": tokens,
                    "result_p50": report.percentile(wall, 0.5),
                    "result_p99": report.percentile(wall, 0.99),
                    "callback_p50": report.percentile(called, 0.5),
                    "callback_p99": report.percentile(called, 0.99),
                }
            )
        runner.close()
    return rows


def _callback_seconds(runner: CudaRunner, batch: Batch) -> float:
    """From `step` to the callback of the watcher's thread."""
    arrived: list[float] = []
    start = time.perf_counter()
    rows = runner.step(batch)
    rows.add_done_callback(lambda _: arrived.append(time.perf_counter()))
    rows.result()
    while not arrived:
        time.sleep(0)
    return arrived[0] - start


def plot(rows: Rows, file: Path) -> None:
    """Device and wall time against tokens, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = sorted((row for row in rows if "gpu" in row), key=lambda row: row["tokens"])
    tokens = [row["tokens"] for row in good]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for key, label, style in (("p50", "step, p50", "o-"), ("gpu", "device", "s-"), ("floor", "floor", "k--")):
        axes.plot(tokens, [row[key] for row in good], style, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens in a batch", ylabel="ms", title="Qwen3-0.6B shape, bf16"
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


SECTIONS: dict[str, Callable[[Bench], Rows]] = {
    "check": check,
    "steps": steps,
    "mixed": mixed,
    "sync": sync,
    "attention": attention,
}


def _attempt(known: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return known | run()
    except Exception as error:  # noqa: BLE001  one row's failure must not lose the others
        traceback.print_exc()
        return known | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _short(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    return "+".join(map(str, lengths))


def _table(rows: Rows) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row))
    return report.table(header, ([_cell(row.get(key, "")) for key in header] for row in rows))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else _whole(value)


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the sections, write JSON and a picture, print the tables last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d ms %(message)s")
    bench = Bench(args.out, args.quick)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "attention": bench.runner.attention_summary,
        "saturation_tokens": bench.runner.saturation_tokens,
        "graph_tokens": bench.runner.graph_tokens,
        "start_seconds": round(bench.start_seconds, 2),
    }
    for name in args.sections:
        started = time.perf_counter()
        try:
            results[name] = SECTIONS[name](bench)
        except Exception as error:  # noqa: BLE001  nor one section's the rest
            traceback.print_exc()
            results[name] = [{"error": f"{type(error).__name__}: {str(error)[:300]}"}]
        print(f"-- {name}: {time.perf_counter() - started:.1f} s", flush=True)
        report.write_json("engine", results, args.out)  # after each: a crash later loses nothing
    if "steps" in results:
        _attempt({}, lambda: {"plot": plot(results["steps"], args.out / "engine.png")})
    for name in args.sections:
        print(f"\n{name}\n{_table(results[name])}")
    print({key: value for key, value in results.items() if not isinstance(value, list)})
    bench.runner.close()


if __name__ == "__main__":
    main()
