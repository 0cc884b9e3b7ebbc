"""The engine: load a model once, then one call, `step(batch) -> LazyTensor`.

Knows nothing of text, gRPC or asyncio, and of devices only the name of the module that runs steps on them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Protocol

from rose_engine.batch import Batch
from rose_engine.config import EngineConfig, ResolvedConfig, resolve
from rose_engine.description import ModelDescription
from rose_engine.errors import EngineConfigError
from rose_engine.lazy_tensor import LazyTensor
from rose_engine.limits import EngineLimits
from rose_engine.model_source import ModelSource
from rose_engine.models.base import Model, Trunk
from rose_engine.stages import stage
from rose_engine.step_counters import StepCounters

# Type of device -> "module:Class" of what runs steps on it.
RUNNERS: dict[str, str] = {
    "cpu": "rose_engine.cpu:CpuRunner",
    "cuda": "rose_engine.cuda_runner:CudaRunner",
}


class Runner(Protocol):
    """What runs steps on one type of device; made from a model and the resolved settings."""

    @property
    def attention_summary(self) -> str:
        """The attention backend in use, and why."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Where batches are best cut: more tokens only add latency. A longer single sequence still fits."""
        ...

    @property
    def polled(self) -> bool:
        """Whether results are had soonest by asking for them: their callbacks cost a thread that waits."""
        ...

    @property
    def counters(self) -> StepCounters:
        """What became of the steps so far."""
        ...

    def step(self, batch: Batch) -> LazyTensor:
        """Queue `batch` without waiting for the device."""
        ...

    def would_block(self, batch: Batch) -> bool:
        """Whether `step` would hold up its caller all the same (a first sight, a capture)."""
        ...

    def may_compile(self, batch: Batch) -> bool:
        """Whether a step that would block may compile or capture: seconds, where others take milliseconds."""
        ...

    def step_seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens takes, where that was measured."""
        ...

    def close(self) -> None:
        """Finish what was queued and give everything back; a second call changes nothing."""
        ...


class Engine:
    """A loaded model. One thread at a time calls `step`; `close` comes last."""

    def __init__(self, runner: Runner, description: ModelDescription, limits: EngineLimits) -> None:
        self.description = description
        self.limits = limits
        self._runner = runner

    @classmethod
    def load(cls, config: EngineConfig) -> Engine:
        """Read, check and load the model, and start what runs it.

        Raises `CheckpointError` (the folder) or `EngineConfigError` (a setting); both name what is wrong.
        """
        with stage("settings"):
            source = ModelSource.read(config.model, config.task)
            settings = resolve(config, source.max_length, source.facts.attention_specs)
        with ThreadPoolExecutor(1, "hash") as pool:  # a long look at the weights, and nobody waits for it yet
            weights_hash = pool.submit(source.weights_hash, settings.dtype)
            with stage("weights"):
                model = source.load(settings.dtype, settings.device, partial(_prepare, settings))
            with stage("runner"):
                runner = _start_runner(model, settings)
            try:
                description = _describe(source, settings, runner, weights_hash.result())
            except BaseException:
                runner.close()
                raise
        limits = replace(_limits(source, settings), max_batch_tokens=runner.batch_tokens)
        return cls(runner, description, limits)

    def step(self, batch: Batch) -> LazyTensor:
        """Queue `batch`, of sequences and size within `limits`; its rows `[R, D]` arrive later.

        Never waits for the device. What ends the step early is a `StepError` from `result()`.
        """
        assert batch.num_tokens <= max(self.limits.max_batch_tokens, self.limits.max_length)
        assert batch.num_sequences <= self.limits.max_batch_sequences
        return self._runner.step(batch)

    def would_block(self, batch: Batch) -> bool:
        """Whether `step(batch)` would hold up its caller: call it from a thread that may wait."""
        return self._runner.would_block(batch)

    def may_compile(self, batch: Batch) -> bool:
        """Whether a step that would block may compile or capture: seconds, where others take milliseconds."""
        return self._runner.may_compile(batch)

    def step_seconds(self, num_tokens: int) -> float | None:
        """Seconds of a step of so many tokens by the calibration; `None` where there was none."""
        return self._runner.step_seconds(num_tokens)

    @property
    def polled(self) -> bool:
        """Whether results are had soonest by asking `ready()`: their callbacks cost a thread that waits."""
        return self._runner.polled

    @property
    def counters(self) -> StepCounters:
        """What became of the steps so far."""
        return self._runner.counters

    def close(self) -> None:
        """Finish what was queued and give everything back; a second call changes nothing."""
        self._runner.close()


def _prepare(settings: ResolvedConfig, trunk: Trunk) -> None:
    """Begin what needs no weights, so that it is done while they load."""
    if settings.device.type == "cuda":
        import_module("rose_engine.cuda_runner").prepare(trunk, settings)


def _start_runner(model: Model, settings: ResolvedConfig) -> Runner:
    kind = settings.device.type
    if kind not in RUNNERS:
        raise EngineConfigError(f"device {kind!r} is not supported; supported are {', '.join(RUNNERS)}")
    module, _, attribute = RUNNERS[kind].partition(":")
    runner: Runner = getattr(import_module(module), attribute)(model, settings)
    return runner


def _describe(
    source: ModelSource, settings: ResolvedConfig, runner: Runner, weights_hash: str
) -> ModelDescription:
    dtype = str(settings.dtype).removeprefix("torch.")
    return ModelDescription(
        model_id=source.folder.resolve().name,
        task=source.task,
        dimensions=source.dimensions,
        hidden_size=source.facts.hidden_size,
        row_dtype="int8" if source.chain.quantize else "float32",
        pooling="+".join(source.chain.pooling),
        normalized=source.chain.normalize,
        dtype=dtype,
        device=str(settings.device),
        attention_backend=runner.attention_summary,
        weights_hash=weights_hash,
        tokenizer_file=source.tokenizer_file,
    )


def _limits(source: ModelSource, settings: ResolvedConfig) -> EngineLimits:
    return EngineLimits(
        max_length=source.max_length,
        vocabulary_size=source.facts.vocabulary_size,
        num_segments=source.facts.num_segments,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_sequences=settings.max_batch_sequences,
    )
