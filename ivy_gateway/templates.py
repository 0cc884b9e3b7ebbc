"""From a job's inputs to what is tokenized: prompts put in front of texts, pairs left as they are.

A prompt is a plain prefix, with no separator added. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import TokenIds
from ivy_gateway.model_profile import ModelProfile

Text = str | TokenIds
JobInput = Text | tuple[Text, Text]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text, or a pair of them, as it will be tokenized; `index` is its place in the job."""

    index: int
    text: Text
    second: Text | None = None  # of a pair

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
    prompts = []
    for index, item in enumerate(inputs):
        if isinstance(item, str):
            prompts.append(Prompt(index, prefix + item))
            continue
        if prompt_name is not None:
            what = "a pair of texts" if isinstance(item, tuple) else "token ids"
            raise InvalidValue(f"input {index} is {what}, which take no prompt", "prompt_name")
        prompts.append(Prompt(index, *item) if isinstance(item, tuple) else Prompt(index, item))
    return prompts


def _prefix(profile: ModelProfile, prompt_name: str | None) -> str:
    name = profile.default_prompt_name if prompt_name is None else prompt_name
    if name is None:
        return ""
    if name not in profile.prompts:
        known = ", ".join(repr(known) for known in profile.prompts) or "none"
        raise InvalidValue(f"unknown prompt name {name!r}; this model's prompts: {known}", "prompt_name")
    return profile.prompts[name]
