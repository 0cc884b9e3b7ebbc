"""The servicer behind a real port: calls, streams, and how chunks end."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from protos import codec
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1.inference_pb2_grpc import InferenceStub
from rose_engine.batch import Batch
from rose_engine.errors import StepError
from rose_engine.fake import FAKE_LIMITS, FakeEngine
from rose_engine.lazy_tensor import HostCompletion, LazyTensor
from rose_engine.limits import EngineLimits
from tests.tulip_server.conftest import (
    ChunkStream,
    all_replies,
    expected_rows,
    infer_request,
    rows_of,
    serving,
    until,
)
from tulip_server import metrics

A, B, C, D = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]
ONE_AT_A_TIME = EngineLimits(
    max_length=4, vocabulary_size=100, num_segments=2, max_batch_tokens=4, max_batch_sequences=4
)


def manual_engine() -> FakeEngine:
    """One sequence a batch; the test completes the steps."""
    return FakeEngine(limits=ONE_AT_A_TIME, manual=True)


def infer(correlation_id: int, *sequences: list[int], timeout_us: int = 0) -> pb.StreamRequest:
    request = infer_request(*sequences, timeout_us=timeout_us)
    return pb.StreamRequest(correlation_id=correlation_id, infer=request)


def cancel(correlation_id: int) -> pb.StreamRequest:
    return pb.StreamRequest(correlation_id=correlation_id, cancel=pb.Cancel())


def status(failure: pb.Failure) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == failure.code)


def counted(outcome: str) -> float:
    return metrics.REGISTRY.get_sample_value("tulip_chunks_total", {"outcome": outcome}) or 0.0


# -- unary


async def test_a_call_answers_one_row_a_sequence_in_order():
    async with serving(FakeEngine()) as running:
        reply = await running.stub.Infer(infer_request(A, B, [7]))
        np.testing.assert_array_equal(rows_of(reply), expected_rows(A, B, [7]))


async def test_many_calls_at_once_get_their_own_rows():
    async with serving(FakeEngine()) as running:
        chunks = [[[i, j + 1] for j in range(i % 5 + 1)] for i in range(60)]
        replies = await asyncio.gather(*(running.stub.Infer(infer_request(*chunk)) for chunk in chunks))
        for reply, chunk in zip(replies, chunks, strict=True):
            np.testing.assert_array_equal(rows_of(reply), expected_rows(*chunk))


async def test_a_bad_chunk_is_an_invalid_argument_that_names_its_sequence():
    async with serving(FakeEngine()) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="token id 999999") as caught:
            await running.stub.Infer(infer_request(A, [999_999]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.trailing_metadata()["sequence-index"] == "1"


async def test_cancelling_a_call_cancels_its_chunk(waiting):
    engine = manual_engine()
    async with serving(engine, depth=1) as running:
        running.stub.Infer(infer_request(A))
        await until(lambda: engine.steps)
        call = running.stub.Infer(infer_request(B, C))
        await until(lambda: waiting(running) == 8)
        before = counted("cancelled")
        call.cancel()
        await until(lambda: waiting(running) == 0)
        assert counted("cancelled") == before + 1


async def test_a_call_s_own_deadline_cancels_its_chunk(waiting):
    engine = manual_engine()
    async with serving(engine, depth=1) as running:
        running.stub.Infer(infer_request(A))
        await until(lambda: engine.steps)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Infer(infer_request(B), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: waiting(running) == 0)


async def test_describe_states_model_and_limits():
    async with serving(FakeEngine(dimensions=16), model_id="served", max_waiting_tokens=777) as running:
        reply = await running.stub.Describe(pb.DescribeRequest())
    assert reply.model_id == "served"
    assert (reply.task, reply.dimensions, reply.row_dtype) == (pb.TASK_EMBED, 16, pb.DTYPE_FLOAT32)
    assert (reply.max_length, reply.vocabulary_size) == (FAKE_LIMITS.max_length, FAKE_LIMITS.vocabulary_size)
    assert (reply.max_batch_tokens, reply.max_waiting_tokens) == (FAKE_LIMITS.max_batch_tokens, 777)
    assert reply.tokenizer_hash == ""
    assert reply.server_version


async def test_the_queue_s_default_bound_follows_the_batch():
    async with serving(FakeEngine()) as running:
        reply = await running.stub.Describe(pb.DescribeRequest())
    assert reply.model_id == "fake"
    assert reply.max_waiting_tokens == 64 * FAKE_LIMITS.max_batch_tokens


async def test_a_reply_of_two_thousand_rows_of_1024_passes(carrier):
    engine = FakeEngine(dimensions=1024)
    async with serving(engine, carrier) as running:
        sequences = [[i + 1] for i in range(2000)]
        reply = await running.stub.Infer(infer_request(*sequences))
        stream = running.stream()
        await stream.write(infer(1, *sequences))
        streamed = await stream.read()
    rows = rows_of(reply)
    assert rows.shape == (2000, 1024)
    np.testing.assert_array_equal(rows[::500], expected_rows(*sequences[::500], dimensions=1024))
    assert streamed.reply.rows == reply.rows


# -- streams


async def test_replies_come_in_order_of_completion(carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=2) as running:
        stream = running.stream()
        await stream.write(infer(7, A, B, C))
        await until(lambda: len(engine.steps) == 2)
        await stream.write(infer(8, [4000]))
        first = await stream.read()
        assert (first.correlation_id, status(first.failure)) == (8, grpc.StatusCode.INVALID_ARGUMENT)
        await stream.write(infer(9, D))
        for number in range(4):
            await until(lambda number=number: len(engine.steps) > number)
            engine.steps[number].complete()
        replies = [await stream.read() for _ in range(2)]
        assert [reply.correlation_id for reply in replies] == [7, 9]
        np.testing.assert_array_equal(rows_of(replies[0].reply), expected_rows(A, B, C))
        np.testing.assert_array_equal(rows_of(replies[1].reply), expected_rows(D))


async def test_a_chunk_s_deadline_is_kept_by_the_server(carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await until(lambda: engine.steps)
        await stream.write(infer(2, B, timeout_us=1))
        await until(lambda: running.server._batcher.waiting_tokens == 4)
        engine.steps[0].complete()
        replies = {(reply := await stream.read()).correlation_id: reply for _ in range(2)}
        assert status(replies[2].failure) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(engine.steps) == 1


async def test_a_cancelled_chunk_gets_no_reply_and_is_not_computed(waiting, carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        before = counted("cancelled")
        for request in (infer(1, A), infer(2, B), infer(3, C), cancel(2), cancel(99)):
            await stream.write(request)
        await until(lambda: counted("cancelled") == before + 1 and engine.steps)
        assert waiting(running) == 4
        engine.steps[0].complete()
        await until(lambda: len(engine.steps) == 2)
        engine.steps[1].complete()
        assert [reply.correlation_id for reply in await all_replies(stream, 2)] == [1, 3]
        assert [step.batch.token_ids_T.tolist() for step in engine.steps] == [A, C]


async def test_an_id_is_free_again_after_its_cancel(carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        before = counted("cancelled")
        for request in (infer(1, A), cancel(1), infer(1, B)):
            await stream.write(request)
        await until(lambda: engine.steps and counted("cancelled") == before + 1)
        engine.steps[0].complete()
        while not engine.steps[-1].lazy_tensor.ready() or engine.steps[-1].batch.token_ids_T[0] != B[0]:
            engine.steps[-1].complete()
            await asyncio.sleep(0.001)
        (reply,) = await all_replies(stream, 1)
        np.testing.assert_array_equal(rows_of(reply.reply), expected_rows(B))


async def test_bad_chunks_leave_the_stream_alive(carrier):
    async with serving(FakeEngine(), carrier) as running:
        stream = running.stream()
        await stream.write(infer(1, A, [1, -5], B))
        failure = (await stream.read()).failure
        assert status(failure) is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.sequence_index == 1
        assert "token_ids, sequence 1: token id -5" in failure.message

        await stream.write(pb.StreamRequest(correlation_id=2, infer=pb.InferRequest()))
        failure = (await stream.read()).failure
        assert status(failure) is grpc.StatusCode.INVALID_ARGUMENT
        assert not failure.HasField("sequence_index")

        await stream.write(pb.StreamRequest(correlation_id=3))
        assert "neither infer nor cancel" in (await stream.read()).failure.message

        await stream.write(infer(4, A))
        np.testing.assert_array_equal(rows_of((await stream.read()).reply), expected_rows(A))


async def test_an_id_in_flight_is_not_taken_twice(carrier):
    engine = manual_engine()
    async with serving(engine, carrier) as running:
        stream = running.stream()
        await stream.write(infer(5, A))
        await stream.write(infer(5, B))
        reply = await stream.read()
        assert reply.correlation_id == 5
        assert "in flight already" in reply.failure.message
        engine.steps[0].complete()
        np.testing.assert_array_equal(rows_of((await stream.read()).reply), expected_rows(A))
        assert len(engine.steps) == 1


async def test_an_overloaded_server_says_so_and_recovers(waiting, carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1, max_waiting_tokens=8) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await until(lambda: engine.steps)
        await stream.write(infer(2, B, C))
        await until(lambda: waiting(running) == 8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Infer(infer_request(D))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stream.write(infer(3, D))
        assert status((await stream.read()).failure) is grpc.StatusCode.RESOURCE_EXHAUSTED

        engine.steps[0].complete()
        assert (await stream.read()).correlation_id == 1
        await until(lambda: waiting(running) == 4)
        await stream.write(infer(4, D))
        await until(lambda: waiting(running) == 8)


async def test_a_failed_step_is_an_internal_error_for_its_chunks_only(carrier):
    engine = manual_engine()
    async with serving(engine, carrier) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await stream.write(infer(2, B))
        await until(lambda: len(engine.steps) == 2)
        engine.steps[0].fail(StepError("no luck"))
        engine.steps[1].complete()
        failed, fine = await stream.read(), await stream.read()
        assert status(failed.failure) is grpc.StatusCode.INTERNAL
        assert failed.failure.message == "no luck"
        np.testing.assert_array_equal(rows_of(fine.reply), expected_rows(B))


class NotANumber(FakeEngine):
    """The second row of every batch is not a number."""

    def step(self, batch: Batch) -> LazyTensor:
        rows = super().step(batch).result()
        rows[1] = np.nan
        completion = HostCompletion()
        completion.set()
        return LazyTensor(completion, lambda: rows)


async def test_a_row_that_is_no_number_is_an_error_and_never_travels(carrier):
    async with serving(NotANumber(), carrier) as running:
        stream = running.stream()
        await stream.write(infer(1, A, B))
        failure = (await stream.read()).failure
        assert status(failure) is grpc.StatusCode.INTERNAL
        assert failure.sequence_index == 1


async def test_half_closing_waits_for_the_last_reply():
    engine = manual_engine()
    async with serving(engine) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await stream.write(infer(2, B))
        await stream.done_writing()
        await until(lambda: len(engine.steps) == 2)
        for step in engine.steps:
            step.complete()
        assert [reply.correlation_id async for reply in stream] == [1, 2]
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_stream_without_a_chunk_ends_in_peace():
    async with serving(FakeEngine()) as running:
        stream = running.stream()
        await stream.done_writing()
        assert [reply async for reply in stream] == []


async def test_a_client_that_cancels_its_stream_leaves_nothing_behind(waiting, carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        for number in range(5):
            await stream.write(infer(number, A, B))
        await until(lambda: waiting(running) == 36)
        stream.cancel()
        await until(lambda: waiting(running) == 0)
        engine.steps[0].complete()
        reply = running.stub.Infer(infer_request(C))
        await until(lambda: len(engine.steps) == 2)
        engine.steps[1].complete()
        np.testing.assert_array_equal(rows_of(await reply), expected_rows(C))


async def test_a_client_that_disconnects_leaves_nothing_behind(waiting):
    engine = manual_engine()
    async with serving(engine, depth=1) as running:
        async with grpc.aio.insecure_channel(
            running.address, options=[*codec.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stream = ChunkStream(InferenceStub(channel))
            for number in range(5):
                await stream.write(infer(number, A, B))
            await until(lambda: waiting(running) == 36)
        await until(lambda: waiting(running) == 0)


async def test_two_streams_may_use_the_same_ids(carrier):
    async with serving(FakeEngine(), carrier) as running:
        streams = [running.stream() for _ in range(2)]
        for stream, sequence in zip(streams, (A, B), strict=True):
            await stream.write(infer(1, sequence))
        for stream, sequence in zip(streams, (A, B), strict=True):
            np.testing.assert_array_equal(rows_of((await stream.read()).reply), expected_rows(sequence))


async def test_a_client_that_reads_late_gets_every_reply(monkeypatch, carrier):
    monkeypatch.setattr("tulip_server.streams._MAX_UNSENT_REPLIES", 2)
    async with serving(FakeEngine(dimensions=1024), carrier) as running:
        stream = running.stream()

        async def send() -> None:
            for number in range(200):
                await stream.write(infer(number, *([A] * 20)))

        sending = asyncio.create_task(send())
        replies = [(await stream.read()).correlation_id for _ in range(200)]
        await sending
        assert sorted(replies) == list(range(200))


# -- lanes, origins and many cancels


async def test_the_lane_of_a_request_is_the_lane_it_waits_in(carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await until(lambda: engine.steps)
        for number, (sequence, lane) in enumerate([(B, pb.LANE_BULK), (C, pb.LANE_INTERACTIVE)], start=2):
            request = infer(number, sequence)
            request.infer.lane = lane
            await stream.write(request)
        await until(lambda: running.server.state.waiting_tokens == {"interactive": 4, "bulk": 4})
        order = []
        for number in range(3):
            await until(lambda number=number: len(engine.steps) > number)
            engine.steps[number].complete()
            order.append((await stream.read()).correlation_id)
    assert order == [1, 3, 2]


async def test_a_lane_that_there_is_not_is_refused():
    async with serving(FakeEngine()) as running:
        request = infer_request(A)
        request.lane = 7
        with pytest.raises(grpc.aio.AioRpcError, match="lane: 7 is none of LANE_INTERACTIVE") as caught:
            await running.stub.Infer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_describe_tells_what_is_reserved_for_interactive_chunks():
    async with serving(FakeEngine(), max_waiting_tokens=1000) as running:
        assert (await running.stub.Describe(pb.DescribeRequest())).reserved_tokens == 250
    async with serving(FakeEngine(), max_waiting_tokens=1000, reserved_tokens=1) as running:
        assert (await running.stub.Describe(pb.DescribeRequest())).reserved_tokens == 1


async def test_ten_thousand_cancels_leave_nothing(waiting, carrier):
    engine = manual_engine()
    async with serving(engine, carrier, depth=1, max_waiting_tokens=100_000) as running:
        stream = running.stream()
        await stream.write(infer(1, A))
        await until(lambda: engine.steps)
        (served,) = running.server._streams._open
        for number in range(2, 5002):
            await stream.write(infer(number, B, C, timeout_us=10**9))
            await stream.write(cancel(number))
            if number % 500 == 0:  # and as many with chunks in flight when their stream goes
                other = running.stream()
                for sent in range(500):
                    await other.write(infer(sent, B, C, timeout_us=10**9))
                other.cancel()
        await until(lambda: waiting(running) == 0 and running.server.state.streams == 1, seconds=60)
        assert set(served._in_flight) == {1}
        assert not any(line.chunks for line in running.server._batcher.lines.values())
        assert len(running.server._batcher._deadlines) <= 2 * 500 + 65  # of the last stream's at most
        engine.steps[0].complete()
        assert (await stream.read()).correlation_id == 1  # and nothing of the others
        assert len(engine.steps) == 1


async def test_a_failed_chunk_s_line_names_its_request_and_nothing_of_its_input(caplog):
    async with serving(FakeEngine()) as running:
        request = infer_request([999_999])
        request.request_id, request.traceparent = "from-a\nclient", f"00-{'a' * 32}-{'b' * 16}-01"
        with caplog.at_level("WARNING", "tulip_server.intake"), pytest.raises(grpc.aio.AioRpcError):
            await running.stub.Infer(request)
    (record,) = caplog.records
    assert record.getMessage() == "a chunk failed: bad_chunk, sequence 0"
    assert (record.request_id, record.trace_id) == ("from-a\\u000aclient", "a" * 32)
