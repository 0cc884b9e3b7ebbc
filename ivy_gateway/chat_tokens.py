"""A rendered conversation as token ids, and which of them a cut must leave. Knows nothing of limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Encoding

from ivy_gateway.chat_template import ControlToken, RenderedChat
from ivy_gateway.jobs import Token, TokenizedText
from ivy_gateway.special_tokens import Piece, Template


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Ids of a conversation, the vocabulary's spelling of each, and how many at either end are fixed."""

    ids: tuple[int, ...]
    spellings: tuple[str, ...]
    num_head: int
    num_tail: int

    @classmethod
    def join(cls, chat: RenderedChat, encodings: Iterable[Encoding], names: Mapping[int, str]) -> ChatTokens:
        """Put `encodings` of the texts of `chat`, in order, between its control tokens."""
        tokens = list(_placed(chat, iter(encodings), names))
        length = max((end for *_, end in tokens), default=0)
        head = sum(end <= chat.head for *_, end in tokens)
        tail = sum(start >= length - chat.tail for *_, start, _ in tokens) if chat.tail else 0
        return cls(
            tuple(t[0] for t in tokens), tuple(t[1] for t in tokens), head, min(tail, len(tokens) - head)
        )

    @property
    def own(self) -> list[int]:
        """The ids that may be cut."""
        return list(self.ids[self.num_head : len(self.ids) - self.num_tail])

    def listed(self, names: Mapping[int, str]) -> TokenizedText:
        """All of them, their places in the rendered text left out; `names` are the special ones."""
        tokens = (
            Token(i, spelling, i in names, None, None)
            for i, spelling in zip(self.ids, self.spellings, strict=True)
        )
        return TokenizedText(tuple(tokens), self.spellings)

    def around(self, single: Template) -> Template:
        """What stands around these: the fixed ids, between those of the tokenizer's own template `single`."""
        end = len(self.ids) - self.num_tail
        before = (*single.pieces[0].ids, *self.ids[: self.num_head])
        behind = (*self.ids[end:], *single.pieces[1].ids)
        return Template((Piece(before, (0,) * len(before)), Piece(behind, (0,) * len(behind))), (0,))


def _placed(
    chat: RenderedChat, encodings: Iterator[Encoding], names: Mapping[int, str]
) -> Iterator[tuple[int, str, int, int]]:
    """Id, spelling, first character and the one behind the last, of each token."""
    at = 0
    for piece in chat.pieces:
        if isinstance(piece, ControlToken):
            yield piece.id, names[piece.id], at, at + piece.length
            at += piece.length
            continue
        encoding = next(encodings)
        for token_id, spelling, (start, end) in zip(
            encoding.ids, encoding.tokens, encoding.offsets, strict=True
        ):
            yield token_id, spelling, at + start, at + end
        at += len(piece)
