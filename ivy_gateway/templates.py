"""From a job's inputs to what is tokenized: prompts before texts, the reranker's form around pairs.

A prompt is a plain prefix, with no separator added. Other pairs stay as they are. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import TokenIds
from ivy_gateway.model_profile import ModelProfile

Text = str | TokenIds
JobInput = Text | tuple[Text, Text]


# What the card of Qwen3-Reranker instructs its model to do unless told otherwise.
CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_HEADER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_CLOSING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class RerankerForm:
    """The prompt of Qwen3-Reranker as one of its official forms spells it.

    Header, then `<Instruct>: i`, `<Query>: q` and `<Document>: d` with `separator` between, then `closing`.
    Each text carries the space in front of it and the separator behind it: tokenized together with these,
    and cut off from the labels, its ids are those it has inside the whole prompt. `RerankerTemplate` checks.
    """

    separator: str
    closing: str
    header: str = _HEADER
    labels: tuple[str, str, str] = ("<Instruct>:", "<Query>:", "<Document>:")

    def inner(self, text: str) -> str:
        """An instruction or a query, as it is tokenized."""
        return f" {text}{self.separator}"

    def last(self, document: str) -> str:
        """A document, as it is tokenized."""
        return f" {document}"

    def spell(self, instruction: str, query: str, document: str) -> str:
        """The whole prompt."""
        texts = (self.inner(instruction), self.inner(query), self.last(document))
        body = "".join(label + text for label, text in zip(self.labels, texts, strict=True))
        return self.header + body + self.closing


# A: the card's transformers code. B: its vLLM code, where the chat template closes the turn a first time.
RERANKER_FORMS = {
    "A": RerankerForm(separator="\n", closing=_CLOSING),
    "B": RerankerForm(separator="\n\n", closing="<|im_end|>\n" + _CLOSING),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text, or a pair of them, as it will be tokenized; `index` is its place in the job."""

    index: int
    text: Text
    second: Text | None = None  # of a pair
    unpooled: str = ""  # the start of a lone text that pooling leaves out: its prompt, where files say so

    @property
    def second_text(self) -> Text:
        """The second text of what must be a pair."""
        assert self.second is not None, "a single text among pairs: this is a bug of the caller"
        return self.second


def apply_prompt(
    inputs: Sequence[JobInput], profile: ModelProfile, prompt_name: str | None = None
) -> list[Prompt]:
    """Put the prompt that `prompt_name` names, else the model's default one, in front of every text.

    Pairs and ready ids never get the default prompt. Raises `InvalidValue` for an unknown name, listing the
    known ones, and for a name given with pairs or ready ids, which take no prompt.
    """
    prefix = _prefix(profile, prompt_name)
    unpooled = "" if profile.include_prompt else prefix
    prompts = []
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            prompts.append(Prompt(index, prefix + item, unpooled=unpooled))
            continue
        if prompt_name is not None:
            what = "a pair of texts" if isinstance(item, tuple) else "token ids"
            raise InvalidValue(f"input {index} is {what}, which take no prompt", "prompt_name")
        prompts.append(Prompt(index, *item) if isinstance(item, tuple) else Prompt(index, item))
    return prompts


def reranker_form(choice: str, profile: ModelProfile) -> RerankerForm | None:
    """The form of the model's pairs under the operator's `choice`: A, B, none, or auto; `None`: no form."""
    if choice == "auto":
        choice = "A" if profile.prompted_pairs else "none"
    return RERANKER_FORMS.get(choice)


def apply_form(pairs: Sequence[Prompt], form: RerankerForm) -> list[Prompt]:
    """The texts of `pairs` as `form` has them tokenized; ready ids stay as they are."""
    return [
        Prompt(pair.index, _formed(pair.text, form.inner), _formed(pair.second_text, form.last))
        for pair in pairs
    ]


def _formed(text: Text, form: Callable[[str], str]) -> Text:
    return form(text) if isinstance(text, str) else text


def _prefix(profile: ModelProfile, prompt_name: str | None) -> str:
    name = profile.default_prompt_name if prompt_name is None else prompt_name
    if name is None:
        return ""
    if name not in profile.prompts:
        known = ", ".join(repr(known) for known in profile.prompts) or "none"
        raise InvalidValue(f"unknown prompt name {name!r}; this model's prompts: {known}", "prompt_name")
    return profile.prompts[name]
