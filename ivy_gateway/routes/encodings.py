"""How replies write vectors: as numbers, as base64 or as bare bytes, under the names that clients use.

Orders of bits and bytes are `vectors`' business; which fields carry the names is each dialect's.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway import vectors
from ivy_gateway.jobs import EmbeddingResult, Output
from ivy_gateway.routes.body import Fields

Results = Mapping[Output, EmbeddingResult]

_DTYPES = tuple(vectors.FLOAT_SIZES)
_BYTE_ORDERS = ("native", "little", "big")


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to write vectors: the output that is asked for, and from its rows to JSON values."""

    output: Output
    write: Callable[[NDArray[Any]], Iterable[object]]

    def values(self, results: Results) -> list[object]:
        """One JSON value per vector."""
        return list(self.write(results[self.output].vectors))


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """How floats become bytes."""

    dtype: str = "float32"
    byte_order: str = "little"

    @classmethod
    def read(cls, fields: Fields) -> FloatFormat:
        """vLLM's `embed_dtype` and `endianness`; without these, OpenAI's little-endian float32."""
        dtype = fields.choice("embed_dtype", _DTYPES) or "float32"
        byte_order = fields.choice("endianness", _BYTE_ORDERS) or "little"
        return cls(dtype, sys.byteorder if byte_order == "native" else byte_order)

    def pack(self, vectors_ND: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of each row."""
        return vectors.float_bytes(vectors_ND, self.dtype, self.byte_order)

    def base64(self) -> Encoding:
        """The bytes of each vector as base64, standard alphabet."""
        return Encoding(Output.OWN, lambda vectors_ND: as_base64(self.pack(vectors_ND)))


def as_base64(rows: NDArray[Any]) -> list[str]:
    """Each row's own bytes as base64."""
    return [base64.b64encode(row).decode("ascii") for row in np.ascontiguousarray(rows)]


FLOAT = Encoding(Output.OWN, iter)
BASE64 = FloatFormat().base64()
INT8 = Encoding(Output.INT8, iter)
UINT8 = Encoding(Output.INT8, vectors.unsigned)
BASE64_INT8 = Encoding(Output.INT8, as_base64)
UBINARY = Encoding(Output.BITS, iter)  # the first dimension in the most significant bit
BINARY = Encoding(Output.BITS, vectors.signed)
BASE64_BINARY = Encoding(Output.BITS, lambda bits: as_base64(vectors.least_significant_first(bits)))


@dataclass(frozen=True, slots=True)
class Listed:
    """Vectors as JSON, each written once, or (`keyed`) under the name of each of several encodings."""

    encodings: Mapping[str, Encoding]
    keyed: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What has to be computed."""
        return tuple(dict.fromkeys(encoding.output for encoding in self.encodings.values()))

    def columns(self, results: Results) -> dict[str, list[object]]:
        """All vectors in each encoding, by its name."""
        return {name: encoding.values(results) for name, encoding in self.encodings.items()}

    def values(self, results: Results) -> Iterable[object]:
        """One JSON value per vector."""
        if not self.keyed:
            (encoding,) = self.encodings.values()
            return encoding.values(results)
        columns = self.columns(results)
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


@dataclass(frozen=True, slots=True)
class Octets:
    """Vectors as bare bytes, one after the other, with or without a header that describes them."""

    floats: FloatFormat
    described: bool

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What has to be computed."""
        return (Output.OWN,)

    def pack(self, results: Results) -> NDArray[np.uint8]:
        """The bytes of each vector."""
        return self.floats.pack(results[Output.OWN].vectors)

    def places(self, results: Results) -> list[dict[str, Any]]:
        """Where each vector lies among the bytes of all, and as what."""
        rows = results[Output.OWN].vectors
        size = rows.shape[1] * vectors.FLOAT_SIZES[self.floats.dtype]
        kind = {"embed_dtype": self.floats.dtype, "endianness": self.floats.byte_order}
        shape = [rows.shape[1]]
        return [
            {"index": i, **kind, "start": i * size, "end": (i + 1) * size, "shape": shape}
            for i in range(len(rows))
        ]


Format = Listed | Octets
