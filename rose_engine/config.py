"""What a user may set, and what it resolves to on this machine for this model.

Knows nothing of files; every `auto` is decided here, in one place, and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rose_engine.attention import BackendChoice, choose_backend
from rose_engine.attention.base import AttentionSpec
from rose_engine.errors import EngineConfigError

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,  # families whose activations leave its range refuse it
}
_AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}

# A CPU is busy with a few hundred tokens already: more of them in a batch only make all wait for the last.
# 4096 keeps a client's batch of 32 short passages in one piece. A GPU needs far more to be busy.
_AUTO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16_384}
_AUTO_BATCH_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to serve and how; "auto" and `None` leave the choice to the engine."""

    model: Path  # a folder
    task: str = "auto"  # embed, score; auto: what the model's files say
    device: str = "auto"  # cpu, cuda, cuda:0 ...
    dtype: str = "auto"  # of weights and computation: float32, bfloat16, float16
    attention: str = "auto"  # name of a backend
    max_batch_tokens: int | None = None
    max_batch_sequences: int | None = None
    threads: int | None = None  # of one forward pass on the CPU
    graph_tokens: int | None = None  # CUDA: the most tokens of a captured step; None: measured; 0: no graphs
    blocking_sync: bool = False  # CUDA: waiting threads sleep instead of spin


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """`EngineConfig` with nothing left to choose."""

    device: torch.device
    dtype: torch.dtype
    attention: BackendChoice
    max_batch_tokens: int  # at least the model's maximum length: every single sequence fits
    max_batch_sequences: int
    threads: int
    batch_tokens_asked: bool = False  # whether the user said max_batch_tokens
    graph_tokens: int | None = None  # None: measured at start
    blocking_sync: bool = False


def resolve(config: EngineConfig, max_length: int, specs: Iterable[AttentionSpec]) -> ResolvedConfig:
    """Decide what `config` leaves open for a model of `max_length` tokens with these attention `specs`.

    Raises `EngineConfigError`, naming setting and value, for what this machine or model cannot do.
    """
    device = _resolve_device(config.device)
    dtype = _resolve_dtype(config.dtype, device)
    resolved = ResolvedConfig(
        device=device,
        dtype=dtype,
        attention=choose_backend(config.attention, specs, dtype, device),
        max_batch_tokens=_resolve_batch_tokens(config.max_batch_tokens, device, max_length),
        max_batch_sequences=_at_least_one(
            "max_batch_sequences", config.max_batch_sequences, _AUTO_BATCH_SEQUENCES
        ),
        threads=_at_least_one("threads", config.threads, torch.get_num_threads()),
        batch_tokens_asked=config.max_batch_tokens is not None,
        graph_tokens=config.graph_tokens,
        blocking_sync=config.blocking_sync,
    )
    logger.info(
        "%s: device %s, dtype %s, attention %s, batches of at most %d tokens and %d sequences, %d threads",
        config.model.name,
        resolved.device,
        resolved.dtype,
        resolved.attention,
        resolved.max_batch_tokens,
        resolved.max_batch_sequences,
        resolved.threads,
    )
    return resolved


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in _AUTO_DTYPES or (index and not index.isdecimal()):
        raise EngineConfigError(f"device {name!r} is unknown; known are auto, cpu, cuda, cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if int(index or 0) >= torch.cuda.device_count():
        raise EngineConfigError(f"device {name!r}: {torch.cuda.device_count()} CUDA devices on this machine")
    return torch.device("cuda", int(index or 0))


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = _AUTO_DTYPES[device.type]
    if name not in DTYPES:
        raise EngineConfigError(f"dtype {name!r} is unknown; known are auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise EngineConfigError("dtype 'float16' is for CUDA devices; use float32 or bfloat16 on the CPU")
    return DTYPES[name]


def _resolve_batch_tokens(asked: int | None, device: torch.device, max_length: int) -> int:
    if asked is None:
        return max(_AUTO_BATCH_TOKENS[device.type], max_length)
    if asked < max_length:
        raise EngineConfigError(
            f"max_batch_tokens {asked}: a single sequence may have {max_length} tokens and must fit"
        )
    return asked


def _at_least_one(setting: str, asked: int | None, otherwise: int) -> int:
    if asked is None:
        return otherwise
    if asked < 1:
        raise EngineConfigError(f"{setting} {asked}: must be at least 1")
    return asked
