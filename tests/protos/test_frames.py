import random

import pytest

from protos.frames import FrameError, FrameSplitter, framed, parse
from protos.tulip.v1 import inference_pb2 as pb


def frames(sizes):
    return [
        pb.RequestFrame(
            requests=[
                pb.StreamRequest(
                    correlation_id=i, infer=pb.InferRequest(token_ids=pb.Tensor(data=bytes([i % 256]) * size))
                )
            ]
        )
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_pieces_the_bytes_come_in_the_same_frames_come_out(seed):
    drawn = random.Random(seed)
    sent = frames(drawn.choice((0, 1, 7, 300, 70_000)) for _ in range(drawn.randint(1, 12)))
    stream = b"".join(framed(frame) for frame in sent)
    splitter, received = FrameSplitter(), []
    while stream:
        size = drawn.choice((1, 2, 3, 5, 64, 4096, len(stream)))
        received += splitter.feed(stream[:size])
        stream = stream[size:]
    assert [parse(pb.RequestFrame, payload) for payload in received] == sent


def test_an_empty_message_is_a_frame():
    assert FrameSplitter().feed(framed(pb.ReplyFrame()) * 2) == [b"", b""]


def test_a_frame_is_there_as_soon_as_its_last_byte_is():
    stream, splitter = framed(frames([5])[0]), FrameSplitter()
    assert all(not splitter.feed(stream[i : i + 1]) for i in range(len(stream) - 1))
    assert splitter.feed(stream[-1:]) == [stream[4:]]


def test_a_length_beyond_the_limit_is_refused_before_the_bytes_come():
    splitter = FrameSplitter(max_bytes=100)
    assert splitter.feed((100).to_bytes(4, "little") + bytes(100)) == [bytes(100)]
    with pytest.raises(FrameError, match="101 bytes; the limit is 100"):
        splitter.feed((101).to_bytes(4, "little"))


def test_bytes_that_are_no_message_are_named():
    with pytest.raises(FrameError, match="RequestFrame"):
        parse(pb.RequestFrame, b"\xff\xff\xff")
