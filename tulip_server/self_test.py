"""The self-test at start: does this engine, on this device, give the vectors of the model's reference file?

It catches what no test of ours can: a driver, a device or a model folder that computes something else. Knows
nothing of the wire; runs before anybody is answered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.reference import BadReference, ReferenceExample, read_reference
from rose_engine.batch import Batch, Sequence
from rose_engine.errors import InvalidSequence
from rose_engine.lazy_tensor import finite_rows
from rose_engine.limits import EngineLimits
from tulip_server.batcher import BatchBudget
from tulip_server.config import ServerConfig
from tulip_server.errors import StartupError
from tulip_server.runner import StepEngine

log = logging.getLogger(__name__)

# bfloat16 keeps 0.999 on the models we measured; below this, neighbours of a text change places.
SMALLEST_COSINE = 0.99


class LoadedEngine(StepEngine, Protocol):
    """What the self-test needs of `rose_engine.engine.Engine`."""

    @property
    def limits(self) -> EngineLimits:
        """Its bounds."""
        ...


def check_reference(engine: LoadedEngine, config: ServerConfig) -> float | None:
    """The cosine of the worst vector with its reference; `None` where the model has no reference file.

    Raises `StartupError` for a file that does not fit the model, and for a cosine under `SMALLEST_COSINE`
    unless the configuration allows it.
    """
    try:
        examples = read_reference(config.model)
    except BadReference as error:
        raise StartupError(str(error)) from error
    if not examples:
        return None
    cosines = reference_cosines(engine, examples)
    worst = float(cosines.min())
    log.info("self-test: the least cosine with %d reference vectors is %.6f", len(examples), worst)
    if worst < SMALLEST_COSINE and not config.allow_reference_gap:
        raise StartupError(
            f"self-test: the vector of reference text {int(cosines.argmin())} has cosine {worst:.4f} with its"
            f" reference, less than {SMALLEST_COSINE}; --allow-reference-gap serves the model all the same"
        )
    return worst


def reference_cosines(engine: LoadedEngine, examples: SequenceOf[ReferenceExample]) -> NDArray[np.float32]:
    """The cosine of each example's vector with the engine's; -1 where that is not finite.

    Raises `StartupError` for an example that the model cannot take or whose vector is of another width.
    """
    dimensions = engine.description.dimensions
    for index, example in enumerate(examples):
        _check_example(index, example, engine.limits, dimensions)
    rows = _rows(engine, [Sequence(example.token_ids) for example in examples])
    cosines = _cosines(rows[:, :dimensions].astype(np.float32), np.stack([e.vector for e in examples]))
    return np.where(finite_rows(rows, dimensions), cosines, np.float32(-1))


def _check_example(index: int, example: ReferenceExample, limits: EngineLimits, dimensions: int) -> None:
    try:
        limits.check(Sequence(example.token_ids))
    except InvalidSequence as error:
        raise StartupError(f"reference text {index}: {error}") from error
    if example.vector.shape != (dimensions,):
        raise StartupError(
            f"reference text {index}: {len(example.vector)} values, the model's rows have {dimensions}"
        )


def _rows(engine: LoadedEngine, sequences: list[Sequence]) -> NDArray[np.generic]:
    """The engine's rows, `[B, ...]`, from as few batches as its limits allow."""
    budget = BatchBudget(engine.limits.max_batch_tokens, engine.limits.max_batch_sequences)
    rows = []
    while sequences:
        count = budget.num_fitting(sequence.num_tokens for sequence in sequences) or 1
        rows.append(engine.step(Batch.pack(sequences[:count])).result())
        sequences = sequences[count:]
    return np.concatenate(rows)


def _cosines(left_BD: NDArray[np.float32], right_BD: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths_B = np.linalg.norm(left_BD, axis=1) * np.linalg.norm(right_BD, axis=1)
    cosines_B: NDArray[np.float32] = (left_BD * right_BD).sum(axis=1) / np.maximum(lengths_B, 1e-12)
    return cosines_B
