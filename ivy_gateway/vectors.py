"""From rows to the vectors of a reply: which output servers are asked for; cut, normalised, packed.

The one place that knows orders of bits and bytes. Numpy only; knows nothing of dialects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway import scoring
from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import EmbedJob, Output, VectorJob


def wire_output(job: VectorJob, width: int, *, quantized: bool) -> Output:
    """What to ask servers for, whose rows have `width` values: bits of float vectors are made here.

    Raises `InvalidValue` for codes of a model that does not quantise, and for bits that would end inside a
    byte before the last.
    """
    if job.output is Output.BITS and job.dimensions not in (None, width) and job.dimensions % 8:
        raise InvalidValue(
            f"`{job.dimensions_field}` {job.dimensions}: packed bits need a multiple of 8",
            job.dimensions_field,
        )
    if quantized:
        return job.output
    if job.output is Output.INT8:
        raise InvalidValue(
            f"`{job.output_field}`: int8 vectors need a model that quantises its own; this one's are float32",
            job.output_field,
        )
    return Output.OWN


def wire_outputs(jobs: Sequence[EmbedJob], width: int, *, quantized: bool) -> list[Output]:
    """`wire_output` of each of `jobs`, without computing the same rows under two names.

    Where codes are asked for, a model that quantises has no other values of its own.
    """
    wired = [wire_output(job, width, quantized=quantized) for job in jobs]
    own = Output.INT8 if Output.INT8 in wired else Output.OWN
    return [own if output is Output.OWN else output for output in wired]


def finish(rows: NDArray[Any], job: VectorJob, *, already_normalized: bool) -> NDArray[Any]:
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


def least_significant_first(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same bits with the first of eight in the least significant place."""
    return np.packbits(np.unpackbits(bits, axis=1), axis=1, bitorder="little")


def signed(octets: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Each byte less 128."""
    return (octets ^ np.uint8(128)).view(np.int8)


def unsigned(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Each code plus 128."""
    return codes.view(np.uint8) ^ np.uint8(128)


def float_bytes(vectors_ND: NDArray[Any], dtype: str, byte_order: str) -> NDArray[np.uint8]:
    """The bytes of each row `[N, D x size]` as float32, float16 or bfloat16; `byte_order` little or big.

    Rounds to nearest, ties to even. Raises `InvalidValue`, naming `embed_dtype`, for values above float16.
    """
    values = _WORDS[dtype](vectors_ND.astype(np.float32, copy=False))
    ordered = values.astype(values.dtype.newbyteorder("<" if byte_order == "little" else ">"), copy=False)
    return np.ascontiguousarray(ordered).view(np.uint8)


def _float32(vectors_ND: NDArray[np.float32]) -> NDArray[Any]:
    return vectors_ND


def _float16(vectors_ND: NDArray[np.float32]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        halves = vectors_ND.astype(np.float16)
    if not np.isfinite(halves).all():
        raise InvalidValue("`embed_dtype`: these vectors have values above float16's range", "embed_dtype")
    return halves


def _bfloat16(vectors_ND: NDArray[np.float32]) -> NDArray[Any]:
    """The upper halves of float32, rounded; numpy has no such type, so they are uint16."""
    words = np.ascontiguousarray(vectors_ND).view(np.uint32)
    last_kept = (words >> 16) & 1
    return ((words + 0x7FFF + last_kept) >> 16).astype(np.uint16)


_WORDS = {"float32": _float32, "float16": _float16, "bfloat16": _bfloat16}
FLOAT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of one value
