"""What one sequence and one batch may be, so that nothing impossible ever reaches a device."""

from __future__ import annotations

from dataclasses import dataclass

from rose_engine.batch import Int32Array, Sequence
from rose_engine.errors import InvalidSequence


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of the loaded model on this device, in tokens, ids and sequences."""

    max_length: int  # tokens of one sequence, special tokens included
    vocabulary_size: int
    num_segments: int  # segment ids are 0 .. num_segments - 1
    max_batch_tokens: int
    max_batch_sequences: int

    def check(self, sequence: Sequence) -> None:
        """Raise `InvalidSequence`, naming value and bound, unless the model can take `sequence`."""
        if sequence.num_tokens == 0:
            raise InvalidSequence("a sequence needs at least one token")
        if sequence.num_tokens > self.max_length:
            raise InvalidSequence(f"{sequence.num_tokens} tokens; the model takes at most {self.max_length}")
        _check_range("token id", sequence.token_ids, self.vocabulary_size)
        if sequence.segment_ids is not None:
            if len(sequence.segment_ids) != sequence.num_tokens:
                raise InvalidSequence(
                    f"{len(sequence.segment_ids)} segment ids, {sequence.num_tokens} tokens"
                )
            _check_range("segment id", sequence.segment_ids, self.num_segments)
        if sequence.spans is not None:
            _check_spans(sequence.spans, sequence)


def _check_spans(spans: Int32Array, sequence: Sequence) -> None:
    if sequence.per_token:
        raise InvalidSequence("spans are for pooled rows, not for those of tokens")
    if not len(spans):
        raise InvalidSequence("a sequence with spans needs at least one")
    earlier = 0
    for start, end in spans.tolist():
        if not earlier <= start < end <= sequence.num_tokens:
            bounds = f"of {sequence.num_tokens} tokens, from token {earlier} on"
            raise InvalidSequence(f"span {start} to {end} is empty, out of order or outside: {bounds}")
        earlier = end


def _check_range(what: str, ids: Int32Array, bound: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= bound:
        wrong = lowest if lowest < 0 else highest
        raise InvalidSequence(f"{what} {wrong} is outside 0 to {bound - 1}")
