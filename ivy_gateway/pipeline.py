"""The one path that every request takes: template, tokenize, chunk, scatter, gather, finish.

All or nothing: the first chunk that fails cancels the others, and the request fails as a whole. Knows
nothing of HTTP or of dialects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ivy_gateway import chunking, metrics, scoring, vectors
from ivy_gateway.config import GatewayConfig
from ivy_gateway.errors import DeadlineExceeded, InferenceFailed, InvalidValue, UnsupportedTask
from ivy_gateway.jobs import (
    Chunk,
    ClassifyJob,
    ClassifyResult,
    EmbeddingResult,
    EmbedJob,
    EncodedInput,
    Output,
    PhaseTimings,
    ScoreJob,
    ScoreResult,
    TokenIds,
    Truncation,
    Usage,
)
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.replica import ChunkRows
from ivy_gateway.replicas import ReplicaPool
from ivy_gateway.templates import apply_prompt
from ivy_gateway.tokenizer import TextTokenizer
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
    """Answers jobs for one model. `config` and `profile` are public: routes read limits and names there."""

    def __init__(
        self, config: GatewayConfig, profile: ModelProfile, tokenizer: TextTokenizer, pool: ReplicaPool
    ) -> None:
        self.config = config
        self.profile = profile
        self.pool = pool
        self._tokenizer = tokenizer

    @property
    def embedding_space(self) -> str:
        """Short hash over weights, prompts, the length limit and what turns text into ids.

        It moves exactly when the vector or score of some text, sent without options, may.
        Raises `Unavailable` before the first replica is ready.
        """
        served = self.pool.description
        prompts: list[Any] = [sorted(self.profile.prompts.items()), self.profile.default_prompt_name]
        if served.task == pb.TASK_SCORE and self._tokenizer.reranker is not None:
            prompts.append([piece.ids for piece in self._tokenizer.default_pair.pieces])
        max_length = min(self.profile.max_length, served.max_length or self.profile.max_length)
        essence = json.dumps([served.weights_hash, self._tokenizer.text_hash, prompts, max_length])
        return hashlib.sha256(essence.encode()).hexdigest()[:16]

    async def embed(self, job: EmbedJob) -> EmbeddingResult:
        """One vector per input, in the job's order.

        Raises the errors of each stage; `UnsupportedTask` for a model that scores pairs.
        """
        if self.pool.description.task != pb.TASK_EMBED:
            raise UnsupportedTask("Model is not an embedding model: it scores pairs (/score, /rerank)")
        with _counted(len(job.inputs)):
            async with _until(job.deadline):
                result = await self._embed(job)
        metrics.job_succeeded(len(job.inputs), result.usage, result.timings)
        return result

    async def score(self, job: ScoreJob) -> ScoreResult:
        """One score per pair, in the job's order: a cross-encoder's, or the cosine of two embeddings.

        Raises the errors of each stage; `UnsupportedTask` for a model with several labels, and for joined
        sequences on a model that embeds.
        """
        num_inputs = len(job.pairs) + len(job.joined)
        embeds = self.pool.description.task == pb.TASK_EMBED
        with _counted(num_inputs):
            async with _until(job.deadline):
                result = await (self._score_by_cosine(job) if embeds else self._score_pairs(job))
        metrics.job_succeeded(num_inputs, result.usage, result.timings)
        return result

    async def classify(self, job: ClassifyJob) -> ClassifyResult:
        """Scores of every label for each text or pair, in the job's order.

        Raises the errors of each stage; `UnsupportedTask` for a model that embeds.
        """
        if self.pool.description.task != pb.TASK_SCORE:
            raise UnsupportedTask("model is not a classifier model: it embeds texts")
        with _counted(len(job.inputs)):
            async with _until(job.deadline):
                result = await self._classify(job)
        metrics.job_succeeded(len(job.inputs), result.usage, result.timings)
        return result

    async def _embed(self, job: EmbedJob) -> EmbeddingResult:
        served = self.pool.description
        if job.dimensions is not None:
            self.profile.dimensions.check(job.dimensions, served.dimensions)
        quantized = pb.OUTPUT_INT8 in served.outputs
        output = vectors.wire_output(job, served.dimensions, quantized=quantized)
        began = _now()
        self.pool.check_admission()
        prompts = apply_prompt(job.inputs, self.profile, job.prompt_name)
        encoded = await self._tokenizer.encode(
            prompts, self._within_limit(job.truncation), self.config.auto_truncate, job.input_field
        )
        tokenized = _now()
        rows = await self._compute(encoded, job.deadline, output)
        finished = vectors.finish(rows.rows, job, already_normalized=served.normalized)
        return EmbeddingResult(finished, _usage(encoded, job.inputs), _timings(began, tokenized, rows))

    async def _score_pairs(self, job: ScoreJob) -> ScoreResult:
        if (num_labels := self.pool.description.dimensions) != 1:
            raise UnsupportedTask(f"model is not a re-ranker model: it has {num_labels} labels")
        began = _now()
        self.pool.check_admission()
        encoded = await self._encode_pairs(job)
        tokenized = _now()
        rows = await self._compute(encoded, job.deadline)
        logits = rows.rows[:, 0].astype(np.float32)
        scores = logits if job.raw_scores else scoring.activate(logits, self.profile.score_activation)
        texts = [text for pair in job.pairs for text in pair] + list(job.joined)
        return ScoreResult(scores, logits, _usage(encoded, texts), _timings(began, tokenized, rows))

    async def _classify(self, job: ClassifyJob) -> ClassifyResult:
        began = _now()
        self.pool.check_admission()
        encoded = await self._encode_texts_and_pairs(job)
        tokenized = _now()
        rows = await self._compute(encoded, job.deadline)
        logits = rows.rows.astype(np.float32)
        scores = logits if job.raw_scores else scoring.activate(logits, self.profile.score_activation)
        texts = [text for item in job.inputs for text in (item if isinstance(item, tuple) else (item,))]
        return ClassifyResult(scores, logits, _usage(encoded, texts), _timings(began, tokenized, rows))

    async def _encode_texts_and_pairs(self, job: ClassifyJob) -> list[EncodedInput]:
        truncation, default = self._within_limit(job.truncation), self.config.auto_truncate
        prompts = apply_prompt(job.inputs, self.profile)
        texts = [prompt for prompt in prompts if prompt.second is None]
        pairs = [prompt for prompt in prompts if prompt.second is not None]
        fields = (job.input_field, job.input_field)
        encoded = await self._tokenizer.encode(texts, truncation, default, job.input_field) if texts else []
        encoded += await self._tokenizer.encode_pairs(pairs, truncation, default, fields) if pairs else []
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
        )

    async def _score_by_cosine(self, job: ScoreJob) -> ScoreResult:
        if job.joined or any(isinstance(text, TokenIds) for pair in job.pairs for text in pair):
            raise UnsupportedTask("token ids to score need a cross-encoder; this model embeds texts")
        _refuse_instruction(job.instruction, "is not supported with this model, which embeds texts")
        began = _now()
        self.pool.check_admission()
        left, right = ([pair[side] for pair in job.pairs] for side in (0, 1))
        encoded_left, places_left = await self._encode_distinct(
            left, self._query_truncation(job), job.input_fields[0]
        )
        encoded_right, places_right = await self._encode_distinct(right, job.truncation, job.input_fields[1])
        encoded = [replace(item, index=i) for i, item in enumerate(encoded_left + encoded_right)]
        tokenized = _now()
        rows = await self._compute(encoded, job.deadline)
        left_ND = rows.rows[places_left]
        right_ND = rows.rows[len(encoded_left) + places_right]
        scores = scoring.cosine(left_ND, right_ND)
        return ScoreResult(scores, scores, _usage(encoded, [*left, *right]), _timings(began, tokenized, rows))

    async def _encode_distinct(
        self, texts: Sequence[str | TokenIds], truncation: Truncation, field: str
    ) -> tuple[list[EncodedInput], NDArray[np.intp]]:
        """Each different text once, and for every text its place among them."""
        firsts, places = scoring.distinct(texts)
        prompts = apply_prompt(texts, self.profile)
        encoded = await self._tokenizer.encode(
            [prompts[i] for i in firsts], self._within_limit(truncation), self.config.auto_truncate, field
        )
        return encoded, places

    def _query_truncation(self, job: ScoreJob) -> Truncation:
        if job.max_tokens_per_query is None:
            return job.truncation
        limit = job.max_tokens_per_query + self._tokenizer.special_counts[0]
        return replace(
            job.truncation, enabled=True, max_tokens=min(limit, job.truncation.max_tokens or limit)
        )

    async def _compute(
        self, encoded: Sequence[EncodedInput], deadline: float, output: Output = Output.OWN
    ) -> _Rows:
        """Split, scatter over the replicas, gather in order. Raises `InferenceFailed` for non-finite rows."""
        cost = sum(item.num_tokens for item in encoded)
        parts = min(self.pool.num_ready, cost // MIN_PART_TOKENS)
        with self.pool.admitted(cost):
            chunks = chunking.split(
                encoded, self.config.max_chunk_tokens, self.config.max_chunk_inputs, max(1, parts), output
            )
            answers = await self._scatter(chunks, deadline)
        rows = chunking.merge([answer.rows for answer in answers], chunks)
        _check_finite(rows)
        queue = sum(answer.queue for answer in answers) / len(answers)
        return _Rows(rows, queue, sum(answer.inference for answer in answers) / len(answers))

    async def _scatter(self, chunks: Sequence[Chunk], deadline: float) -> list[ChunkRows]:
        if len(chunks) == 1:
            return [await self.pool.infer(chunks[0], deadline)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.pool.infer(chunk, deadline)) for chunk in chunks]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _within_limit(self, truncation: Truncation) -> Truncation:
        """Tighten `truncation` where the servers accept less than the model's own files allow."""
        served = self.pool.description.max_length
        if not served or served >= self.profile.max_length:
            return truncation
        return replace(truncation, max_tokens=min(served, truncation.max_tokens or served))


def _refuse_instruction(instruction: str | None, reason: str) -> None:
    if instruction is not None:
        raise InvalidValue(f"`instruction` {reason}", "instruction")


def _check_finite(rows_ND: NDArray[Any]) -> None:
    if rows_ND.dtype.kind != "f":
        return
    finite_N = np.isfinite(rows_ND).all(axis=1)
    if not finite_N.all():
        bad = np.flatnonzero(~finite_N)
        metrics.non_finite_rows(len(bad))
        shown = ", ".join(str(index) for index in bad[:20])
        raise InferenceFailed(f"the model gave values that are not finite for input {shown}")


def _usage(encoded: Sequence[EncodedInput], inputs: Sequence[str | TokenIds]) -> Usage:
    return Usage(
        num_tokens=sum(item.num_tokens for item in encoded),
        num_characters=sum(len(i) if isinstance(i, str) else len(i.token_ids) for i in inputs),
        num_truncated=sum(item.truncated for item in encoded),
    )


def _timings(began: float, tokenized: float, rows: _Rows) -> PhaseTimings:
    return PhaseTimings(tokenized - began, rows.queue, rows.inference, _now() - began)


@contextlib.contextmanager
def _counted(num_inputs: int) -> Iterator[None]:
    metrics.job_started(num_inputs)
    try:
        yield
    finally:
        metrics.job_ended(num_inputs)


@contextlib.asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """Leave the block at `deadline` with `DeadlineExceeded`."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the request was done") from None


def _now() -> float:
    return asyncio.get_running_loop().time()
