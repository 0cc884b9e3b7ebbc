"""When a stream asks its carrier to send; what is sent is tested with the carriers."""

from __future__ import annotations

import numpy as np

from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.fake import FAKE_LIMITS
from tests.tulip_server.test_service import A, B, C, cancel, infer
from tulip_server.batcher import BatchBudget, Batcher
from tulip_server.errors import StepFailed
from tulip_server.intake import Intake
from tulip_server.streams import Stream
from tulip_server.wire import RowFormat


class Client:
    """A stream over a queue that nobody works off, and what its carrier was told."""

    def __init__(self) -> None:
        self.batcher = Batcher(BatchBudget(64, 64), 1000)
        self.wakes: list[bool] = []
        self.stream = Stream(
            Intake(self.batcher, FAKE_LIMITS, RowFormat(2, quantized=False)), self.wakes.append
        )

    def send(self, *requests: pb.StreamRequest) -> None:
        self.stream.take(pb.RequestFrame(requests=requests))

    def deliver(self) -> None:
        for part in self.batcher.next_batch():
            part.chunk.deliver(
                part.first, part.number, np.zeros((part.number, 2), np.float32), self.batcher.now()
            )

    def answered(self) -> list[int]:
        """The ids in the next frame."""
        return [reply.correlation_id for reply in self.stream.next_frame().replies]


async def test_only_the_last_rows_that_are_waited_for_say_so_and_all_leave_in_one_frame():
    client = Client()
    client.send(infer(1, A), infer(2, B), infer(3, C))
    assert client.wakes == []
    client.deliver()
    assert client.wakes == [False, False, True]
    assert client.answered() == [1, 2, 3]
    assert client.stream.next_frame() is None


async def test_rows_are_not_the_last_while_another_batch_is_on_its_way():
    client = Client()
    client.send(infer(1, A))
    (first,) = client.batcher.next_batch()
    client.send(infer(2, B))
    first.chunk.deliver(0, 1, np.zeros((1, 2), np.float32), client.batcher.now())
    assert client.wakes == [False]
    client.deliver()
    assert client.wakes == [False, True]


async def test_what_was_cancelled_is_not_waited_for():
    client = Client()
    client.send(infer(1, A), infer(2, B), cancel(2))
    client.deliver()
    assert client.wakes == [True]


async def test_refusals_and_failures_wait_for_each_other():
    client = Client()
    client.send(pb.StreamRequest(correlation_id=1), infer(2, [-1]), infer(3, A))
    for part in client.batcher.next_batch():
        client.batcher.fail(part.chunk, StepFailed("no luck"))
    assert client.wakes == [False, False, False]
    assert client.answered() == [1, 2, 3]
