from __future__ import annotations

import json

import pytest

from protos.fingerprint import tokenizer_hash

WORDPIECE = {
    "added_tokens": [{"id": 0, "content": "[PAD]", "special": True}],
    "normalizer": {"type": "BertNormalizer"},
    "post_processor": None,
    "model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "a": 1, "b": 2}},
}
UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["<s>", 0.0], ["a", -1.5]]}}


def hash_of(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    return tokenizer_hash(file)


def changed(content, **changes):
    return {**content, **changes}


def test_it_is_short_and_stable(tmp_path):
    assert hash_of(tmp_path, WORDPIECE) == hash_of(tmp_path, WORDPIECE)
    assert len(hash_of(tmp_path, WORDPIECE)) == 16


def test_normaliser_template_and_padding_do_not_count(tmp_path):
    other = changed(
        WORDPIECE, normalizer=None, post_processor={"type": "BertProcessing"}, padding={"length": 9}
    )
    assert hash_of(tmp_path, other) == hash_of(tmp_path, WORDPIECE)


def test_the_order_in_the_file_does_not_count(tmp_path):
    other = changed(WORDPIECE, model={"type": "WordPiece", "vocab": {"b": 2, "a": 1, "[PAD]": 0}})
    assert hash_of(tmp_path, other) == hash_of(tmp_path, WORDPIECE)


@pytest.mark.parametrize(
    "other",
    [
        changed(WORDPIECE, model={"type": "WordPiece", "vocab": {"[PAD]": 0, "a": 2, "b": 1}}),
        changed(WORDPIECE, model={"type": "WordPiece", "vocab": {"[PAD]": 0, "a": 1, "c": 2}}),
        changed(WORDPIECE, added_tokens=[{"id": 1, "content": "[PAD]", "special": True}]),
        changed(WORDPIECE, added_tokens=[]),
        UNIGRAM,
    ],
)
def test_pieces_ids_and_special_ids_count(tmp_path, other):
    assert hash_of(tmp_path, other) != hash_of(tmp_path, WORDPIECE)


def test_unigram_order_is_the_id(tmp_path):
    swapped = changed(UNIGRAM, model={"type": "Unigram", "vocab": [["a", -1.5], ["<s>", 0.0]]})
    assert hash_of(tmp_path, swapped) != hash_of(tmp_path, UNIGRAM)


def test_something_else_is_refused_by_file_name(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file"):
        hash_of(tmp_path, {"model": {}})
