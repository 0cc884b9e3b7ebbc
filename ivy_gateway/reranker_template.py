"""The prompt of a language model that judges pairs, as token ids: what stands around query and document.

Control tokens come from the server's own text alone, read by the tokenizer file as it is; the ids of the
instruction, of query and document are the caller's to find. Knows nothing of limits or requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tokenizers import Tokenizer

from ivy_gateway.errors import StartupError
from ivy_gateway.special_tokens import Piece, Template
from ivy_gateway.templates import RerankerForm

_PROBES = (
    "",
    "Which river passes Vienna?",
    "a\n",
    "Zürich 東京 🙂",
    "  lead and trail  ",
    "1, 2: (3)...\n\n",
)


@dataclass(frozen=True, slots=True)
class RerankerTemplate:
    """The ids of a form's own parts, read once."""

    form: RerankerForm
    opening: tuple[int, ...]  # up to the instruction
    before_query: tuple[int, ...]
    before_document: tuple[int, ...]
    closing: tuple[int, ...]
    separator: tuple[int, ...]

    @classmethod
    def encode(cls, form: RerankerForm, plain: Tokenizer) -> RerankerTemplate:
        """Read `form` by the `plain` tokenizer file.

        Raises `StartupError` where the tokenizer does not know the control tokens, or would read a prompt in
        one piece differently from its parts.
        """
        _check_control_tokens(plain)
        instruct, query, document = form.labels
        texts = (form.header + instruct, query, document, form.closing, form.separator)
        template = cls(form, *(tuple(_ids(plain, text)) for text in texts))
        template._check(plain)
        return template

    def around(self, instruction: list[int]) -> Template:
        """What surrounds a pair under an instruction, given as the ids of `form.inner(instruction)`."""
        pieces = ((*self.opening, *instruction, *self.before_query), self.before_document, self.closing)
        return Template(tuple(Piece(ids, (0,) * len(ids)) for ids in pieces), (0, 0), self.separator)

    def _check(self, plain: Tokenizer) -> None:
        form = self.form
        for instruction, query in itertools.product(_PROBES, repeat=2):
            document = query[::-1]
            around = self.around(_ids(plain, form.inner(instruction)))
            joined = around.join(_ids(plain, form.inner(query)), _ids(plain, form.last(document)))
            if joined != _ids(plain, form.spell(instruction, query, document)):
                raise StartupError("tokenizer.json reads the reranker's prompt differently from its parts")


def _ids(plain: Tokenizer, text: str) -> list[int]:
    ids: list[int] = plain.encode(text, add_special_tokens=False).ids
    return ids


def _check_control_tokens(plain: Tokenizer) -> None:
    for token in ("<|im_start|>", "<|im_end|>"):
        if plain.token_to_id(token) is None:
            raise StartupError(
                f"tokenizer.json has no {token}: the reranker's template is not this model's;"
                " --reranker-template none serves it without"
            )
