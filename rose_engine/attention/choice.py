"""Which backend does a model's attention: the one asked for, or the fastest for each spec and shape class.

Knows how to choose, not how to measure: that is handed in. Says what it chose and why, in one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rose_engine.attention import BACKENDS, BackendChoice, load_backend
from rose_engine.attention.base import Attend, AttentionBackend, AttentionSpec, RaggedLayout
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.batch import Int32Array
from rose_engine.errors import EngineConfigError

log = logging.getLogger(__name__)


class ShapeClass(Enum):
    """Shapes among which one backend tends to stay the fastest."""

    FEW = "few tokens"
    LONG = "long sequences"
    MANY = "many sequences"

    @classmethod
    def of(cls, layout: RaggedLayout) -> ShapeClass:
        """The class of a padded layout; the bounds come from measurements on one H200."""
        if layout.max_length > 1024:
            return cls.LONG
        return cls.FEW if layout.num_sequences * layout.max_length <= 1024 else cls.MANY

    @property
    def example(self) -> tuple[int, ...]:
        """Lengths to measure the class by."""
        return {ShapeClass.FEW: (256,), ShapeClass.LONG: (4096,), ShapeClass.MANY: (512,) * 25}[self]


# A backend that is not tried, nor even imported, where the one beside it serves. fa4 imports a compiler and
# compiles, seconds of a first start; on a Hopper card, the only one where fa3 serves, the faster of fa3 and
# triton left it behind in every class (benchmarks/LOG.md, "Attention backends, microseconds a call").
OUTRUN_BY: dict[str, str] = {"fa4": "fa3"}

Choices = Mapping[tuple[AttentionSpec, ShapeClass], str]
Measure = Callable[[AttentionBackend, AttentionSpec, ShapeClass], float]  # seconds of one call


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The backends chosen for one model; stands where a single backend could."""

    backends: Mapping[str, AttentionBackend]
    choices: Choices
    reason: str

    def bind(self, layout: RaggedLayout) -> Attend:
        """The attention function for one layout; each spec goes to its own backend."""
        shape_class = ShapeClass.of(layout)
        bound = {name: backend.bind(layout) for name, backend in self.backends.items()}

        def attend(q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, spec: AttentionSpec) -> Tensor:
            return bound[self.choices[spec, shape_class]](q_TNH, k_TMH, v_TMH, spec)

        return attend

    def plan(
        self, layout: RaggedLayout, cu_lengths: Int32Array, dtype: torch.dtype, *, captured: bool
    ) -> None:
        """Host work before a step, for the backends that need some; see `FlashInferBackend.plan`."""
        shape_class = ShapeClass.of(layout)
        for (spec, of_class), name in self.choices.items():
            backend = self.backends[name]
            if of_class is shape_class and isinstance(backend, FlashInferBackend):
                backend.plan(layout, cu_lengths, spec, dtype, captured=captured)

    @property
    def plans(self) -> bool:
        """Whether any backend needs `plan`."""
        return any(isinstance(backend, FlashInferBackend) for backend in self.backends.values())

    def describe(self) -> str:
        """What was chosen and why, as `Describe` shows it."""
        names = {shape_class: self._names(shape_class) for shape_class in ShapeClass}
        if len(set(names.values())) == 1:
            return f"{names[ShapeClass.FEW]} ({self.reason})"
        return "; ".join(f"{names[c]} for {c.value}" for c in ShapeClass) + f" ({self.reason})"

    def _names(self, shape_class: ShapeClass) -> str:
        chosen = (name for (_, of_class), name in self.choices.items() if of_class is shape_class)
        return " + ".join(dict.fromkeys(chosen))


def single_attention(choice: BackendChoice, specs: Iterable[AttentionSpec]) -> Attention:
    """One backend for everything."""
    name = choice.backend.name
    return _attention(dict.fromkeys(_keys(specs), name), {name: choice.backend}, choice.why)


def fastest_attention(
    specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device, measure: Measure
) -> Attention:
    """For each spec and class of shapes the backend that `measure` finds the fastest.

    Of `OUTRUN_BY`'s backends only those whose better one cannot serve all `specs` are tried.
    """
    specs = tuple(specs)
    backends = loadable(lambda backend: all(_able(backend, spec, dtype, device) for spec in specs))
    choices = {}
    for spec, shape_class in _keys(specs):
        able = {n: b for n, b in backends.items() if _able(b, spec, dtype, device)}
        choices[spec, shape_class] = _fastest(able, spec, shape_class, measure)
    return _attention(choices, backends, "the fastest measured on this device")


def known_attention(choices: Choices, dtype: torch.dtype, device: torch.device) -> Attention | None:
    """Choices made by an earlier start; `None` if a backend has gone missing or refuses by now."""
    try:
        backends = {name: load_backend(name) for name in set(choices.values())}
    except EngineConfigError:
        return None
    if any(backends[name].refusal(spec, dtype, device) for (spec, _), name in choices.items()):
        return None
    return _attention(choices, backends, "measured at an earlier start")


def loadable(serves: Callable[[AttentionBackend], bool] = lambda _: False) -> dict[str, AttentionBackend]:
    """Every registered backend whose library is installed, but those that one which `serves` outruns."""
    found: dict[str, AttentionBackend] = {}
    for name in BACKENDS:
        better = found.get(OUTRUN_BY.get(name, ""))
        if better is not None and serves(better):
            log.info("attention backend %s is not tried: %s serves", name, better.name)
            continue
        try:
            found[name] = load_backend(name)
        except EngineConfigError as error:
            log.info("%s", error)
    return found


def _attention(choices: Choices, backends: Mapping[str, AttentionBackend], reason: str) -> Attention:
    used = {name: backends[name] for name in dict.fromkeys(choices.values())}
    attention = Attention(used, choices, reason)
    log.info("attention: %s", attention.describe())
    return attention


def _keys(specs: Iterable[AttentionSpec]) -> list[tuple[AttentionSpec, ShapeClass]]:
    return [(spec, shape_class) for spec in specs for shape_class in ShapeClass]


def _able(backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> bool:
    if refusal := backend.refusal(spec, dtype, device):
        log.info("attention backend %s is out for %s: %s", backend.name, spec, refusal)
        return False
    return True


def _fastest(
    backends: Mapping[str, AttentionBackend], spec: AttentionSpec, shape_class: ShapeClass, measure: Measure
) -> str:
    seconds = {}
    for name, backend in backends.items():
        try:
            seconds[name] = measure(backend, spec, shape_class)
        except Exception as error:  # noqa: BLE001  whatever a library raises, another may work
            log.warning("attention backend %s failed on %s: %s", name, shape_class.value, error)
    if not seconds:
        raise EngineConfigError(f"no attention backend works for {spec}")
    times = ", ".join(
        f"{name} {1e6 * time:.1f} us" for name, time in sorted(seconds.items(), key=lambda i: i[1])
    )
    log.info("attention, %s, %s: %s", spec, shape_class.value, times)
    return min(seconds, key=seconds.__getitem__)
