"""Prompts: explicit before default, never on pairs or ready ids, unknown ones refused."""

import dataclasses

import numpy as np
import pytest

from ivy_gateway.errors import InvalidValue
from ivy_gateway.jobs import TokenIds
from ivy_gateway.model_profile import ModelProfile
from ivy_gateway.templates import Prompt, apply_prompt

IDS = TokenIds(np.array([1, 2], np.int32))


@pytest.fixture(scope="module")
def profile(minilm):
    return ModelProfile.read(minilm, prompts={"query": "Q:", "passage": "P: "})


@pytest.fixture(scope="module")
def with_default(profile):
    return dataclasses.replace(profile, default_prompt_name="passage")


def test_without_a_prompt_texts_stay_as_they_are(profile):
    assert apply_prompt(["a", " b "], profile, None) == [Prompt(0, "a"), Prompt(1, " b ")]


def test_a_prompt_is_a_plain_prefix(profile):
    assert apply_prompt(["a"], profile, "query") == [Prompt(0, "Q:a")]


def test_an_explicit_prompt_wins_over_the_default(with_default):
    assert apply_prompt(["a"], with_default, None) == [Prompt(0, "P: a")]
    assert apply_prompt(["a"], with_default, "query") == [Prompt(0, "Q:a")]
    assert apply_prompt(["a"], with_default, "document") == [Prompt(0, "a")]


def test_pairs_and_ready_ids_never_get_the_default(with_default):
    prompts = apply_prompt([("a", "b"), IDS, ("c", IDS), "d"], with_default, None)
    assert prompts == [Prompt(0, "a", "b"), Prompt(1, IDS), Prompt(2, "c", IDS), Prompt(3, "P: d")]


@pytest.mark.parametrize(("item", "what"), [(("a", "b"), "a pair"), (IDS, "token ids")])
def test_a_prompt_that_cannot_be_applied_is_refused(profile, item, what):
    with pytest.raises(InvalidValue, match=f"input 1 is {what}") as caught:
        apply_prompt(["fine", item], profile, "query")
    assert caught.value.param == "prompt_name"


def test_an_unknown_name_lists_the_known_ones(profile):
    with pytest.raises(InvalidValue, match=r"'nope'.*'query', 'document', 'passage'") as caught:
        apply_prompt(["a"], profile, "nope")
    assert caught.value.param == "prompt_name"
