"""What runs steps on a CUDA device: the asynchronous runner, with what was measured for this model and card.

Knows a model as something to call, to time, and to hand a decoder plan to; nothing of files or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rose_engine.attention.choice import Attention, fastest_attention, known_attention, single_attention
from rose_engine.calibrate import (
    PLAN_TOKENS,
    Calibration,
    CalibrationCache,
    Timing,
    cache_folder,
    fastest_plan,
    inflection_point,
    key_of,
    log_samples,
    probe_lengths,
    sample,
    saturation_point,
)
from rose_engine.config import ResolvedConfig
from rose_engine.cuda import CudaDevice, CudaGraphRecorder
from rose_engine.cuda_timing import CudaTimer
from rose_engine.errors import EngineConfigError
from rose_engine.graphs import Buckets, Forward
from rose_engine.layers.decoder import PATHS, DecoderPlan, DecoderStack
from rose_engine.layers.fused_build import GemmBuilds, gemm_builds
from rose_engine.models.base import Model, Trunk
from rose_engine.runner import AsyncRunner, RunnerOptions
from rose_engine.stages import stage
from rose_engine.staging import DeviceBatch, StagedBatch
from rose_engine.triton_ahead import triton_build

log = logging.getLogger(__name__)


def prepare(trunk: Trunk, settings: ResolvedConfig) -> None:
    """Begin to compile what a decoder's calibration launches later."""
    stack = decoder_of(trunk)
    if stack is not None and settings.dtype is torch.bfloat16:
        triton_build(stack.shape, settings.device)
        gemm_builds(stack.shape, settings.device)


class CudaRunner(AsyncRunner):
    """A model on one CUDA device, calibrated at start: seconds, once per model, card and software.

    From `saturation_tokens` on more tokens in a batch only add latency; up to `graph_tokens` steps become
    graphs.
    """

    def __init__(self, model: Model, settings: ResolvedConfig) -> None:
        torch.cuda.set_device(settings.device)
        calibration, attention = Calibrator(model, settings).find_or_measure()
        self._settings = settings
        self.attention = attention
        self._calibration = calibration
        self.saturation_tokens = calibration.saturation_tokens
        options = _options(settings, calibration)
        self.graph_tokens = options.graph_tokens
        self.forward = bound(model, attention)
        super().__init__(
            self.forward,
            CudaDevice(settings.device, blocking_sync=settings.blocking_sync),
            CudaGraphRecorder(settings.device),
            options,
            Planner(attention, settings.dtype, Buckets(options.graph_tokens)),
        )

    @property
    def attention_summary(self) -> str:
        """What was chosen for each class of shapes, and why."""
        return self.attention.describe()

    def step_seconds(self, num_tokens: int) -> float | None:
        """What a step of so many tokens takes by the calibration; `None` where an old one does not say."""
        return self._calibration.seconds_of(num_tokens)

    @property
    def batch_tokens(self) -> int:
        """Where batches are cut: at the saturation point, unless the user said where."""
        asked = self._settings.batch_tokens_asked
        return self._settings.max_batch_tokens if asked else self.saturation_tokens


def bound(model: Model, attention: Attention) -> Forward:
    """The model with its attention: a function of the batch alone."""

    def forward(batch: DeviceBatch) -> Tensor:
        return model(batch, attention.bind(batch.layout))

    return forward


def _options(settings: ResolvedConfig, calibration: Calibration) -> RunnerOptions:
    graph_tokens = settings.graph_tokens
    return RunnerOptions(
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_sequences=settings.max_batch_sequences,
        graph_tokens=calibration.inflection_tokens if graph_tokens is None else graph_tokens,
    )


class Planner:
    """FlashInfer's host work before each step; of the other backends there is none."""

    def __init__(self, attention: Attention, dtype: torch.dtype, buckets: Buckets) -> None:
        self._attention = attention
        self._dtype = dtype
        self._buckets = buckets

    def __call__(self, staged: StagedBatch) -> None:
        """Plan one step."""
        if self._attention.plans:
            captured = self._buckets.captures(staged.layout)
            self._attention.plan(staged.inputs.layout, staged.cu_lengths, self._dtype, captured=captured)


class Calibrator:
    """Measures one model on its device, or finds what an earlier start measured."""

    def __init__(self, model: Model, settings: ResolvedConfig) -> None:
        self._model = model
        self._settings = settings
        self._timer = CudaTimer(settings.device, model.facts.vocabulary_size)
        self._cache = CalibrationCache(cache_folder())

    def find_or_measure(self) -> tuple[Calibration, Attention]:
        """The calibration, and the attention it chose; the decoder, if there is one, has adopted its plan."""
        key = self._key()
        builds = self._start_builds()
        with stage("earlier calibration"):
            known = self._cache.find(key)
            attention = None if known is None else self._adopt(known, builds)
        if known is not None and attention is not None:
            return known, attention
        with stage("attention backends"):
            attention = self._choose_attention()
        calibration = self._measure(attention, builds)
        if builds is not None:
            triton_build(builds.shape, self._settings.device).end()
        self._cache.store(key, calibration)
        return calibration, attention

    def _start_builds(self) -> GemmBuilds | None:
        """Compile what the decoder's fused path needs in the background, if there is such a path here."""
        stack = decoder_of(self._model.trunk)
        if stack is None or self._settings.dtype is not torch.bfloat16:
            return None
        return gemm_builds(stack.shape, self._settings.device)

    def _key(self) -> str:
        settings, facts = self._settings, self._model.facts
        parameters = [(name, tuple(p.shape), p.dtype) for name, p in self._model.trunk.named_parameters()]
        asked = settings.attention.backend.name if settings.attention.asked else None
        card = torch.cuda.get_device_name(settings.device)
        return key_of((parameters, facts, asked, settings.max_batch_tokens), card)

    def _adopt(self, known: Calibration, builds: GemmBuilds | None) -> Attention | None:
        """Do as `known` says; `None` if a library that it names has gone."""
        attention = known_attention(known.attention, self._settings.dtype, self._settings.device)
        if attention is not None and (stack := decoder_of(self._model.trunk)) is not None:
            plan = known.plan or stack.plan
            try:
                stack.adopt(plan)
            except EngineConfigError as error:
                log.info("measuring again: %s", error)
                return None
            if "fused" in plan.paths and builds is not None:
                builds.wait()
        return attention

    def _choose_attention(self) -> Attention:
        settings, specs = self._settings, self._model.facts.attention_specs
        if settings.attention.asked:
            return single_attention(settings.attention, specs)
        return fastest_attention(
            specs,
            settings.dtype,
            settings.device,
            lambda backend, spec, shapes: self._timer.attention(
                backend, spec, shapes.example, settings.dtype
            ),
        )

    def _measure(self, attention: Attention, builds: GemmBuilds | None) -> Calibration:
        plan, timed = self._choose_plan(attention, builds)
        counts = self._settings.max_batch_tokens, self._model.facts.max_length
        with stage("samples"):
            samples = sample(lambda lengths: self._time(attention, lengths), *counts, timed)
        log_samples(samples)
        inflection = inflection_point(samples, self._settings.max_batch_tokens)
        seconds = {tokens: max(t.device_seconds, t.launch_seconds) for tokens, t in samples.items()}
        return Calibration(inflection, saturation_point(samples), attention.choices, plan, seconds)

    def _choose_plan(
        self, attention: Attention, builds: GemmBuilds | None
    ) -> tuple[DecoderPlan | None, dict[int, Timing]]:
        """Time every path of the decoder that can be had, and adopt the plan of the fastest.

        The plan, and the timing of each token count's winner. The fused path comes last (see `PATHS`), when
        its GEMMs have had the time to be compiled.
        """
        if (stack := decoder_of(self._model.trunk)) is None:
            return None, {}
        counts = [tokens for tokens in PLAN_TOKENS if tokens <= self._settings.max_batch_tokens]
        timings: dict[int, dict[str, Timing]] = {tokens: {} for tokens in counts}
        for name in filter(partial(_available, stack), PATHS):
            if name == "fused" and builds is not None:
                builds.wait()
            try:
                times = self._time_path(name, attention, counts)
            except Exception as error:  # noqa: BLE001  a path whose kernels do not compile is out, no more
                log.warning("decoder path %s failed: %s", name, error)
                continue
            for tokens, timing in times.items():
                timings[tokens][name] = timing
        plan = fastest_plan(
            {tokens: {n: t.device_seconds for n, t in paths.items()} for tokens, paths in timings.items()}
        )
        stack.adopt(plan)
        log.info("decoder paths: %s, then %s", plan.up_to, plan.above)
        return plan, {tokens: timings[tokens][plan.path_for(tokens)] for tokens in counts}

    def _time_path(self, name: str, attention: Attention, counts: Sequence[int]) -> dict[int, Timing]:
        times = {}
        with stage(f"decoder path {name}"):
            for tokens in counts:
                times[tokens] = self._time(attention, probe_lengths(tokens, self._model.facts.max_length))
                milliseconds = 1e3 * times[tokens].device_seconds
                log.info("decoder path %s, %d tokens: %.3f ms", name, tokens, milliseconds)
        return times

    def _time(self, attention: Attention, lengths: tuple[int, ...]) -> Timing:
        batch = self._timer.random_batch(lengths)
        cu_lengths = batch.layout.cu_lengths.cpu().numpy()
        attention.plan(batch.layout, cu_lengths, self._settings.dtype, captured=False)
        return self._timer.forward(bound(self._model, attention), batch)


def decoder_of(trunk: Trunk) -> DecoderStack | None:
    """The decoder stack inside a trunk, if it is one of those."""
    return next((module for module in trunk.modules() if isinstance(module, DecoderStack)), None)


def _available(stack: DecoderStack, name: str) -> bool:
    """Whether the path can be had; the stack then runs by it alone."""
    try:
        with stage(f"loading path {name}"):
            stack.adopt(DecoderPlan(above=name))
    except EngineConfigError as error:
        log.info("%s", error)
        return False
    return True
