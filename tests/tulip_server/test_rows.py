"""Several rows from one sequence through the server: spans and rows of tokens, from request to reply."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.batch import Batch, Sequence
from rose_engine.fake import FAKE_LIMITS, FakeEngine, fake_rows
from rose_engine.lazy_tensor import HostCompletion, LazyTensor
from rose_engine.limits import EngineLimits
from tests.tulip_server.conftest import expected_rows, infer_request, rows_of, serving
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.errors import BadChunk
from tulip_server.wire import RowFormat, to_sequences

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9]
SMALL = EngineLimits(
    max_length=8, vocabulary_size=100, num_segments=2, max_batch_tokens=4, max_batch_sequences=4
)


def with_spans(*sequences: list[int], spans: list[list[tuple[int, int]]]) -> pb.InferRequest:
    request = infer_request(*sequences)
    flat = [span for own in spans for span in own]
    request.spans.CopyFrom(codec.encode_tensor(np.array(flat, np.int32).reshape(-1, 2)))
    request.span_counts.CopyFrom(codec.encode_tensor(np.array([len(own) for own in spans], np.int32)))
    return request


def per_token(*sequences: list[int]) -> pb.InferRequest:
    request = infer_request(*sequences)
    request.output = pb.OUTPUT_TOKENS
    return request


def expected(*sequences: Sequence) -> np.ndarray:
    return np.concatenate([fake_rows(Batch.pack([sequence]), 8) for sequence in sequences])


def spanned(ids: list[int], *spans: tuple[int, int]) -> Sequence:
    return Sequence(np.array(ids, np.int32), spans=np.array(spans, np.int32))


def tokens(ids: list[int]) -> Sequence:
    return Sequence(np.array(ids, np.int32), per_token=True)


# -- the wire


def test_spans_come_out_as_they_went_in():
    message = with_spans(A, B, C, spans=[[(0, 1), (2, 4)], [(1, 3)], [(0, 1)]])
    sequences = to_sequences(pb.InferRequest.FromString(message.SerializeToString()), FAKE_LIMITS)
    assert [s.spans.tolist() for s in sequences] == [[[0, 1], [2, 4]], [[1, 3]], [[0, 1]]]
    assert [s.num_rows for s in sequences] == [2, 1, 1]


def test_without_spans_a_sequence_is_one_row():
    assert [(s.spans, s.per_token) for s in to_sequences(infer_request(A), FAKE_LIMITS)] == [(None, False)]
    assert [s.per_token for s in to_sequences(per_token(A, B), FAKE_LIMITS)] == [True, True]


def tokens_with_spans() -> pb.InferRequest:
    request = with_spans(A, spans=[[(0, 1)]])
    request.output = pb.OUTPUT_TOKENS
    return request


def counts_that_do_not_add_up() -> pb.InferRequest:
    request = with_spans(A, spans=[[(0, 1)]])
    request.span_counts.CopyFrom(codec.encode_tensor(np.array([2], np.int32)))
    return request


def triples() -> pb.InferRequest:
    request = with_spans(A, spans=[[(0, 1)]])
    request.spans.CopyFrom(codec.encode_tensor(np.zeros((1, 3), np.int32)))
    return request


@pytest.mark.parametrize(
    ("message", "field", "index", "reason"),
    [
        (with_spans(A, B, spans=[[(0, 1)], [(0, 5)]]), "spans", 1, "span 0 to 5"),
        (with_spans(A, B, spans=[[(0, 1)], [(-1, 1)]]), "spans", 1, "span -1 to 1"),
        (with_spans(A, B, spans=[[(2, 2)], [(0, 1)]]), "spans", 0, "span 2 to 2"),
        (with_spans(A, B, spans=[[(0, 3), (2, 4)], [(0, 1)]]), "spans", 0, "from token 3 on"),
        (with_spans(A, B, spans=[[(2, 4), (0, 1)], [(0, 1)]]), "spans", 0, "out of order"),
        (with_spans(A, B, spans=[[(0, 4)], []]), "spans", 1, "at least one"),
        (with_spans(A, B, spans=[[], []]), "spans", 0, "at least one"),
        (with_spans(A, B, spans=[[(0, 4)]]), "span_counts", None, "1 of them, but 2 sequences"),
        (counts_that_do_not_add_up(), "span_counts", None, "add up"),
        (triples(), "spans", None, "3 numbers"),
        (tokens_with_spans(), "spans", 0, "not for those of tokens"),
    ],
)
def test_bad_spans_are_refused_by_field_and_sequence(message, field, index, reason):
    with pytest.raises(BadChunk, match=reason) as caught:
        to_sequences(message, FAKE_LIMITS)
    assert (caught.value.field, caught.value.sequence_index) == (field, index)


def test_only_a_model_that_embeds_has_rows_of_tokens():
    RowFormat(3, quantized=True, hidden_size=5).check(pb.OUTPUT_TOKENS)
    with pytest.raises(BadChunk, match="OUTPUT_OWN"):
        RowFormat(3, quantized=False).check(pb.OUTPUT_TOKENS)


def test_rows_of_tokens_travel_whole():
    rows = np.arange(10, dtype=np.float32).reshape(2, 5)
    cut = RowFormat(3, quantized=True, hidden_size=5).cut(rows, pb.OUTPUT_TOKENS)
    np.testing.assert_array_equal(cut, rows)


def test_more_rows_than_a_reply_holds_are_refused_before_they_are_computed():
    width = 1 << 20
    most = codec.MAX_ROW_BYTES // (4 * width)
    row_format = RowFormat(width, quantized=False, hidden_size=width)
    row_format.check_size((tokens([1] * most),))
    for too_many in (tokens([1] * (most + 1)), spanned([1] * 99, *((i, i + 1) for i in range(most + 1)))):
        with pytest.raises(BadChunk, match=f"at most {most}"):
            row_format.check_size((too_many,))


# -- the queue


async def test_rows_of_tokens_and_pooled_ones_never_share_a_batch():
    queue = Batcher(BatchBudget(100, 100), 1000)
    chunks = [
        queue.submit(sequences)
        for sequences in ((spanned(A, (0, 2)),), (Sequence(np.array(B, np.int32)),), (tokens(A), tokens(C)))
    ]
    chunks.append(queue.submit((tokens(B),)))
    chunks.append(queue.submit((spanned(C, (0, 1)),)))
    batches = []
    while queue.waiting_sequences:
        batches.append([(chunks.index(part.chunk), part.number) for part in queue.next_batch()])
    assert batches == [[(0, 1), (1, 1)], [(2, 2), (3, 1)], [(4, 1)]]


# -- the service


async def test_rows_of_a_chunk_that_is_spread_over_batches_come_back_in_order():
    async with serving(FakeEngine(limits=SMALL)) as running:
        spans = [[(0, 1), (1, 4)], [(3, 4)], [(0, 1)]]
        reply = await running.stub.Infer(with_spans(A, B, C, spans=spans))
        wanted = expected(*(spanned(ids, *own) for ids, own in zip((A, B, C), spans, strict=True)))
        np.testing.assert_array_equal(rows_of(reply), wanted)
        reply = await running.stub.Infer(per_token(A, C, B))
        np.testing.assert_array_equal(rows_of(reply), expected(tokens(A), tokens(C), tokens(B)))


async def test_all_kinds_at_once_get_their_own_rows():
    async with serving(FakeEngine()) as running:
        spans = [[(0, 1), (1, 2)], [(1, 4)]]
        calls = [
            (infer_request(A, C), expected_rows(A, C)),
            (with_spans(A, B, spans=spans), expected(spanned(A, *spans[0]), spanned(B, *spans[1]))),
            (per_token(B, A), expected(tokens(B), tokens(A))),
        ] * 10
        replies = await asyncio.gather(*(running.stub.Infer(request) for request, _ in calls))
        for reply, (_, wanted) in zip(replies, calls, strict=True):
            np.testing.assert_array_equal(rows_of(reply), wanted)


class NotFinite(FakeEngine):
    """Row number 3 of every step is not a number."""

    def step(self, batch):
        rows = super().step(batch).result().copy()
        rows[3] = np.nan
        done = HostCompletion()
        done.set()
        return LazyTensor(done, lambda: rows)


@pytest.mark.parametrize(
    ("request_", "at_fault"),
    [
        (with_spans(A, B, C, spans=[[(0, 1), (1, 2)], [(0, 1), (1, 2)], [(0, 1)]]), 1),
        (per_token(C, A, B), 1),
        (per_token(A, B), 0),
    ],
)
async def test_a_row_that_is_not_finite_is_charged_to_its_sequence(request_, at_fault):
    async with serving(NotFinite()) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Infer(request_)
        assert f"sequence {at_fault}" in caught.value.details()


async def test_describe_names_rows_of_tokens_and_their_width():
    async with serving(FakeEngine(dimensions=6)) as running:
        described = await running.stub.Describe(pb.DescribeRequest())
        assert (pb.OUTPUT_TOKENS in described.outputs, described.hidden_size) == (True, 6)
