"""From rows to the vectors of a reply: which output servers are asked for; cut, normalised, packed.

Numpy only; knows nothing of dialects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway import scoring
from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import EmbedJob, Output


def wire_output(job: EmbedJob, width: int, *, quantized: bool) -> Output:
    """What to ask servers for, whose rows have `width` values: bits of float vectors are made here.

    Raises `InvalidValue` for codes of a model that does not quantise, and for bits that would end inside a
    byte before the last.
    """
    if job.output is Output.BITS and job.dimensions not in (None, width) and job.dimensions % 8:
        raise InvalidValue(f"`dimensions` {job.dimensions}: packed bits need a multiple of 8", "dimensions")
    if quantized:
        return job.output
    if job.output is Output.INT8:
        raise InvalidValue(
            f"`{job.output_field}`: int8 vectors need a model that quantises its own; this one's are float32",
            job.output_field,
        )
    return Output.OWN


def finish(rows: NDArray[Any], job: EmbedJob, *, already_normalized: bool) -> NDArray[Any]:
    """Rows as the job wants them: float32 or int8 `[N, dimensions]`, or uint8 bits, eight dimensions a byte.

    Cut to the dimensions asked for, then normalised again. Codes are never rescaled, and bits are the same
    for every length of a vector.
    """
    if job.output is Output.BITS:
        bits = rows if rows.dtype == np.uint8 else packed_signs(rows)
        return bits if job.dimensions is None else bits[:, : -(-job.dimensions // 8)]
    cut = job.dimensions is not None and job.dimensions < rows.shape[1]
    vectors_ND = rows[:, : job.dimensions] if cut else rows
    wanted = job.normalize and vectors_ND.dtype == np.float32
    return scoring.normalized(vectors_ND) if wanted and (cut or not already_normalized) else vectors_ND


def packed_signs(vectors_ND: NDArray[Any]) -> NDArray[np.uint8]:
    """Bits `[N, ceil(D / 8)]`, 1 where a value is not negative, the first in the most significant place."""
    return np.packbits(vectors_ND >= 0, axis=1)
