"""A Tulip without an engine, over real gRPC or a real socket of frames.

Rows follow from the ids, delays and failures from the test.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from protos.codec import CHANNEL_OPTIONS, decode_tensor, encode_tensor
from protos.frames import ADDRESS_PREFIX, FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb
from protos.tulip.v1 import inference_pb2_grpc

DIMENSIONS = 8
HEARTBEAT_SECONDS = 0.05  # so that tests need not wait long for one


def embedding_row(token_ids: np.ndarray) -> np.ndarray:
    """A vector that every id and its position move: float32 [DIMENSIONS], not normalised."""
    positions = np.arange(1, len(token_ids) + 1)
    columns = np.arange(1, DIMENSIONS + 1)
    angles = np.outer(token_ids * positions, columns) * 0.001
    return np.cos(angles).sum(axis=0).astype(np.float32)


def quantized_row(token_ids: np.ndarray) -> np.ndarray:
    """What a model that quantises gives for the same ids: int8 codes [DIMENSIONS]."""
    return np.round(127 * np.tanh(embedding_row(token_ids))).astype(np.int8)


def sign_bits(token_ids: np.ndarray) -> np.ndarray:
    """The signs of `embedding_row`, packed: uint8 [DIMENSIONS / 8]."""
    return np.packbits(embedding_row(token_ids) >= 0)


def score_row(token_ids: np.ndarray) -> np.ndarray:
    """One logit from the ids: float32 [1]."""
    return np.array([(int(token_ids.sum()) % 1000) / 100 - 5], np.float32)


def row_ids(request: pb.InferRequest, ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The ids that make each row of a request: a sequence's, a span's or a token's."""
    if request.output == pb.OUTPUT_TOKENS:
        return list(ids[:, None])
    sequences = np.split(ids, np.cumsum(lengths)[:-1])
    if not request.HasField("spans"):
        return sequences
    spans = decode_tensor(request.spans, "spans", ndim=2)
    counts = decode_tensor(request.span_counts, "span_counts")
    owners = [sequence for sequence, count in zip(sequences, counts, strict=True) for _ in range(count)]
    return [owner[start:end] for owner, (start, end) in zip(owners, spans, strict=True)]


class FakeTulip(inference_pb2_grpc.InferenceServicer):
    """Answers each chunk in its own task. Everything below may be changed while it runs.

    `gate`: chunks wait until it is set. `fail`: from a request to a failure, or None. `row`: from one
    sequence's ids to its row. `heartbeat`: what is said of itself, on every stream; `None`: nothing.
    """

    carrier = "grpc"  # what `start` opens, or "frames"

    def __init__(self, **description) -> None:
        self.description = pb.DescribeReply(
            **{
                "model_id": "fake",
                "task": pb.TASK_EMBED,
                "dimensions": DIMENSIONS,
                "row_dtype": pb.DTYPE_FLOAT32,
                "pooling": "mean",
                "normalized": False,
                "max_length": 256,
                "vocabulary_size": 30522,
                "num_segments": 2,
                "max_batch_tokens": 16384,
                "max_batch_sequences": 256,
                "dtype": "float32",
                "device": "cpu",
                "weights_hash": "w1",
                **description,
            }
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail: Callable[[pb.InferRequest], pb.Failure | None] = lambda request: None
        self.row = score_row if self.description.task == pb.TASK_SCORE else embedding_row
        self.heartbeat: pb.Heartbeat | None = pb.Heartbeat()
        self.streams: list[object] = []  # one for each stream that was ever opened
        self.requests: list[pb.InferRequest] = []
        self.arrived = asyncio.Semaphore(0)  # released once per chunk
        self.cancelled = asyncio.Semaphore(0)  # released once per cancel message
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task] = set()

    async def Describe(self, request, context):
        return self.description

    async def InferStream(self, request_iterator, context):
        async for frame in self._stream(request_iterator):
            yield frame

    async def _stream(self, request_iterator) -> AsyncIterator[pb.ReplyFrame]:
        replies: asyncio.Queue[pb.StreamReply | None] = asyncio.Queue()
        self.streams.append(replies)
        reader = asyncio.create_task(self._read(request_iterator, replies))
        heart = asyncio.create_task(self._beat(replies))
        try:
            while (reply := await replies.get()) is not None:
                yield pb.ReplyFrame(replies=[reply])
        finally:
            reader.cancel()
            heart.cancel()

    async def _beat(self, replies) -> None:
        while True:
            if self.heartbeat is not None:
                replies.put_nowait(pb.StreamReply(heartbeat=self.heartbeat))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _read(self, request_iterator, replies) -> None:
        chunks: dict[int, asyncio.Task] = {}
        try:
            async for frame in request_iterator:
                for message in frame.requests:
                    self._accept(message, chunks, replies)
        finally:
            for task in chunks.values():
                task.cancel()
            replies.put_nowait(None)

    def _accept(self, message: pb.StreamRequest, chunks: dict[int, asyncio.Task], replies) -> None:
        number = message.correlation_id
        if message.WhichOneof("body") == "cancel":
            if number in chunks:
                chunks.pop(number).cancel()
            self.cancelled.release()
        else:
            chunks[number] = asyncio.create_task(self._answer(number, message.infer, replies))

    async def _answer(self, number: int, request: pb.InferRequest, replies) -> None:
        self.requests.append(request)
        self.arrived.release()
        await self.gate.wait()
        failure = self.fail(request)
        if failure is not None:
            replies.put_nowait(pb.StreamReply(correlation_id=number, failure=failure))
            return
        replies.put_nowait(pb.StreamReply(correlation_id=number, reply=self.reply_to(request)))

    def reply_to(self, request: pb.InferRequest) -> pb.InferReply:
        ids = decode_tensor(request.token_ids, "token_ids")
        lengths = decode_tensor(request.lengths, "lengths")
        rows = np.stack([self.row_of(request, part) for part in row_ids(request, ids, lengths)])
        return pb.InferReply(rows=encode_tensor(rows), timings=pb.Timings(queue_us=1000, compute_us=2000))

    def row_of(self, request: pb.InferRequest, ids: np.ndarray) -> np.ndarray:
        if request.output == pb.OUTPUT_TOKENS:
            return embedding_row(ids)
        return sign_bits(ids) if request.output == pb.OUTPUT_BITS else self.row(ids)

    async def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """Listen; again, after `stop`, at the same address."""
        if self.carrier == "frames":
            self.address = self.address or f"{ADDRESS_PREFIX}{_new_socket_path()}"
            path = self.address.removeprefix(ADDRESS_PREFIX)
            Path(path).unlink(missing_ok=True)
            self._listener = await asyncio.start_unix_server(self._serve_frames, path)
            return
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
        else:
            assert self._server is not None
            await self._server.stop(None)

    async def _serve_frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        self._connections.add(connection)
        try:
            writer.write(framed(self.description))
            async with contextlib.aclosing(self._stream(_frames_of(reader))) as stream:
                async for frame in stream:
                    writer.write(framed(frame))
                    await writer.drain()
        except (asyncio.CancelledError, ConnectionError):
            pass  # asyncio's streams would complain of either
        finally:
            self._connections.discard(connection)
            writer.transport.abort()


async def _frames_of(reader: asyncio.StreamReader) -> AsyncIterator[pb.RequestFrame]:
    splitter = FrameSplitter()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            for payload in splitter.feed(data):
                yield parse(pb.RequestFrame, payload)


_numbers = itertools.count()


@functools.cache
def _socket_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tulips-"))  # short: a socket's path is
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _new_socket_path() -> Path:
    return _socket_folder() / f"{next(_numbers)}.sock"


def quantizing() -> FakeTulip:
    """A server whose model quantises: it has all outputs."""
    outputs = [pb.OUTPUT_OWN, pb.OUTPUT_INT8, pb.OUTPUT_BITS]
    tulip = FakeTulip(row_dtype=pb.DTYPE_INT8, outputs=outputs)
    tulip.row = quantized_row
    return tulip


@contextlib.asynccontextmanager
async def serving(*tulips: FakeTulip) -> AsyncIterator[tuple[FakeTulip, ...]]:
    """All `tulips` up for as long as the block lasts."""
    for tulip in tulips:
        await tulip.start()
    try:
        yield tulips
    finally:
        for tulip in tulips:
            await tulip.stop()


def failure(code: grpc.StatusCode, message: str = "planned", index: int | None = None) -> pb.Failure:
    """A failure message; `index` is the sequence at fault."""
    return pb.Failure(code=code.value[0], message=message, sequence_index=index)
