"""The byte layout of token ids and rows, once, for both sides of the wire.

Little-endian, row-major, no padding. Decoding checks that dtype, shape and bytes agree and returns a
read-only view of the bytes, which the library copies out of the message once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.tulip.v1 import inference_pb2 as pb

# Room for 2,000 rows of 1,024 float32 (8 MB) with a wide margin; the same bound on both sides, both ways.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# What the rows of one reply may take of it; the rest is room for everything beside them.
MAX_ROW_BYTES = MAX_MESSAGE_BYTES - 64 * 1024

# What is ready together travels together up to here; a chunk that is larger travels alone.
FRAME_BYTES = 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

_WIRE_DTYPES: dict[pb.DType, np.dtype[Any]] = {
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT8: np.dtype("i1"),
    pb.DTYPE_UINT8: np.dtype("u1"),
}
_DTYPE_CODES: dict[np.dtype[Any], pb.DType] = {dtype: code for code, dtype in _WIRE_DTYPES.items()}


class CodecError(ValueError):
    """A tensor message whose dtype, shape and bytes do not agree, or are not what was expected."""


def dtype_code(dtype: np.dtype[Any]) -> pb.DType:
    """The wire's code for a numpy dtype. Raises `CodecError` for one that does not travel."""
    code = _DTYPE_CODES.get(dtype)  # as it is on most machines
    if code is not None:
        return code
    try:
        return _DTYPE_CODES[dtype.newbyteorder("<")]
    except KeyError:
        raise CodecError(f"dtype {dtype} does not travel") from None


def encode_tensor(array: NDArray[Any]) -> pb.Tensor:
    """Pack an array of any shape. Raises `CodecError` for a dtype that does not travel."""
    tensor = pb.Tensor()
    fill_tensor(tensor, array)
    return tensor


def fill_tensor(tensor: pb.Tensor, array: NDArray[Any]) -> None:
    """Pack an array into an empty `tensor`, where it is: a message made first is copied into its parent.

    Raises `CodecError` for a dtype that does not travel.
    """
    code = dtype_code(array.dtype)
    little = np.ascontiguousarray(array, dtype=_WIRE_DTYPES[code])
    tensor.dtype = code
    tensor.shape.extend(array.shape)
    tensor.data = little.tobytes()


def decode_tensor(
    tensor: pb.Tensor, name: str, dtype: pb.DType | None = None, ndim: int | None = None
) -> NDArray[Any]:
    """Unpack `tensor` as a read-only array over its bytes.

    `name` is the field, for messages; `dtype` and `ndim`, where given, are what it must be.
    Raises `CodecError` when the message contradicts itself or them.
    """
    wire_dtype = _WIRE_DTYPES.get(tensor.dtype)
    if wire_dtype is None or dtype not in (None, tensor.dtype):
        wanted = "a known dtype" if dtype is None else pb.DType.Name(dtype)
        raise CodecError(f"{name}: dtype {tensor.dtype} where {wanted} was expected")
    shape, data = tuple(tensor.shape), tensor.data  # once: the library copies the bytes for whoever asks
    if ndim not in (None, len(shape)):
        raise CodecError(f"{name}: {len(shape)} dimensions where {ndim} were expected")
    expected = math.prod(shape) * wire_dtype.itemsize
    if expected != len(data):
        raise CodecError(f"{name}: shape {list(shape)} needs {expected} bytes, got {len(data)}")
    return np.frombuffer(data, wire_dtype).reshape(shape)
