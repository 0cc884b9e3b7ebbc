"""The one path that every request takes: template, tokenize, chunk, scatter, gather, finish.

All or nothing: the first chunk that fails cancels the others, and the request fails as a whole. Knows
nothing of HTTP or of dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway import chunking, faults, metrics, request_context, scoring, tracing, vectors
from ivy_gateway.admission import Admission, AdmissionLimits, Ticket
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidValue,
    Overloaded,
    TooManyInputs,
    UnsupportedTask,
)
from ivy_gateway.foreign_vocabulary import ForeignVocabulary
from ivy_gateway.jobs import (
    Chunk,
    ClassifyJob,
    ClassifyResult,
    Conversation,
    DecodeJob,
    DocumentsJob,
    EmbeddingResult,
    EmbedJob,
    EncodedInput,
    Lane,
    NestedResult,
    Output,
    PhaseTimings,
    ScoreJob,
    ScoreResult,
    TokenIds,
    TokenizedText,
    TokenizeJob,
    Truncation,
    Usage,
)
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.replicas import ReplicaPool
from ivy_gateway.templates import JobInput, apply_prompt
from ivy_gateway.tokenizer import TextTokenizer, num_characters
from ivy_gateway.wire import ChunkRows
from protos.codec import MAX_ROW_BYTES
from protos.stamps import stamp
from protos.tulip.v1 import inference_pb2 as pb

# A request is spread over idle replicas while each part keeps at least this many tokens: below that, a second
# message costs more than the shorter computation saves.
MIN_PART_TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What came back for one job: rows in its order, and the mean seconds of its chunks by phase."""

    rows: NDArray[Any]
    queue: float
    inference: float


class Pipeline:
    """Answers jobs for one model. `config` and `profile` are public: routes read limits and names there.

    `foreign_vocabulary`: what routes read other models' token ids by, where the operator wants that.
    """

    def __init__(
        self,
        config: GatewayConfig,
        profile: ModelProfile,
        tokenizer: TextTokenizer,
        pool: ReplicaPool,
        foreign_vocabulary: ForeignVocabulary | None = None,
    ) -> None:
        self.config = config
        self.profile = profile
        self.pool = pool
        self.foreign_vocabulary = foreign_vocabulary
        self.admission = Admission(AdmissionLimits.of(config), time.monotonic)
        self._tokenizer = tokenizer
        self._space_of: pb.DescribeReply | None = None  # the description that `_space` was made of
        self._space = ""

    @property
    def embeds(self) -> bool:
        """Whether the model gives vectors, not scores. Raises `Unavailable` before a replica is ready."""
        return self.pool.description.task == pb.TASK_EMBED

    @property
    def embedding_space(self) -> str:
        """Short hash over weights, prompts, the length limit and what turns text into ids.

        It moves exactly when the vector or score of some text, sent without options, may.
        Raises `Unavailable` before the first replica is ready.
        """
        served = self.pool.description
        if served is not self._space_of:
            self._space_of, self._space = served, self._hashed_space(served)
        return self._space

    def _hashed_space(self, served: pb.DescribeReply) -> str:
        prompts: list[Any] = [sorted(self.profile.prompts.items()), self.profile.default_prompt_name]
        if served.task == pb.TASK_SCORE and self._tokenizer.reranker is not None:
            prompts.append([piece.ids for piece in self._tokenizer.default_pair.pieces])
        if not self.profile.include_prompt:
            prompts.append("left out of pooling")
        max_length = min(self.profile.max_length, served.max_length or self.profile.max_length)
        essence = json.dumps([served.weights_hash, self._tokenizer.text_hash, prompts, max_length])
        return hashlib.sha256(essence.encode()).hexdigest()[:16]

    async def embed(self, job: EmbedJob) -> EmbeddingResult:
        """One vector per input, in the job's order.

        Raises the errors of each stage; `UnsupportedTask` for a model that scores pairs.
        """
        return (await self.embed_as(job, (job.output,)))[job.output]

    async def embed_as(self, job: EmbedJob, outputs: Sequence[Output]) -> dict[Output, EmbeddingResult]:
        """As `embed`, in each of `outputs`; computed more than once only where servers quantise.

        Every result states the usage and the timings of the whole.
        """
        if not self.embeds:
            raise UnsupportedTask("Model is not an embedding model: it scores pairs (/score, /rerank)")
        async with self._accepted(job.num_inputs, _said(job), job.deadline) as ticket:
            results = await self._embed(job, outputs, ticket)
        any_result = next(iter(results.values()))
        metrics.job_succeeded(job.num_inputs, any_result.usage, any_result.timings)
        return results

    async def embed_documents(self, job: DocumentsJob) -> NestedResult:
        """One vector per chunk of each document, in the job's order.

        Raises the errors of each stage; `UnsupportedTask` for a model that is not contextual.
        """
        if self.profile.separator is None or not self.embeds:
            raise UnsupportedTask("model is not a contextual embedding model: it embeds texts one by one")
        async with self._accepted(
            len(job.documents), itertools.chain(*job.documents), job.deadline
        ) as ticket:
            result = await self._embed_documents(job, ticket)
        metrics.job_succeeded(len(job.documents), result.usage, result.timings)
        return result

    async def embed_tokens(self, job: EmbedJob) -> NestedResult:
        """One vector per token of each input: hidden states, cut and normalised only where the job says so.

        Raises the errors of each stage; `UnsupportedTask` for a model that scores pairs, `TooManyInputs` for
        more vectors than one reply may hold.
        """
        if pb.OUTPUT_TOKENS not in self.pool.description.outputs:
            raise UnsupportedTask("Model is not an embedding model: it has no vectors of tokens")
        async with self._accepted(job.num_inputs, _said(job), job.deadline) as ticket:
            result = await self._embed_tokens(job, ticket)
        metrics.job_succeeded(job.num_inputs, result.usage, result.timings)
        return result

    async def score(self, job: ScoreJob) -> ScoreResult:
        """One score per pair, in the job's order: a cross-encoder's, or the cosine of two embeddings.

        Raises the errors of each stage; `UnsupportedTask` for a model with several labels, and for joined
        sequences on a model that embeds.
        """
        num_inputs = len(job.pairs) + len(job.joined)
        embeds = self.embeds
        async with self._accepted(num_inputs, (*job.pairs, *job.joined), job.deadline) as ticket:
            score = self._score_by_cosine if embeds else self._score_pairs
            result = await score(job, ticket)
        metrics.job_succeeded(num_inputs, result.usage, result.timings)
        return result

    async def classify(self, job: ClassifyJob) -> ClassifyResult:
        """Scores of every label for each text or pair, in the job's order.

        Raises the errors of each stage; `UnsupportedTask` for a model that embeds.
        """
        if self.embeds:
            raise UnsupportedTask("model is not a classifier model: it embeds texts")
        async with self._accepted(job.num_inputs, _said(job), job.deadline) as ticket:
            result = await self._classify(job, ticket)
        metrics.job_succeeded(job.num_inputs, result.usage, result.timings)
        return result

    async def tokenize(self, job: TokenizeJob) -> list[TokenizedText]:
        """The tokens of each text behind its prompt; no server is asked. Raises what the tokenizer raises."""
        prompts = apply_prompt(job.texts, self.profile, job.prompt_name)
        async with _until(job.deadline):
            if job.conversation is not None:
                return [await self._tokenizer.tokenize_chat(job.conversation, job.input_field)]
            return await self._tokenizer.tokenize(
                prompts, job.input_field, add_special_tokens=job.add_special_tokens
            )

    async def decode(self, job: DecodeJob) -> list[str]:
        """The text of each sequence of ids; no server is asked. Raises what the tokenizer raises."""
        async with _until(job.deadline):
            return await self._tokenizer.decode(
                job.sequences, job.input_field, skip_special_tokens=job.skip_special_tokens
            )

    async def _embed(
        self, job: EmbedJob, outputs: Sequence[Output], ticket: Ticket
    ) -> dict[Output, EmbeddingResult]:
        served = self.pool.description
        if job.dimensions is not None:
            self.profile.dimensions.check(job.dimensions, served.dimensions, job.dimensions_field)
        jobs = [job if output is job.output else replace(job, output=output) for output in outputs]
        quantized = pb.OUTPUT_INT8 in served.outputs
        wired = vectors.wire_outputs(jobs, served.dimensions, quantized=quantized)
        began = time.monotonic()
        encoded = await self._encode_texts(job)
        tokenized = time.monotonic()
        rows: dict[Output, _Rows] = {}
        for wire in dict.fromkeys(wired):
            rows[wire] = await self._compute(encoded, job.deadline, ticket, wire)
        usage, timings = _usage(encoded, ticket), _timings(began, tokenized, *rows.values())
        results = {}
        for wanted, wire in zip(jobs, wired, strict=True):
            vectors_ND = vectors.finish(rows[wire].rows, wanted, already_normalized=served.normalized)
            results[wanted.output] = EmbeddingResult(vectors_ND, usage, timings)
        return results

    async def _embed_documents(self, job: DocumentsJob, ticket: Ticket) -> NestedResult:
        served = self.pool.description
        if job.dimensions is not None:
            self.profile.dimensions.check(job.dimensions, served.dimensions, job.dimensions_field)
        quantized = pb.OUTPUT_INT8 in served.outputs
        output = vectors.wire_output(job, served.dimensions, quantized=quantized)
        began = time.monotonic()
        encoded = await self._tokenizer.encode_documents(
            job.documents, served.max_length or None, job.input_field
        )
        tokenized = time.monotonic()
        rows = await self._compute(encoded, job.deadline, ticket, output)
        finished = vectors.finish(rows.rows, job, already_normalized=served.normalized)
        usage = _usage(encoded, ticket)
        return NestedResult(finished, _counts(encoded, output), usage, _timings(began, tokenized, rows))

    async def _embed_tokens(self, job: EmbedJob, ticket: Ticket) -> NestedResult:
        width = self.pool.description.hidden_size
        vectors.wire_output(job, width, quantized=False)  # refuses what hidden states cannot be
        began = time.monotonic()
        encoded = await self._encode_texts(job)
        _check_fits_reply(encoded, width, job.input_field)
        tokenized = time.monotonic()
        rows = await self._compute(encoded, job.deadline, ticket, Output.TOKENS)
        finished = vectors.finish(rows.rows, job, already_normalized=False)
        counts, usage = _counts(encoded, Output.TOKENS), _usage(encoded, ticket)
        return NestedResult(finished, counts, usage, _timings(began, tokenized, rows))

    async def _encode_texts(self, job: EmbedJob) -> list[EncodedInput]:
        if job.conversation is not None:
            return [await self._encode_chat(job.conversation, job.truncation, job.input_field)]
        return await self._tokenizer.encode(
            apply_prompt(job.inputs, self.profile, job.prompt_name),
            self._within_limit(job.truncation),
            self.config.auto_truncate,
            job.input_field,
            add_special_tokens=job.add_special_tokens,
        )

    async def _encode_chat(self, chat: Conversation, truncation: Truncation, field: str) -> EncodedInput:
        return await self._tokenizer.encode_chat(
            chat, self._within_limit(truncation), self.config.auto_truncate, field
        )

    async def _score_pairs(self, job: ScoreJob, ticket: Ticket) -> ScoreResult:
        if (num_labels := self.pool.description.dimensions) != 1:
            raise UnsupportedTask(f"model is not a re-ranker model: it has {num_labels} labels")
        began = time.monotonic()
        encoded = await self._encode_pairs(job)
        tokenized = time.monotonic()
        rows = await self._compute(encoded, job.deadline, ticket)
        logits = rows.rows[:, 0].astype(np.float32)
        scores = logits if job.raw_scores else scoring.activate(logits, self.profile.score_activation)
        return ScoreResult(scores, logits, _usage(encoded, ticket), _timings(began, tokenized, rows))

    async def _classify(self, job: ClassifyJob, ticket: Ticket) -> ClassifyResult:
        began = time.monotonic()
        if job.conversation is None:
            encoded = await self._encode_texts_and_pairs(job)
        else:
            encoded = [await self._encode_chat(job.conversation, job.truncation, job.input_field)]
        tokenized = time.monotonic()
        rows = await self._compute(encoded, job.deadline, ticket)
        logits = rows.rows.astype(np.float32)
        scores = logits if job.raw_scores else scoring.activate(logits, self.profile.score_activation)
        return ClassifyResult(scores, logits, _usage(encoded, ticket), _timings(began, tokenized, rows))

    async def _encode_texts_and_pairs(self, job: ClassifyJob) -> list[EncodedInput]:
        truncation, default = self._within_limit(job.truncation), self.config.auto_truncate
        prompts = apply_prompt(job.inputs, self.profile)
        texts = [prompt for prompt in prompts if prompt.second is None]
        pairs = [prompt for prompt in prompts if prompt.second is not None]
        fields = (job.input_field, job.input_field)
        encoded = await self._tokenizer.encode(texts, truncation, default, job.input_field) if texts else []
        if texts:
            _refuse_instruction(job.instruction, "goes into pairs of texts; a lone text takes none")
        if pairs:
            encoded += await self._tokenizer.encode_pairs(
                pairs, truncation, default, fields, instruction=job.instruction
            )
        return sorted(encoded, key=lambda item: item.index)

    async def _encode_pairs(self, job: ScoreJob) -> list[EncodedInput]:
        truncation, default = self._within_limit(job.truncation), self.config.auto_truncate
        if job.joined:
            _refuse_instruction(job.instruction, "goes into pairs; ready-joined sequences have their own")
            prompts = apply_prompt(job.joined, self.profile)
            return await self._tokenizer.encode(prompts, truncation, default, job.input_fields[1])
        return await self._tokenizer.encode_pairs(
            apply_prompt(job.pairs, self.profile),
            truncation,
            default,
            job.input_fields,
            job.max_tokens_per_query,
            job.instruction,
            job.max_tokens_per_document,
        )

    async def _score_by_cosine(self, job: ScoreJob, ticket: Ticket) -> ScoreResult:
        if job.joined or any(isinstance(text, TokenIds) for pair in job.pairs for text in pair):
            raise UnsupportedTask("token ids to score need a cross-encoder; this model embeds texts")
        _refuse_instruction(job.instruction, "is not supported with this model, which embeds texts")
        began = time.monotonic()
        left, right = ([pair[side] for pair in job.pairs] for side in (0, 1))
        limits = (job.max_tokens_per_query, job.max_tokens_per_document)
        (encoded_left, places_left), (encoded_right, places_right) = [
            await self._encode_distinct(texts, self._limited(job.truncation, limit), name, field)
            for texts, limit, name, field in zip(
                (left, right), limits, job.prompt_names, job.input_fields, strict=True
            )
        ]
        encoded = [replace(item, index=i) for i, item in enumerate(encoded_left + encoded_right)]
        tokenized = time.monotonic()
        rows = await self._compute(encoded, job.deadline, ticket)
        left_ND = rows.rows[places_left]
        right_ND = rows.rows[len(encoded_left) + places_right]
        scores = scoring.cosine(left_ND, right_ND)
        return ScoreResult(scores, scores, _usage(encoded, ticket), _timings(began, tokenized, rows))

    async def _encode_distinct(
        self, texts: Sequence[str | TokenIds], truncation: Truncation, prompt_name: str | None, field: str
    ) -> tuple[list[EncodedInput], NDArray[np.intp]]:
        """Each different text once, and for every text its place among them."""
        firsts, places = scoring.distinct(texts)
        prompts = apply_prompt(texts, self.profile, prompt_name)
        encoded = await self._tokenizer.encode(
            [prompts[i] for i in firsts], self._within_limit(truncation), self.config.auto_truncate, field
        )
        return encoded, places

    def _limited(self, truncation: Truncation, max_tokens: int | None) -> Truncation:
        """Tighten `truncation` of lone texts to `max_tokens` without special tokens, where that is given."""
        if max_tokens is None:
            return truncation
        limit = max_tokens + self._tokenizer.special_counts[0]
        return replace(truncation, enabled=True, max_tokens=min(limit, truncation.max_tokens or limit))

    async def _compute(
        self, encoded: Sequence[EncodedInput], deadline: float, ticket: Ticket, output: Output = Output.OWN
    ) -> _Rows:
        """Split, scatter over the replicas, gather in order. Raises `InferenceFailed` for non-finite rows."""
        stamp("gateway.tokenized")
        cost = sum(item.num_tokens for item in encoded)
        ticket.correct(cost)
        parts = cost // MIN_PART_TOKENS
        if parts > 1:
            parts = min(parts, self.pool.num_ready)
        limits = (self.config.max_chunk_tokens, self.config.max_chunk_inputs)
        chunks = chunking.split(encoded, *limits, max(1, parts), output, ticket.lane)
        answers = await self._scatter(chunks, deadline)
        stamp("gateway.gathered")
        rows = chunking.merge([answer.rows for answer in answers], chunks)
        faults.point("post")
        _check_finite(rows, encoded, output)
        queue, inference = _seconds(answers)
        return _Rows(rows, queue / len(answers), inference / len(answers))

    async def _scatter(self, chunks: Sequence[Chunk], deadline: float) -> list[ChunkRows]:
        if len(chunks) == 1:
            return [await self._infer(chunks[0], deadline)]
        window = asyncio.Semaphore(self._window(chunks))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._infer_in_turn(chunk, deadline, window)) for chunk in chunks]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _window(self, chunks: Sequence[Chunk]) -> int:
        """How many of one request's chunks servers have at a time: a large request must not fill them."""
        if chunks[0].lane is Lane.INTERACTIVE:
            return len(chunks)
        return self.config.bulk_window * max(1, self.pool.num_ready)

    async def _infer_in_turn(self, chunk: Chunk, deadline: float, window: asyncio.Semaphore) -> ChunkRows:
        async with window:
            return await self._infer(chunk, deadline)

    async def _infer(self, chunk: Chunk, deadline: float) -> ChunkRows:
        with tracing.chunk_span(chunk.num_tokens, len(chunk.inputs)):
            rows = await self.pool.infer(chunk, deadline)
        self.admission.done(chunk.num_tokens)
        return rows

    def _accepted(self, num_inputs: int, said: Iterable[JobInput], deadline: float) -> _Accepted:
        """Count a job, from before its texts are tokenized, and leave the block at its deadline.

        Raises `Overloaded` where there is too much work already, and `DeadlineExceeded`.
        """
        stamp("gateway.job")
        asked = request_context.current().lane
        ticket = self.admission.admitted(asked, num_inputs, num_characters(said))
        return _Accepted(ticket, num_inputs, deadline)

    def _within_limit(self, truncation: Truncation) -> Truncation:
        """Tighten `truncation` where the servers accept less than the model's own files allow."""
        served = self.pool.description.max_length
        if not served or served >= self.profile.max_length:
            return truncation
        return replace(truncation, max_tokens=min(served, truncation.max_tokens or served))


class _Accepted:
    """What `Pipeline._accepted` gives; neither a generator nor `asyncio.timeout`, as each request has one."""

    __slots__ = ("_cancelling", "_deadline", "_is_late", "_num_inputs", "_task", "_ticket", "_timer")

    _cancelling: int
    _task: asyncio.Task[Any]
    _timer: asyncio.TimerHandle

    def __init__(self, ticket: Ticket, num_inputs: int, deadline: float) -> None:
        self._ticket = ticket
        self._num_inputs = num_inputs
        self._deadline = deadline
        self._is_late = False

    async def __aenter__(self) -> Ticket:
        metrics.job_started(self._num_inputs)
        try:
            self._ticket.__enter__()
        except Overloaded:
            metrics.job_ended(self._num_inputs)
            raise
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._timer = task.get_loop().call_at(self._deadline, self._end_late)
        return self._ticket

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        self._ticket.__exit__()
        metrics.job_ended(self._num_inputs)
        if self._is_late and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise _late() from None

    def _end_late(self) -> None:
        self._is_late = True
        self._task.cancel()


def _refuse_instruction(instruction: str | None, reason: str) -> None:
    if instruction is not None:
        raise InvalidValue(f"`instruction` {reason}", "instruction")


def _counts(encoded: Sequence[EncodedInput], output: Output) -> tuple[int, ...]:
    return tuple(item.num_rows(output) for item in encoded)


def _check_fits_reply(encoded: Sequence[EncodedInput], width: int, field: str) -> None:
    """Raise `TooManyInputs` for more tokens than one reply may hold vectors of."""
    most = MAX_ROW_BYTES // (4 * width)
    num_tokens = sum(item.num_tokens for item in encoded)
    if num_tokens > most:
        raise TooManyInputs(
            f"`{field}`: {num_tokens} tokens, of which one reply holds the vectors of {most} at most", field
        )


def _check_finite(rows_RD: NDArray[Any], encoded: Sequence[EncodedInput], output: Output) -> None:
    if rows_RD.dtype.kind != "f":
        return
    finite_RD = np.isfinite(rows_RD)
    if not finite_RD.all():
        wrong_R = ~finite_RD.all(axis=1)
        bad = np.unique(np.repeat(np.arange(len(encoded)), _counts(encoded, output))[wrong_R])
        metrics.non_finite_rows(len(bad))
        shown = ", ".join(str(index) for index in bad[:20])
        raise InferenceFailed(f"the model gave values that are not finite for input {shown}")


def _said(job: EmbedJob | ClassifyJob) -> Sequence[JobInput]:
    """What a job's characters are counted in."""
    return job.inputs if job.conversation is None else job.conversation.texts


def _usage(encoded: Sequence[EncodedInput], ticket: Ticket) -> Usage:
    num_tokens = num_truncated = 0
    for item in encoded:
        num_tokens += len(item.token_ids)
        num_truncated += item.truncated
    return Usage(num_tokens, ticket.num_characters, num_truncated)


def _timings(began: float, tokenized: float, *passes: _Rows) -> PhaseTimings:
    tracing.tokenized(began, tokenized)
    return PhaseTimings(tokenized - began, *_seconds(passes), time.monotonic() - began)


def _seconds(answers: Iterable[ChunkRows | _Rows]) -> tuple[float, float]:
    """All that `answers` spent in queues, and under computation."""
    queue = inference = 0.0
    for answer in answers:
        queue += answer.queue
        inference += answer.inference
    return queue, inference


@contextlib.asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """Leave the block at `deadline` with `DeadlineExceeded`."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise _late() from None


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the request was done")
