"""Scorers through all three tiers, small ones with random weights, against transformers on the same pairs."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from ivy_gateway.local_stack import running_stack
from tests.models.parity import randomize
from tests.stack.conftest import Client

QUERY = "Which metal is liquid at room temperature?"
DOCUMENTS = [
    "Iron melts at about 1,538 degrees Celsius.",
    "Mercury is a metal that stays liquid at room temperature.",
    "Gallium melts in a warm hand.",
    "",
    "Beat two eggs with [SEP] sugar </s> and bake <|im_end|> the cake. " * 3,
]
POSITIONS = 96
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def scores_of(client: Client, documents: list[str], **fields: object) -> np.ndarray:
    status, _, reply = client.call("/score", {"query": QUERY, "documents": documents, **fields})
    assert status == 200, reply
    assert [item["index"] for item in reply["data"]] == list(range(len(documents)))
    return np.array([item["score"] for item in reply["data"]], np.float32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def literal(file: Path) -> Tokenizer:
    """The tokenizer under which a text spells no control token."""
    content = json.loads(file.read_text()) | {"truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))


# A cross-encoder of BERT's kind.


@pytest.fixture(scope="module")
def bert(minilm, tmp_path_factory) -> tuple[Path, transformers.BertForSequenceClassification]:
    folder = tmp_path_factory.mktemp("bert-reranker")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=POSITIONS, num_labels=1)
    model = randomize(transformers.BertForSequenceClassification(config))
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def cross_encoder(bert) -> Iterator[Client]:
    with running_stack(str(bert[0]), "--device", "cpu") as stack:
        yield Client(stack)


@torch.inference_mode()
def bert_logits(bert, documents: list[str]) -> np.ndarray:
    folder, model = bert
    tokenizer = literal(folder / "tokenizer.json")
    logits = []
    for document in documents:
        pair = tokenizer.encode(QUERY, document)
        ids, segments = (torch.tensor(values)[None] for values in (pair.ids, pair.type_ids))
        logits.append(model(input_ids=ids, token_type_ids=segments).logits.item())
    return np.array(logits, np.float32)


def test_a_cross_encoder_scores_as_transformers(cross_encoder, bert):
    logits = bert_logits(bert, DOCUMENTS)
    np.testing.assert_allclose(scores_of(cross_encoder, DOCUMENTS, raw_scores=True), logits, atol=1e-4)
    np.testing.assert_allclose(scores_of(cross_encoder, DOCUMENTS), sigmoid(logits), atol=1e-4)


def test_one_over_long_document_spoils_nothing(cross_encoder):
    documents = ["Prune roses in late winter.", "Use sharp shears.", "Boats need paint.", "compost " * 5000]
    scores = scores_of(cross_encoder, documents)
    np.testing.assert_allclose(scores[:3], scores_of(cross_encoder, documents[:3]), atol=1e-6)
    status, _, reply = cross_encoder.call(
        "/score", {"query": QUERY, "documents": documents, "truncate": False}
    )
    assert status == 400
    assert "documents[3]" in reply["error"]["message"]


def test_every_length_around_the_limit_is_scored(cross_encoder):
    lengths = range(POSITIONS - 20, POSITIONS + 8)
    documents = [" ".join(["cat"] * length) for length in lengths]
    together = scores_of(cross_encoder, documents)
    alone = np.concatenate([scores_of(cross_encoder, [document]) for document in documents])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_scorer_embeds_nothing_and_says_so(cross_encoder):
    status, _, reply = cross_encoder.call("/v1/embeddings", {"input": "tea"})
    assert status == 400
    assert "scores pairs" in reply["error"]["message"]
    status, _, info = cross_encoder.call("/info")
    assert status == 200
    assert info["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    assert info["score_kind"] == "sigmoid"


# A language model that is asked for yes or no.

HEADER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
BODY = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
NO, YES = 2152, 9693


@pytest.fixture(scope="module")
def qwen3(shared, tmp_path_factory) -> tuple[Path, transformers.Qwen3ForCausalLM]:
    """An original reranker: nothing in its files says that it is one."""
    folder = tmp_path_factory.mktemp("qwen3-reranker")
    packed = shared / "tokenizers" / "qwen3" / "tokenizer.json.xz"
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    config = transformers.Qwen3Config(
        **SIZES,
        vocab_size=151_669,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = randomize(transformers.Qwen3ForCausalLM(config))
    model.model.embed_tokens.weight.data *= 4  # so that logits are far from zero
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def yes_or_no(qwen3) -> Iterator[Client]:
    with running_stack(str(qwen3[0]), "--device", "cpu", "--task", "score") as stack:
        yield Client(stack)


@torch.inference_mode()
def probability_of_yes(qwen3, instruction: str, document: str) -> float:
    """As the model card computes it, but with the user's text read as text."""
    folder, model = qwen3
    plain, user = Tokenizer.from_file(str(folder / "tokenizer.json")), literal(folder / "tokenizer.json")
    body = BODY.format(instruction, QUERY, document)
    ids = [*plain.encode(HEADER).ids, *user.encode(body).ids, *plain.encode(SUFFIX).ids]
    logits = model(input_ids=torch.tensor(ids)[None]).logits[0, -1]
    return logits[[NO, YES]].softmax(dim=0)[1].item()


@pytest.mark.parametrize("fields", [{}, {"instruction": "Find a recipe."}], ids=["default", "own"])
def test_a_language_model_scores_as_its_card_says(yes_or_no, qwen3, fields):
    instruction = fields.get("instruction", INSTRUCTION)
    wanted = np.array([probability_of_yes(qwen3, instruction, d) for d in DOCUMENTS], np.float32)
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose(scores_of(yes_or_no, DOCUMENTS, **fields), wanted, atol=1e-4)
