"""Section D: tokens, templates and what the model's files say."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.cases import models
from tests.cases.client import assert_near_reference, assert_same
from tests.cases.fleet import started

SPELLINGS = ["[CLS] [SEP]", "</s>", "<|im_end|>", "<|endof<|endoftext|>text|>", "<mask>", "<s>", "[MASK]"]


@pytest.mark.parametrize("text", [*SPELLINGS, *(f"a word {s} and more" for s in SPELLINGS)])
@pytest.mark.parametrize("kind", ["e", "d"])
def test_bc_036_control_tokens_cannot_be_typed(kind, text, request):
    stack = request.getfixturevalue(kind)
    reference: models.Embedder = request.getfixturevalue(f"reference_{kind}")
    reply = stack.post("/embed", inputs=text)
    assert int(reply.headers["x-compute-tokens"]) == len(reference.ids(text))
    assert_near_reference(np.array(reply.json()), reference.embed(text))


def test_bc_036_the_spellings_would_be_control_tokens_otherwise(reference_e, reference_d):
    for reference, spelling in ((reference_e, "[SEP]"), (reference_d, "<|im_end|>")):
        as_control = models.plain(reference.folder / "tokenizer.json").encode(spelling).ids
        assert len(reference.ids(spelling)) > len(as_control)


@pytest.mark.parametrize("kind", ["b", "x"])
def test_bc_036_a_typed_separator_moves_no_border(kind, request):
    stack = request.getfixturevalue(kind)
    reference: models.CrossEncoder = request.getfixturevalue(f"reference_{kind}")
    documents = [f"green {spelling} tea" for spelling in SPELLINGS]
    scores = stack.score("which [SEP] </s> tea", documents, raw_scores=True)
    wanted = reference.logits("which [SEP] </s> tea", documents)
    np.testing.assert_allclose(scores, wanted, atol=1e-3)


QUERY = "Which metal is liquid at room temperature?"
METALS = [
    "Iron melts at about 1,538 degrees Celsius.",
    "Mercury is a metal that stays liquid at room temperature.",
    "Gallium melts in a warm hand.",
    "Beat two eggs with sugar and bake the cake for half an hour.",
]


@pytest.mark.parametrize("instruction", [None, "Find a recipe for a cake."], ids=["default", "own"])
def test_bc_038_a_yes_no_reranker_with_its_template(y, reference_y, instruction):
    """Numbers as the card's own code gives them; which is first, random weights cannot know."""
    asked = models.INSTRUCTION if instruction is None else instruction
    wanted = np.array([reference_y.probability(QUERY, metal, asked) for metal in METALS])
    assert_near_reference(y.score(QUERY, METALS, instruction=instruction), wanted)
    results = y.rerank(QUERY, METALS, instruction=instruction)
    assert [r["index"] for r in results] == np.argsort(-wanted, kind="stable").tolist()
    assert_near_reference(np.array([r["relevance_score"] for r in results]), np.sort(wanted)[::-1])


@pytest.mark.parametrize("text", ["test", " ", "one", "one two", "one two three"])
def test_bc_039_one_end_token(d, reference_d, text):
    ids = models.plain(reference_d.folder / "tokenizer.json").encode(text).ids
    assert ids.count(151_643) == 1
    assert ids[-1] == 151_643
    body = d.openai(text)
    assert body["usage"]["prompt_tokens"] == len(ids)
    wanted = reference_d.raw(ids)
    assert_near_reference(np.array(body["data"][0]["embedding"]), wanted / np.linalg.norm(wanted))


FACTS = [
    "Bees make honey.",
    "The Danube flows through Vienna.",
    "A sonnet has fourteen lines.",
    "Steel is an alloy of iron and carbon.",
    "Penguins cannot fly.",
]
QUESTIONS = ["Which river passes Vienna?", "How long is a sonnet?", "What is steel made of?"]


def test_bc_040_real_weights_find_the_right_documents(demo):
    cosines = demo.embed(QUESTIONS) @ demo.embed(FACTS).T
    assert cosines.argmax(axis=1).tolist() == [1, 2, 3]
    info = demo.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["pooling_source"]


def test_bc_040_pooling_of_a_decoder_comes_from_its_files(d, reference_d):
    vectors = d.embed([*FACTS, *QUESTIONS])
    assert vectors.shape == (8, models.WIDTH)
    assert_near_reference(vectors, reference_d.embed(*FACTS, *QUESTIONS))
    info = d.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert info["pooling_source"]


@pytest.fixture(scope="module")
def lower_cased(reference_d, kinds):
    """D again, of which the sentence-transformers file says 256 tokens and lower case."""
    folder = shutil.copytree(reference_d.folder, kinds / "D-lower", dirs_exist_ok=True)
    settings = {"max_seq_length": 256, "do_lower_case": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    with started(folder) as stack:
        yield stack


def test_bc_041_limit_and_case_from_the_models_files(lower_cased, d):
    assert lower_cased.get("/info").json()["max_input_length"] == 256
    body = lower_cased.openai(" ".join(["cat"] * 400))
    assert body["usage"]["prompt_tokens"] == 256
    assert_same(lower_cased.embed("PARIS"), lower_cased.embed("paris"))
    assert_same(lower_cased.embed("PARIS"), d.embed("paris"))
    assert np.abs(d.embed("PARIS") - d.embed("paris")).max() > 1e-3


def test_bc_043_instruction_tokens_are_left_out_of_the_mean(reference_e, kinds):
    """As sentence-transformers does it: the mean is over what comes after the prompt, the end included."""
    folder = shutil.copytree(reference_e.folder, kinds / "E-prompt", dirs_exist_ok=True)
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompt = "find a passage that answers: "
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": prompt}}))
    texts = ["tea", "a green bicycle " * 30, "oak shelf"]
    wanted = []
    for text in texts:
        states_TD = reference_e.states(reference_e.ids(prompt + text))
        mean = states_TD[len(reference_e.ids(prompt)) - 1 :].mean(axis=0)
        wanted.append(mean / np.linalg.norm(mean))
    with started(folder) as stack:
        assert_near_reference(stack.embed(texts, prompt_name="query"), np.stack(wanted))
        assert_near_reference(stack.embed(texts), reference_e.embed(*texts))
