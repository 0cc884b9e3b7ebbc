from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb

TRAVELLING = st.sampled_from([np.int32, np.float32, np.int8, np.uint8])


@given(hnp.arrays(TRAVELLING, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=7)))
def test_what_is_packed_comes_back(array):
    back = codec.decode_tensor(codec.encode_tensor(array), "x")
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_the_bytes_are_little_endian_row_major():
    tensor = codec.encode_tensor(np.array([[1, 2], [3, -1]], dtype=">i4"))
    assert tensor.data == bytes.fromhex("01000000 02000000 03000000 ffffffff")
    assert list(tensor.shape) == [2, 2]


def test_a_strided_view_is_packed_by_value():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(codec.decode_tensor(codec.encode_tensor(array), "x"), array)


def test_decoding_copies_nothing_and_cannot_be_written():
    tensor = codec.encode_tensor(np.arange(4, dtype=np.int32))
    view = codec.decode_tensor(tensor, "x")
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_dtype_that_does_not_travel():
    with pytest.raises(codec.CodecError, match="float64"):
        codec.encode_tensor(np.zeros(2))


@pytest.mark.parametrize(
    ("tensor", "wanted", "message"),
    [
        (
            pb.Tensor(dtype=pb.DTYPE_INT32, shape=[3], data=b"\0" * 8),
            {},
            "ids: shape .3. needs 12 bytes, got 8",
        ),
        (
            pb.Tensor(dtype=pb.DTYPE_INT32, shape=[2], data=b"\0" * 8),
            {"ndim": 2},
            "ids: 1 dimensions where 2",
        ),
        (pb.Tensor(shape=[2], data=b"\0" * 8), {}, "ids: dtype 0"),
        (
            pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2], data=b"\0" * 8),
            {"dtype": pb.DTYPE_INT32},
            "ids: dtype 2 where DTYPE_INT32",
        ),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused_by_name(tensor, wanted, message):
    with pytest.raises(codec.CodecError, match=message):
        codec.decode_tensor(tensor, "ids", **wanted)


def test_the_largest_promised_reply_fits():
    rows = np.zeros((2000, 1024), np.float32)
    reply = pb.InferReply(rows=codec.encode_tensor(rows))
    assert reply.ByteSize() < codec.MAX_MESSAGE_BYTES
