"""The neutral types between the dialects and the replicas: what is asked, what is sent, what comes back.

Knows nothing of HTTP, of tokenizers or of gRPC.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Truncation:
    """What to do with an input over the limit. `None` = the server's default."""

    enabled: bool | None = None
    max_tokens: int | None = None  # below the model's own limit; special tokens included
    side: str = "right"  # the side that is cut: "right" or "left"


class Output(enum.Enum):
    """What an embedding is wanted as."""

    OWN = "own"  # the model's own values: float32, or int8 codes where it quantises
    INT8 = "int8"  # the int8 codes of a model that quantises
    BITS = "bits"  # signs, eight to a byte, the first dimension in the most significant bit
    TOKENS = "tokens"  # of servers only: a float32 vector for every token, its last hidden state

    __hash__ = object.__hash__  # a key several times a request: the enum's own is a Python function


class Lane(enum.Enum):
    """Who goes first where requests wait. Inside a lane the order of arrival decides."""

    INTERACTIVE = "interactive"
    BULK = "bulk"  # steps back, but not for longer than its patience

    __hash__ = object.__hash__  # as above


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """An input that the client tokenized itself: ids of the served model, taken verbatim."""

    token_ids: Int32Array
    segment_ids: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """What one side says in a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One input: messages that the model's chat template makes a text of."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the tokenizer's own, around what the template gives
    template_arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that is said, in order."""
        return tuple(message.content for message in self.messages)


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """Texts (or ready ids) to embed, or else a conversation.

    `input_field` is the client's name for its inputs, for messages.
    """

    inputs: tuple[str | TokenIds, ...]
    input_field: str
    deadline: float  # on the event loop's clock, seconds
    truncation: Truncation = Truncation()
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    dimensions_field: str = "dimensions"  # the client's name for it, for messages
    add_special_tokens: bool = True
    output: Output = Output.OWN
    output_field: str = "encoding_format"  # the client's name for it, for messages
    conversation: Conversation | None = None  # instead of inputs

    @property
    def num_inputs(self) -> int:
        """Sequences that it asks for."""
        return len(self.inputs) if self.conversation is None else 1


@dataclass(frozen=True, slots=True)
class DocumentsJob:
    """Documents to embed chunk by chunk, each chunk in view of its whole document.

    `input_field` is the client's name for the documents, for messages.
    """

    documents: tuple[tuple[str, ...], ...]  # the texts of each one's chunks, in order
    input_field: str
    deadline: float
    normalize: bool = False
    dimensions: int | None = None
    dimensions_field: str = "dimensions"
    output: Output = Output.OWN
    output_field: str = "encoding_format"


VectorJob = EmbedJob | DocumentsJob


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Pairs to score. Either `pairs`, or sequences that the client joined itself (`joined`).

    A pair is two texts, or two lists of ids without special tokens. `input_fields` are the client's names of
    the two sides, for error messages.
    """

    pairs: tuple[tuple[str | TokenIds, str | TokenIds], ...]
    joined: tuple[TokenIds, ...]
    input_fields: tuple[str, str]
    deadline: float
    truncation: Truncation = Truncation()
    raw_scores: bool = False
    max_tokens_per_query: int | None = None  # without special tokens, as the next one
    max_tokens_per_document: int | None = None
    instruction: str | None = None  # what a language model is told to look for; `None`: the server's default
    prompt_names: tuple[str | None, str | None] = (None, None)  # of the two sides, where texts are embedded


@dataclass(frozen=True, slots=True)
class ClassifyJob:
    """Texts, pairs of them or ready ids to classify, or else a conversation. Names as in `EmbedJob`."""

    inputs: tuple[str | TokenIds | tuple[str | TokenIds, str | TokenIds], ...]
    input_field: str
    deadline: float
    truncation: Truncation = Truncation()
    raw_scores: bool = False
    instruction: str | None = None  # as in `ScoreJob`, of pairs
    conversation: Conversation | None = None  # instead of inputs

    @property
    def num_inputs(self) -> int:
        """Sequences that it asks for."""
        return len(self.inputs) if self.conversation is None else 1


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """Texts whose tokens somebody wants to see, or else a conversation."""

    texts: tuple[str, ...]
    input_field: str
    deadline: float
    prompt_name: str | None = None
    add_special_tokens: bool = True
    conversation: Conversation | None = None  # instead of texts


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Token ids of the served model to turn back into text."""

    sequences: tuple[TokenIds, ...]
    input_field: str
    deadline: float
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class EncodedInput:
    """One sequence as it will be computed, special tokens included."""

    index: int  # in the job
    token_ids: Int32Array
    segment_ids: Int32Array | None
    truncated: bool
    spans: Int32Array | None = None  # [S, 2]: start and end of what makes each row; None: one row of all

    @property
    def num_tokens(self) -> int:
        """Tokens, special tokens included."""
        return len(self.token_ids)

    def num_rows(self, output: Output) -> int:
        """Rows that a server makes of it."""
        if output is Output.TOKENS:
            return self.num_tokens
        return 1 if self.spans is None else len(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive inputs of one job that travel in one message to one replica; `num_tokens` is its cost."""

    inputs: tuple[EncodedInput, ...]
    output: Output = Output.OWN
    lane: Lane = Lane.INTERACTIVE
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Count once what is asked for several times."""
        object.__setattr__(self, "num_tokens", sum(len(item.token_ids) for item in self.inputs))

    @property
    def num_rows(self) -> int:
        """Rows that a server makes of it."""
        return sum(item.num_rows(self.output) for item in self.inputs)


@dataclass(frozen=True, slots=True)
class PhaseTimings:
    """Where a request's time went, in seconds; queue and inference are means over its chunks."""

    tokenize: float
    queue: float
    inference: float
    total: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost."""

    num_tokens: int  # after truncation, special tokens included
    num_characters: int  # Unicode scalars of the texts; ids count as one each
    num_truncated: int  # inputs that were cut


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingResult:
    """One vector per input, in the order of the job.

    float32 or int8 `[inputs, dimensions]`, or uint8 `[inputs, ceil(dimensions / 8)]` of packed bits.
    """

    vectors: NDArray[Any]
    usage: Usage
    timings: PhaseTimings


@dataclass(frozen=True, slots=True, eq=False)
class NestedResult:
    """Several vectors per input, one input's after the other's, in the order of the job.

    `vectors` `[rows, ...]` are as those of `EmbeddingResult`; `counts` says how many each input has.
    """

    vectors: NDArray[Any]
    counts: tuple[int, ...]
    usage: Usage
    timings: PhaseTimings

    def parts(self) -> list[NDArray[Any]]:
        """The vectors of each input."""
        ends = np.cumsum(self.counts)
        return [
            np.ascontiguousarray(self.vectors[end - n : end])
            for end, n in zip(ends, self.counts, strict=True)
        ]

    def nest(self, values: Iterable[T]) -> list[list[T]]:
        """`values`, one for each vector, by input."""
        following = iter(values)
        return [list(itertools.islice(following, count)) for count in self.counts]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """One score per pair, in the order of the job: `[pairs]`, and the float32 logits they come from."""

    scores: Float32Array
    logits: Float32Array
    usage: Usage
    timings: PhaseTimings


@dataclass(frozen=True, slots=True, eq=False)
class ClassifyResult:
    """Scores of every label, in the order of the job and of the model's labels: `[inputs, labels]`."""

    scores: Float32Array
    logits: Float32Array
    usage: Usage
    timings: PhaseTimings


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its own part of the text, and where that lies, in UTF-8 bytes of prompt and text.

    Special tokens that the template adds lie nowhere: their text is their name.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Every token of one text, uncut, and the vocabulary's own spelling of each."""

    tokens: tuple[Token, ...]
    pieces: tuple[str, ...]
