"""From prompts to token ids: a pool of threads over one fast tokenizer that is never reconfigured.

Ids are cut, never texts, and special tokens are put around what is left, so that neither a cut nor two
requests at once can lose or move one. Knows nothing of prompts' names, of chunks or of HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
from tokenizers import Tokenizer

from ivy_gateway import faults
from ivy_gateway.chat_template import ChatTemplate, RenderedChat
from ivy_gateway.chat_tokens import ChatTokens
from ivy_gateway.compiled_tokenizer.encoder import FastEncoder, NoEncoder, NotUnicode, fast_encoder
from ivy_gateway.errors import InvalidValue, StartupError
from ivy_gateway.framing import can_frame, encode_documents, encode_texts
from ivy_gateway.jobs import (
    Conversation,
    EncodedInput,
    Int32Array,
    TokenIds,
    TokenizedText,
    Truncation,
)
from ivy_gateway.model_profile import uses_segments
from ivy_gateway.reranker_template import RerankerTemplate
from ivy_gateway.special_tokens import Json, Template, Templates, control_tokens, literal_form
from ivy_gateway.templates import JobInput, Prompt, RerankerForm, Text, apply_form
from ivy_gateway.token_offsets import special_tokens, tokenized
from ivy_gateway.truncation import (
    Cut,
    PairLimits,
    checked_lengths,
    fit_document,
    fit_pair,
    fit_ready,
    fit_text,
    join,
)
from protos.fingerprint import tokenizer_hash

logger = logging.getLogger(__name__)

_INLINE_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class _Speed:
    """Sizes in characters, for what encodes.

    Up to `inline_characters` one call takes 60 us (the library, BERT and XLM-R files, one core) to 150 us
    (Qwen3's by the compiled encoder; four times that in Chinese), and a hop to a thread and back 55 us, but
    260 us from a loop that stays awake: encode at once. Of a thread's part: below `min_part` hops cost more
    than a second thread saves; above `max_part` (about 6 ms) others wait too long.
    """

    inline_characters: int
    min_part: int
    max_part: int


_LIBRARY = _Speed(256, 2048, 32768)
_FAST = _Speed(3072, 16384, 262144)

S = TypeVar("S")
T = TypeVar("T")

_PROBES = ("", "a", "The quick brown fox, 1984!", "Zürich 東京 🙂", " lead and trail ")


def num_characters(inputs: Iterable[JobInput]) -> int:
    """Unicode scalars of all texts of a job; ready ids count as one each."""
    return sum(sum(map(_size, item)) if isinstance(item, tuple) else _size(item) for item in inputs)


class TextTokenizer:
    """A model's tokenizer for many requests at once. Make it by `load`; `close` ends its threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Templates,
        *,
        hash: str,  # noqa: A002 - the server's word for it too
        text_hash: str,
        vocabulary_size: int,
        max_length: int,
        workers: int,
        lower_case: bool,
        names: Mapping[int, str],  # of special tokens
        file: Path,
        separator: int | None = None,
        reranker: RerankerTemplate | None = None,
        chat: ChatTemplate | None = None,
        instruction: str = "",
        fast: FastEncoder | None = None,
    ) -> None:
        self.template = template
        self.reranker = reranker
        self.hash = hash
        self.text_hash = text_hash
        self.vocabulary_size = vocabulary_size
        self.max_length = max_length
        self.special_counts = (template.single.num_special, template.pair.num_special)
        self._tokenizer = tokenizer
        self._fast = fast
        self._workers = workers
        self._lower_case = lower_case
        self._separator = separator
        self._chat = chat
        self._names = names
        self._file = file
        self._decoder: Future[Tokenizer] | None = None
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self.default_pair = template.pair if reranker is None else self._around(instruction)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        literal: bool,
        max_length: int,
        workers: int,
        lower_case: bool,
        separator: str | None = None,
        reranker_form: RerankerForm | None = None,
        instruction: str = "",
    ) -> TextTokenizer:
        """Load the folder's `tokenizer.json`.

        `literal`: spellings of special tokens in user text are plain characters. `max_length`: the model's
        limit in tokens, special tokens included. `workers`: threads. `lower_case`: lower-case every text.
        `separator`: the special token between a document's chunks; `None`: no documents.
        `reranker_form`: what pairs are scored in, with `instruction` unless a job has its own; `None`: the
        tokenizer's own template.
        Raises `StartupError` for a file that cannot be read, whose template is not known, or that fails the
        checks against the library itself.
        """
        # The pool below splits work over threads already; the library's own threads would only compete with
        # it for the same cores (and lend one core's request the others' time). An operator's value wins.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        path = folder / "tokenizer.json"
        try:
            # These two settings of a file are one for all; here each request has its own.
            content = json.loads(path.read_bytes()) | {"truncation": None, "padding": None}
            form = literal_form(content) if literal else content
            template = Templates.read(content, uses_segments(folder))
            tokenizer = _checked_tokenizer(form, content, template, literal=literal)
            added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
            return cls(
                tokenizer,
                template,
                hash=tokenizer_hash(path),
                text_hash=_text_hash(form, lower_case=lower_case),
                vocabulary_size=_vocabulary_size(content),
                max_length=max_length,
                workers=workers,
                lower_case=lower_case,
                names={number: spelling for spelling, number in added.items()},
                file=path,
                separator=None if separator is None else _special_id(content, separator),
                reranker=None if reranker_form is None else _reranker_template(content, reranker_form),
                chat=ChatTemplate.load(folder, added, literal=literal),
                instruction=instruction,
                fast=_fast_encoder(tokenizer, workers),
            )
        except StartupError:
            raise
        except Exception as error:  # the library raises bare exceptions for files it cannot read
            raise StartupError(f"{path} is no tokenizer that can be served: {error!r}") from error

    def close(self) -> None:
        """End the threads, after the work they have."""
        self._threads.shutdown()

    async def encode(
        self,
        prompts: Sequence[Prompt],
        truncation: Truncation,
        default_truncate: bool,
        field: str,
        *,
        add_special_tokens: bool = True,
    ) -> list[EncodedInput]:
        """Encode single texts, or ready sequences of ids (taken verbatim), in order.

        `field` is the client's name for its inputs; `add_special_tokens` is for texts. Raises `TooLong`
        naming the inputs over the limit where truncation is off, `EmptyInput` for inputs without any token,
        `InvalidValue` for text that is not Unicode, for ids outside the vocabulary and for a limit that
        leaves no room.
        """
        single = self.template.single
        template = single if add_special_tokens else single.without_specials()
        around_ready = single if self.reranker is None else self.default_pair
        cut = self._cut(template, truncation, default_truncate, field)
        ready = [p.text for p in prompts if isinstance(p.text, TokenIds)]
        if len(ready) == len(prompts):  # nothing that a thread would be worth
            faults.point("tokenize")
            indexes = [p.index for p in prompts]
            self._check_all_ids(ready, indexes, field)
            inputs = [fit_ready(n, ids, around_ready, cut) for n, ids in zip(indexes, ready, strict=True)]
            return checked_lengths(inputs, cut, field)

        def encode_part(part: Sequence[Prompt]) -> list[EncodedInput]:
            named = [(f"{field}[{p.index}]", p.text) for p in part]
            if (fast := self._fast) is not None and can_frame(part):
                return self._framed(named, lambda texts: encode_texts(fast, texts, part, template, cut))
            ids = self._token_ids(named)
            unpooled = self._prompt_lengths({p.unpooled for p in part}, template)
            return [
                fit_ready(p.index, p.text, around_ready, cut)
                if isinstance(p.text, TokenIds)
                else fit_text(p.index, own, template, cut, unpooled[p.unpooled])
                for p, own in zip(part, ids, strict=True)
            ]

        inputs = await self._spread(encode_part, prompts, [_size(p.text) for p in prompts])
        return checked_lengths(inputs, cut, field)

    async def encode_chat(
        self, chat: Conversation, truncation: Truncation, default_truncate: bool, field: str
    ) -> EncodedInput:
        """Encode a conversation by the model's chat template, whose first and last tokens survive a cut.

        Raises `InvalidValue` for a model without such a template and for what the template refuses, and as
        `encode`.
        """
        tokens = await self._chat_tokens(chat, field)
        single = self.template.single
        template = tokens.around(single if chat.add_special_tokens else single.without_specials())
        cut = self._cut(template, truncation, default_truncate, field)
        (encoded,) = checked_lengths([fit_text(0, tokens.own, template, cut)], cut, field)
        return encoded

    async def tokenize_chat(self, chat: Conversation, field: str) -> TokenizedText:
        """The tokens of a conversation, uncut; places are left out. Raises as `encode_chat`."""
        chat_tokens = await self._chat_tokens(chat, field)
        own = chat_tokens.listed(self._names)
        if not chat.add_special_tokens:
            return own
        before, behind = (special_tokens(piece, self._names) for piece in self.template.single.pieces)
        return TokenizedText(
            (*before.tokens, *own.tokens, *behind.tokens), (*before.pieces, *own.pieces, *behind.pieces)
        )

    async def encode_documents(
        self, documents: Sequence[Sequence[str]], max_tokens: int | None, field: str
    ) -> list[EncodedInput]:
        """Encode documents, each given as the texts of its chunks, in order: a span for every chunk.

        Chunks are tokenized alone and joined by the separator. Nothing is cut, because a chunk would go
        missing: raises `TooLong` naming documents over the model's limit, or `max_tokens`; `EmptyInput` for a
        chunk without any token; and as `encode`.
        """
        template, separator = self.template.single, self._separator
        assert separator is not None, "no contextual model: this is a bug of the caller"
        cut = self._cut(template, Truncation(False, max_tokens), False, field)

        def encode_part(part: Sequence[tuple[int, Sequence[str]]]) -> list[EncodedInput]:
            named = [(f"{field}[{i}][{n}]", text) for i, texts in part for n, text in enumerate(texts)]
            ids = iter(self._token_ids(named))
            return [
                fit_document(i, list(itertools.islice(ids, len(texts))), template, separator)
                for i, texts in part
            ]

        numbered = list(enumerate(documents))
        inputs = await self._spread(encode_part, numbered, [sum(map(len, texts)) for texts in documents])
        return checked_lengths(inputs, cut, field)

    async def encode_pairs(
        self,
        prompts: Sequence[Prompt],
        truncation: Truncation,
        default_truncate: bool,
        fields: tuple[str, str],
        max_tokens_per_query: int | None = None,
        instruction: str | None = None,
        max_tokens_per_document: int | None = None,
    ) -> list[EncodedInput]:
        """Encode pairs by the pair template, in order; equal first texts are tokenized once.

        The second text is cut to what the first leaves, and to `max_tokens_per_document`; the first only to
        `max_tokens_per_query`. Both are counted without special tokens. A reranker's template holds the
        `instruction`, or the server's own. Raises as `encode`, `TooLong` for a first text that leaves the
        second no room for a single token, and `InvalidValue` for an instruction where the template has no
        place for one.
        """
        template = await self._pair_template(instruction)
        if self.reranker is not None:
            prompts = apply_form(prompts, self.reranker.form)
        field_at_fault = fields[1] if instruction is None else "instruction"
        cut = self._cut(template, truncation, default_truncate, field_at_fault)
        queries = await self._encode_queries(prompts, template, fields[0])
        limits = PairLimits(
            max_tokens_per_query or self.max_length, max_tokens_per_document or self.max_length
        )

        def encode_part(part: Sequence[Prompt]) -> list[EncodedInput]:
            named = [(f"{fields[1]}[{p.index}]", p.second_text) for p in part]
            if (fast := self._fast) is not None and can_frame(part):
                rest = (part, queries, template, cut, limits, fields[0])
                return self._framed(named, lambda texts: encode_documents(fast, texts, *rest))
            ids = self._token_ids(named)
            return [
                fit_pair(p.index, queries[p.text], own, template, cut, limits, fields[0])
                for p, own in zip(part, ids, strict=True)
            ]

        inputs = await self._spread(encode_part, prompts, [_size(p.second_text) for p in prompts])
        return checked_lengths(inputs, cut, fields[1])

    async def tokenize(
        self, prompts: Sequence[Prompt], field: str, *, add_special_tokens: bool
    ) -> list[TokenizedText]:
        """The tokens of single texts, in order and uncut, in the template of lone texts if asked.

        Raises `InvalidValue` for text that is not Unicode.
        """
        single = self.template.single
        template = single if add_special_tokens else single.without_specials()
        around = [special_tokens(piece, self._names) for piece in template.pieces]

        def tokenize_part(part: Sequence[Prompt]) -> list[TokenizedText]:
            sources = [str(p.text) for p in part]
            read = [self._readable(str(p.text), f"{field}[{p.index}]") for p in part]
            encodings = self._tokenizer.encode_batch(read, add_special_tokens=False)
            return [tokenized(*each, around) for each in zip(sources, read, encodings, strict=True)]

        return await self._spread(tokenize_part, prompts, [_size(p.text) for p in prompts])

    async def decode(
        self, sequences: Sequence[TokenIds], field: str, *, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each sequence of ids. Raises `InvalidValue` for an id outside the vocabulary."""
        decoder = await self._file_decoder()

        def decode_part(part: Sequence[Prompt]) -> list[str]:
            ids = self._token_ids([(f"{field}[{p.index}]", p.text) for p in part])
            texts: list[str] = decoder.decode_batch(ids, skip_special_tokens=skip_special_tokens)
            return texts

        prompts = [Prompt(index, ids) for index, ids in enumerate(sequences)]
        return await self._spread(decode_part, prompts, [_size(ids) for ids in sequences])

    async def _file_decoder(self) -> Tokenizer:
        """The file as it is, whose special tokens have names; read when somebody first decodes."""
        if self._decoder is None:
            self._decoder = self._threads.submit(Tokenizer.from_file, str(self._file))
        return await asyncio.shield(asyncio.wrap_future(self._decoder))

    def ids_of(self, text: str) -> Int32Array:
        """Ids of one text with its special tokens, uncut."""
        (ids,) = self._token_ids([("text", text)])
        return join(self.template.single, ids).token_ids

    def check_ids(self, ready: TokenIds, param: str) -> None:
        """Raise `InvalidValue`, naming id and limit, unless every id is in the vocabulary."""
        ids, segments = ready.token_ids, ready.segment_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocabulary_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise InvalidValue(
                f"`{param}`: token id {wrong} is outside 0 to {self.vocabulary_size - 1}", param
            )
        if segments is not None and len(segments) != len(ids):
            raise InvalidValue(f"`{param}`: {len(segments)} segment ids for {len(ids)} token ids", param)

    def _check_all_ids(self, ready: Sequence[TokenIds], indexes: Sequence[int], field: str) -> None:
        """`check_ids` of every sequence, of all at once where no segment ids are to be looked at."""
        if ready and all(ids.segment_ids is None for ids in ready):
            # As unsigned numbers negative ones are above every vocabulary.
            ids = np.concatenate([each.token_ids for each in ready]).view(np.uint32)
            if not len(ids) or ids.max() < self.vocabulary_size:
                return
        for index, each in zip(indexes, ready, strict=True):
            self.check_ids(each, f"{field}[{index}]")

    def _cut(self, template: Template, truncation: Truncation, default: bool, field: str) -> Cut:
        limit = self.max_length
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        if limit <= template.num_special:
            raise InvalidValue(
                f"`{field}`: a limit of {limit} tokens leaves no room beside"
                f" {template.num_special} special tokens",
                field,
            )
        enabled = default if truncation.enabled is None else truncation.enabled
        return Cut(enabled, limit, truncation.side)

    async def _pair_template(self, instruction: str | None) -> Template:
        if instruction is None:
            return self.default_pair
        if self.reranker is None:
            raise InvalidValue("`instruction` is not supported with this model", "instruction")
        prompts = [Prompt(0, instruction)]
        (template,) = await self._spread(
            lambda part: [self._around(str(p.text)) for p in part], prompts, [len(instruction)]
        )
        return template

    def _around(self, instruction: str) -> Template:
        assert self.reranker is not None
        (ids,) = self._token_ids([("instruction", self.reranker.form.inner(instruction))])
        return self.reranker.around(ids)

    async def _encode_queries(
        self, prompts: Sequence[Prompt], template: Template, field: str
    ) -> dict[Text, list[int]]:
        """Ids of every different first text, without special tokens; ready ids get the template's end."""
        firsts = list({p.text: p for p in reversed(prompts)}.values())
        lone = len(firsts) == 1

        def encode_part(part: Sequence[Prompt]) -> list[list[int]]:
            return self._token_ids([(field if lone else f"{field}[{p.index}]", p.text) for p in part])

        ids = await self._spread(encode_part, firsts, [_size(p.text) for p in firsts])
        return {
            p.text: [*own, *template.first_end] if isinstance(p.text, TokenIds) else own
            for p, own in zip(firsts, ids, strict=True)
        }

    async def _chat_tokens(self, chat: Conversation, field: str) -> ChatTokens:
        template = self._chat
        if template is None:
            raise InvalidValue(
                f"`{field}`: this model's files hold no chat template to make a text of a conversation", field
            )

        def encode_part(part: Sequence[Conversation]) -> list[ChatTokens]:
            return [self._join_chat(template.render(each), field) for each in part]

        (tokens,) = await self._spread(encode_part, [chat], [num_characters(chat.texts)])
        return tokens

    def _join_chat(self, rendered: RenderedChat, field: str) -> ChatTokens:
        texts = [self._readable(piece, field) for piece in rendered.pieces if isinstance(piece, str)]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return ChatTokens.join(rendered, encodings, self._names)

    def _prompt_lengths(self, prompts: set[str], template: Template) -> dict[str, int]:
        """Tokens of each prompt, those in front of it included: as sentence-transformers counts them.

        It tokenizes the prompt alone and leaves out one special token at its end.
        """
        around = template.num_special - bool(template.pieces[-1].ids)
        spelled = [prompt for prompt in prompts if prompt]
        ids = self._token_ids([("prompt", prompt) for prompt in spelled]) if spelled else []
        return {"": 0} | {prompt: len(own) + around for prompt, own in zip(spelled, ids, strict=True)}

    def _token_ids(self, named: Sequence[tuple[str, Text]]) -> list[list[int]]:
        """Ids of texts, without special tokens; ready ids are checked and passed on. Names are for errors."""
        faults.point("tokenize")
        texts = [self._readable(text, param) for param, text in named if isinstance(text, str)]
        encoded = iter(self._encode_alone(texts) if texts else ())
        ids: list[list[int]] = []
        for param, text in named:
            if isinstance(text, TokenIds):
                self.check_ids(text, param)
                ids.append(text.token_ids.tolist())
            else:
                ids.append(next(encoded))
        return ids

    def _encode_alone(self, texts: list[str]) -> list[list[int]]:
        if self._fast is not None:
            return self._fast.ids(texts)
        # Unlike `encode`, the batch call lets go of the GIL; `fast` leaves out offsets, which nobody needs.
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _framed(
        self, named: Sequence[tuple[str, Text]], encode: Callable[[list[str]], list[EncodedInput]]
    ) -> list[EncodedInput]:
        """`encode` of all texts, as they are read; names are for errors."""
        faults.point("tokenize")
        texts = [str(text).lower() if self._lower_case else str(text) for _, text in named]
        try:
            return encode(texts)
        except NotUnicode as error:
            param, text = named[error.index]
            self._readable(str(text), param)
            raise  # half a pair that only lower-casing made: this is a bug

    def _readable(self, text: str, param: str) -> str:
        """`text` as the library takes it. Raises `InvalidValue` for half of a surrogate pair."""
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            code = f"U+{ord(text[error.start]):04X}"
            message = f"`{param}` is not valid Unicode: lone surrogate {code} at character {error.start}"
            raise InvalidValue(message, param) from None
        return text.lower() if self._lower_case else text

    async def _spread(
        self, work: Callable[[Sequence[S]], list[T]], items: Sequence[S], sizes: Sequence[int]
    ) -> list[T]:
        """`work` on all items: here and now when that is less than a hop, else evenly over the threads."""
        speed = _LIBRARY if self._fast is None else _FAST
        if sum(sizes) <= speed.inline_characters and len(items) <= _INLINE_PROMPTS:
            return work(items)
        loop = asyncio.get_running_loop()
        # The fast encoder has threads of its own for what is one part here.
        num_threads = self._workers if self._fast is None else 1
        parts = [items[start:end] for start, end in _even_parts(sizes, num_threads, speed)]
        results: list[list[T]] = [[] for _ in parts]
        waiting = deque(enumerate(parts))

        async def drain() -> None:
            while waiting:
                number, part = waiting.popleft()
                results[number] = await loop.run_in_executor(self._threads, work, part)

        try:
            # One part per thread at a time: a large request queues no more than that before other requests.
            await asyncio.gather(*(drain() for _ in range(self._workers)))
        finally:
            waiting.clear()
        return [item for result in results for item in result]


def _size(text: Text) -> int:
    return len(text) if isinstance(text, str) else len(text.token_ids)


def _even_parts(sizes: Sequence[int], num_threads: int, speed: _Speed) -> list[tuple[int, int]]:
    """Start and end of consecutive parts of about equal size: one per thread where that is worth its hop."""
    total = sum(sizes)
    num_parts = max(1, min(num_threads, total // speed.min_part), total // speed.max_part)
    wanted = [total * part / num_parts for part in range(1, num_parts)]
    bounds = np.searchsorted(np.cumsum(sizes), wanted, side="right").tolist()
    edges = [0, *bounds, len(sizes)]
    return [(start, end) for start, end in itertools.pairwise(edges) if start < end]


def _vocabulary_size(content: Json) -> int:
    """One more than the highest id, added tokens included."""
    vocab = content["model"]["vocab"]
    ids: list[int] = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    ids += (token["id"] for token in content.get("added_tokens") or ())
    return max(ids) + 1


def _special_id(content: Json, spelling: str) -> int:
    """The id of a special token. Raises `StartupError` for one that the file does not have."""
    for token in content.get("added_tokens") or ():
        if token["content"] == spelling:
            return int(token["id"])
    raise StartupError(f"tokenizer.json has no special token {spelling!r}")


def _reranker_template(content: Json, form: RerankerForm) -> RerankerTemplate:
    return RerankerTemplate.encode(form, Tokenizer.from_str(json.dumps(content)))


def _text_hash(form: Json, *, lower_case: bool) -> str:
    """Hash of all that turns text into ids, in the `form` that is served; 16 hexadecimal digits.

    Left out is what ids do not depend on: the decoder, and what each request decides.
    """
    silent = ("decoder", "padding", "truncation")
    essence = {name: part for name, part in form.items() if name not in silent}
    canonical = orjson.dumps([essence, lower_case], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()[:16]


def _checked_tokenizer(form: Json, content: Json, template: Templates, *, literal: bool) -> Tokenizer:
    """The library's object for the `form` of the file's `content` that is served.

    Raises `StartupError` where it does not do what we rely on.
    """
    tokenizer = Tokenizer.from_str(json.dumps(form))
    _check_template(tokenizer, template)
    if literal:
        _check_literal(tokenizer, content)
    return tokenizer


def _fast_encoder(tokenizer: Tokenizer, workers: int) -> FastEncoder | None:
    """The gateway's own encoder where it gives the same ids; one line in the log says which encodes."""
    try:
        encoder = fast_encoder(tokenizer, num_threads=workers - 1)
    except NoEncoder as reason:
        logger.info("texts are encoded by the tokenizers library; the compiled encoder: %s", reason)
        return None
    logger.info("texts are encoded by the compiled encoder, which gives the library's ids")
    return encoder


def _check_template(tokenizer: Tokenizer, templates: Templates) -> None:
    """Raise `StartupError` unless our templates give what the library gives for texts and pairs of them."""
    plain = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES}
    cases: list[tuple[Template, str, str | None]] = [(templates.single, text, None) for text in _PROBES]
    cases += [(templates.pair, *pair) for pair in itertools.pairwise(_PROBES)]
    for template, first, second in cases:
        texts = (first,) if second is None else (first, second)
        expected = tokenizer.encode(first, second)
        ids = [plain[text] for text in texts]
        segments = template.segments(*ids) if template.has_segments else expected.type_ids
        if template.join(*ids) != expected.ids or segments != expected.type_ids:
            raise StartupError(f"tokenizer.json: its template gives other ids than ours for {texts!r}")


def _check_literal(tokenizer: Tokenizer, content: Json) -> None:
    """Raise `StartupError` if a special token can still be spelled."""
    control = control_tokens(content)
    for spelling in control:
        encoding = tokenizer.encode(spelling, add_special_tokens=False)
        if not set(control.values()).isdisjoint(encoding.ids):
            raise StartupError(
                f"tokenizer.json: {spelling!r} in a text would still be a special token;"
                " --parity-tokens serves the model with that"
            )
