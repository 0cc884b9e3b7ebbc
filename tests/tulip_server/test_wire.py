"""Bytes to sequences, and the messages of chunks that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.limits import EngineLimits
from tulip_server.batcher import ChunkResult
from tulip_server.errors import BadChunk
from tulip_server.wire import RowFormat, fill_reply, timeout_seconds, to_sequences

LIMITS = EngineLimits(
    max_length=8, vocabulary_size=100, num_segments=2, max_batch_tokens=64, max_batch_sequences=8
)


def int32(*values: int) -> pb.Tensor:
    return codec.encode_tensor(np.array(values, np.int32))


def request(ids, lengths, segments=None) -> pb.InferRequest:
    segment_ids = None if segments is None else int32(*segments)
    return pb.InferRequest(token_ids=int32(*ids), lengths=int32(*lengths), segment_ids=segment_ids)


@given(
    chunk=st.lists(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=8), min_size=1
    ),
    with_segments=st.booleans(),
)
def test_sequences_come_out_as_they_went_in(chunk, with_segments):
    tokens = [token for sequence in chunk for token in sequence]
    segments = [segment for _, segment in tokens] if with_segments else None
    message = request([i for i, _ in tokens], [len(sequence) for sequence in chunk], segments)
    sequences = to_sequences(pb.InferRequest.FromString(message.SerializeToString()), LIMITS)
    assert [s.token_ids.tolist() for s in sequences] == [[i for i, _ in sequence] for sequence in chunk]
    for sequence, original in zip(sequences, chunk, strict=True):
        if with_segments:
            assert sequence.segment_ids.tolist() == [segment for _, segment in original]
        else:
            assert sequence.segment_ids is None


@pytest.mark.parametrize(
    ("message", "field", "index", "reason"),
    [
        (request([], []), "lengths", None, "at least one sequence"),
        (request([1, 2], [2, 0]), "lengths", 1, "at least one token"),
        (request([1, 2], [3, -1]), "lengths", 1, "at least one token"),
        (request([1, 2], [3, 0, -1]), "lengths", 1, "at least one token"),
        (request([1, 2, 3], [1, 1]), "lengths", None, "sum is 2, but there are 3"),
        (request([1] * 10, [1, 9]), "lengths", 1, "9 tokens; the model takes at most 8"),
        (request([1, 2, 100], [2, 1]), "token_ids", 1, "token id 100 is outside 0 to 99"),
        (request([1, -1, 2], [2, 1]), "token_ids", 0, "token id -1 is outside"),
        (request([1, 2], [1, 1], [0, 2]), "segment_ids", 1, "segment id 2 is outside 0 to 1"),
        (request([1, 2], [1, 1], [0]), "segment_ids", None, "1 of them, but 2 token ids"),
        (pb.InferRequest(lengths=int32(1)), "token_ids", None, "dtype"),
        (pb.InferRequest(token_ids=int32(1)), "lengths", None, "dtype"),
        (
            pb.InferRequest(
                token_ids=pb.Tensor(dtype=pb.DTYPE_INT32, shape=[2], data=b"abc"), lengths=int32(1)
            ),
            "token_ids",
            None,
            "needs 8 bytes, got 3",
        ),
    ],
)
def test_a_bad_chunk_is_refused_by_field_and_sequence(message, field, index, reason):
    with pytest.raises(BadChunk, match=reason) as caught:
        to_sequences(message, LIMITS)
    assert (caught.value.field, caught.value.sequence_index) == (field, index)
    assert str(caught.value).startswith(field)


def test_lengths_whose_sum_overflows_are_refused():
    with pytest.raises(BadChunk, match="sum is 4294967296"):
        to_sequences(request([1], [2**31 - 1, 2**31 - 1, 2]), LIMITS)


def test_no_deadline_is_an_infinite_one():
    assert timeout_seconds(pb.InferRequest()) == float("inf")
    assert timeout_seconds(pb.InferRequest(timeout_us=2_500_000)) == 2.5


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_rows_and_timings_travel(dtype):
    rows = np.arange(6).reshape(2, 3).astype(dtype)
    row_format = RowFormat(dimensions=3, quantized=False)
    reply = pb.InferReply()
    fill_reply(reply, ChunkResult(rows, queue_seconds=0.001, compute_seconds=0.0025), row_format)
    decoded = codec.decode_tensor(reply.rows, "rows")
    np.testing.assert_array_equal(decoded, rows)
    assert decoded.dtype == dtype
    assert (reply.timings.queue_us, reply.timings.compute_us) == (1000, 2500)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (pb.OUTPUT_OWN, np.array([[1, -127, 0], [5, 6, 7]], np.int8)),
        (pb.OUTPUT_INT8, np.array([[1, -127, 0], [5, 6, 7]], np.int8)),
        (pb.OUTPUT_BITS, np.array([[0b1010_0000], [0b1110_0000]], np.uint8)),
    ],
)
def test_of_quantised_rows_only_what_was_asked_for_travels(output, expected):
    bits = np.array([[0b1010_0000], [0b1110_0000]], np.uint8).view(np.int8)
    rows = np.hstack([np.array([[1, -127, 0], [5, 6, 7]], np.int8), bits])
    reply = pb.InferReply()
    fill_reply(reply, ChunkResult(rows, 0, 0), RowFormat(dimensions=3, quantized=True), output)
    decoded = codec.decode_tensor(reply.rows, "rows")
    np.testing.assert_array_equal(decoded, expected)
    assert decoded.dtype == expected.dtype


def test_an_output_that_the_model_does_not_have_is_refused():
    plain, quantized = (RowFormat(dimensions=3, quantized=quantized) for quantized in (False, True))
    plain.check(pb.OUTPUT_OWN)
    for output in (pb.OUTPUT_OWN, pb.OUTPUT_INT8, pb.OUTPUT_BITS):
        quantized.check(output)
    for output in (pb.OUTPUT_INT8, pb.OUTPUT_BITS, 77):
        with pytest.raises(BadChunk, match="OUTPUT_OWN") as caught:
            plain.check(output)
        assert caught.value.field == "output"
