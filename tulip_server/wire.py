"""A chunk on the wire and in the server: an `InferRequest` as sequences, a result as an `InferReply`.

Knows the byte layout only through `protos.codec`, and nothing of queues or connections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from protos import __version__, codec
from protos.tulip.v1 import inference_pb2 as pb
from rose_engine.batch import Int32Array, Sequence
from rose_engine.description import ModelDescription
from rose_engine.errors import InvalidSequence
from rose_engine.limits import EngineLimits
from tulip_server.chunk import ChunkResult, Lane
from tulip_server.errors import BadChunk

_MICROSECONDS = 1_000_000
_LANES = {pb.LANE_INTERACTIVE: Lane.INTERACTIVE, pb.LANE_BULK: Lane.BULK}
_TASKS = {"embed": pb.TASK_EMBED, "score": pb.TASK_SCORE}


def to_sequences(request: pb.InferRequest, limits: EngineLimits) -> tuple[Sequence, ...]:
    """The request's sequences, as views of its bytes, each one within `limits`.

    Raises `BadChunk`, naming the field and, where there is one, the sequence at fault.
    """
    token_ids_T = _decode_ids(request.token_ids, "token_ids")
    lengths = _decode_ids(request.lengths, "lengths").tolist()  # mostly few: numbers cost less than an array
    segment_ids_T = (
        _decode_ids(request.segment_ids, "segment_ids") if request.HasField("segment_ids") else None
    )
    _check_lengths(lengths, len(token_ids_T), None if segment_ids_T is None else len(segment_ids_T))
    sequences = _split(token_ids_T, segment_ids_T, lengths)
    _check_limits(sequences, token_ids_T, segment_ids_T, max(lengths), limits)
    if request.output == pb.OUTPUT_TOKENS:
        sequences = tuple(replace(sequence, per_token=True) for sequence in sequences)
    return _with_spans(sequences, request, limits) if request.HasField("spans") else sequences


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What an engine's rows hold, and how what a request asks for is cut out of them."""

    dimensions: int  # D
    quantized: bool  # int8 rows: D codes, then the packed bits
    hidden_size: int = 0  # of rows that are tokens' hidden states; 0: the model has none to show

    @classmethod
    def of(cls, description: ModelDescription) -> Self:
        """The format of the rows of the model that is described."""
        hidden_size = description.hidden_size if description.task == "embed" else 0
        return cls(description.dimensions, description.row_dtype == "int8", hidden_size)

    @property
    def outputs(self) -> tuple[pb.Output, ...]:
        """What a request may ask for."""
        quantized = (pb.OUTPUT_INT8, pb.OUTPUT_BITS) if self.quantized else ()
        return (pb.OUTPUT_OWN, *quantized, *((pb.OUTPUT_TOKENS,) if self.hidden_size else ()))

    def check(self, output: pb.Output) -> None:
        """Raise `BadChunk` for an output that this model does not have."""
        if output != pb.OUTPUT_OWN and output not in self.outputs:
            names = ", ".join(pb.Output.Name(known) for known in self.outputs)
            raise BadChunk("output", f"{output} is none of this model's outputs, {names}")

    def check_size(self, sequences: tuple[Sequence, ...]) -> None:
        """Raise `BadChunk` for rows of spans, or of tokens, that together are too large for a reply."""
        first = sequences[0]  # a chunk's sequences are of one kind
        if first.spans is None and not first.per_token:
            return
        num_rows = sum(sequence.num_rows for sequence in sequences)
        row_bytes = 4 * (self.hidden_size if first.per_token else self.dimensions)
        if num_rows * row_bytes > codec.MAX_ROW_BYTES:
            most = codec.MAX_ROW_BYTES // row_bytes
            raise BadChunk("lengths", f"{num_rows} rows, of which one reply holds at most {most}")

    def cut(self, rows: NDArray[Any], output: pb.Output) -> NDArray[Any]:
        """The part of each row that was asked for: values `[R, D]`, or uint8 `[R, ceil(D / 8)]` for bits."""
        if output == pb.OUTPUT_TOKENS:
            return rows
        bits = rows[:, self.dimensions :]
        return bits.view(np.uint8) if output == pb.OUTPUT_BITS else rows[:, : self.dimensions]


def fill_reply(
    reply: pb.InferReply, result: ChunkResult, row_format: RowFormat, output: pb.Output = pb.OUTPUT_OWN
) -> None:
    """Put the rows that were asked for, and the timings, into an empty `reply`."""
    codec.fill_tensor(reply.rows, row_format.cut(result.rows_RD, output))
    reply.timings.queue_us = round(result.queue_seconds * _MICROSECONDS)
    reply.timings.compute_us = round(result.compute_seconds * _MICROSECONDS)


def to_describe_reply(
    description: ModelDescription,
    limits: EngineLimits,
    *,
    model_id: str,
    max_waiting_tokens: int,
    reserved_tokens: int,
    tokenizer_hash: str,
    reference_cosine: float | None,
) -> pb.DescribeReply:
    """What a replica says about itself.

    `tokenizer_hash` is empty where the model has no tokenizer file; `reference_cosine` is `None` where it has
    no reference file.
    """
    return pb.DescribeReply(
        model_id=model_id,
        server_version=__version__,
        task=_TASKS[description.task],
        dimensions=description.dimensions,
        row_dtype=codec.dtype_code(np.dtype(description.row_dtype)),
        pooling=description.pooling,
        normalized=description.normalized,
        max_length=limits.max_length,
        vocabulary_size=limits.vocabulary_size,
        num_segments=limits.num_segments,
        max_batch_tokens=limits.max_batch_tokens,
        max_batch_sequences=limits.max_batch_sequences,
        max_waiting_tokens=max_waiting_tokens,
        reserved_tokens=reserved_tokens,
        dtype=description.dtype,
        device=description.device,
        attention_backend=description.attention_backend,
        tokenizer_hash=tokenizer_hash,
        weights_hash=description.weights_hash,
        outputs=RowFormat.of(description).outputs,
        reference_cosine=reference_cosine,
        hidden_size=description.hidden_size,
    )


def to_lane(request: pb.InferRequest) -> Lane:
    """The lane that the request asks for. Raises `BadChunk` for one that there is not."""
    lane = _LANES.get(request.lane)
    if lane is None:
        raise BadChunk("lane", f"{request.lane} is none of {', '.join(pb.Lane.keys())}")
    return lane


def timeout_seconds(request: pb.InferRequest) -> float:
    """Seconds until nobody wants the answer; infinite when the request sets no deadline."""
    return request.timeout_us / _MICROSECONDS if request.timeout_us else float("inf")


def _decode_ids(tensor: pb.Tensor, field: str, ndim: int = 1) -> Int32Array:
    try:
        return codec.decode_tensor(tensor, field, pb.DTYPE_INT32, ndim)
    except codec.CodecError as error:
        raise BadChunk(field, str(error).removeprefix(f"{field}: ")) from error


def _check_lengths(lengths: list[int], num_tokens: int, num_segment_ids: int | None) -> None:
    if not lengths:
        raise BadChunk("lengths", "a chunk needs at least one sequence")
    if min(lengths) < 1:
        empty = next(index for index, length in enumerate(lengths) if length < 1)
        raise BadChunk("lengths", "a sequence needs at least one token", empty)
    if (total := sum(lengths)) != num_tokens:
        raise BadChunk("lengths", f"their sum is {total}, but there are {num_tokens} token ids")
    if num_segment_ids not in (None, num_tokens):
        raise BadChunk("segment_ids", f"{num_segment_ids} of them, but {num_tokens} token ids")


def _split(
    token_ids_T: Int32Array, segment_ids_T: Int32Array | None, lengths: list[int]
) -> tuple[Sequence, ...]:
    if len(lengths) == 1:
        return (Sequence(token_ids_T, segment_ids_T),)
    stops = [*accumulate(lengths)]
    bounds = zip([0, *stops], stops, strict=False)
    if segment_ids_T is None:
        return tuple([Sequence(token_ids_T[start:stop]) for start, stop in bounds])
    return tuple([Sequence(token_ids_T[start:stop], segment_ids_T[start:stop]) for start, stop in bounds])


def _with_spans(
    sequences: tuple[Sequence, ...], request: pb.InferRequest, limits: EngineLimits
) -> tuple[Sequence, ...]:
    """`sequences`, each with its own of the request's spans, which it can have."""
    spans_S2 = _decode_ids(request.spans, "spans", ndim=2)
    counts_B = _decode_ids(request.span_counts, "span_counts")
    if spans_S2.shape[1] != 2:
        raise BadChunk("spans", f"{spans_S2.shape[1]} numbers each, where a start and an end were expected")
    if len(counts_B) != len(sequences):
        raise BadChunk("span_counts", f"{len(counts_B)} of them, but {len(sequences)} sequences")
    if counts_B.min() < 0 or counts_B.sum(dtype=np.int64) != len(spans_S2):
        raise BadChunk("span_counts", f"they do not add up to the {len(spans_S2)} spans")
    parts = np.split(spans_S2, np.cumsum(counts_B)[:-1])
    spanned = tuple(replace(s, spans=part) for s, part in zip(sequences, parts, strict=True))
    if request.output == pb.OUTPUT_TOKENS or not _in_order(spans_S2, counts_B, sequences):
        raise _bad_chunk("spans", spanned, limits)
    return spanned


def _in_order(spans_S2: Int32Array, counts_B: Int32Array, sequences: tuple[Sequence, ...]) -> bool:
    """Whether every sequence has spans, each of at least one of its tokens, in order and apart."""
    if counts_B.min() < 1:
        return False
    starts_S, ends_S = spans_S2[:, 0], spans_S2[:, 1]
    lengths_S = np.repeat([sequence.num_tokens for sequence in sequences], counts_B)
    earliest_S = np.concatenate([[0], ends_S[:-1]])
    earliest_S[np.cumsum(counts_B)[:-1]] = 0  # of each sequence's first span
    return bool(((earliest_S <= starts_S) & (starts_S < ends_S) & (ends_S <= lengths_S)).all())


def _check_limits(
    sequences: tuple[Sequence, ...],
    token_ids_T: Int32Array,
    segment_ids_T: Int32Array | None,
    longest: int,
    limits: EngineLimits,
) -> None:
    """Check all sequences in one pass over each array; only a chunk at fault is searched for the culprit."""
    if longest > limits.max_length:
        raise _bad_chunk("lengths", sequences, limits)
    if _outside(token_ids_T, limits.vocabulary_size):
        raise _bad_chunk("token_ids", sequences, limits)
    if segment_ids_T is not None and _outside(segment_ids_T, limits.num_segments):
        raise _bad_chunk("segment_ids", sequences, limits)


def _outside(ids_T: Int32Array, bound: int) -> bool:
    # Read as unsigned, a negative id is larger than any bound: one pass instead of two. And to find where the
    # largest is takes a part of what numpy's reductions cost a small array.
    unsigned_T = ids_T.view(np.uint32)
    return bool(unsigned_T[unsigned_T.argmax()] >= bound)


def _bad_chunk(field: str, sequences: tuple[Sequence, ...], limits: EngineLimits) -> BadChunk:
    for index, sequence in enumerate(sequences):
        try:
            limits.check(sequence)
        except InvalidSequence as error:
            return BadChunk(field, str(error), index)
    raise AssertionError(f"{field} out of limits in no sequence: this is a bug")
