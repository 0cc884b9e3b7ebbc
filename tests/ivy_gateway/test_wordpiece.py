"""The compiled encoder gives the library's ids: BERT vocabularies, cased and uncased."""

from __future__ import annotations

import itertools
import json
import random
import secrets

import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from benchmarks.tokenizer_files import read_content
from ivy_gateway.compiled_tokenizer import bert_characters, encoder
from ivy_gateway.compiled_tokenizer.encoder import Frame, NoEncoder, Side, fast_encoder
from tests.ivy_gateway.fuzz_tokenizers import Outcome, Subject, compare

pytestmark = pytest.mark.skipif(encoder._native is None, reason="the extension was not built")

UNCASED = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
# Cased multilingual files, files with accents kept, and one that cleans nothing.
NORMALIZERS = [
    UNCASED,
    UNCASED | {"lowercase": False},
    UNCASED | {"strip_accents": False},
    UNCASED | {"clean_text": False, "handle_chinese_chars": False, "strip_accents": True, "lowercase": False},
]


@pytest.fixture(scope="module")
def content(shared, minilm):
    return read_content(shared, "minilm")


@pytest.mark.parametrize("literal", [True, False])
def test_ids_of_made_texts_whole_cut_and_in_pairs(shared, minilm, literal):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    subject, outcome = Subject.load(shared, "minilm", literal=literal), Outcome("minilm", "", seed)
    made = list(itertools.islice(subject.texts(seed, shared), 600))
    compare(subject, made, random.Random(seed), outcome)
    assert outcome.mismatches == 0, f"seed {seed}: {outcome.examples}"


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_every_kind_of_normalizer(shared, content, normalizer):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    changed = content | {"normalizer": {"type": "BertNormalizer", **normalizer}}
    library = Tokenizer.from_str(json.dumps(changed))
    maker = Subject(fast_encoder(library), library, None, changed).texts(seed, shared)
    texts = list(itertools.islice(maker, 400))
    texts += [chr(n) + "a" + chr(n) for n in range(0x20, 0x2100) if n != 0x7F]
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    ours = fast_encoder(library).ids(texts)
    assert [t for t, a, b in zip(texts, ours, expected, strict=True) if a != b] == [], f"seed {seed}"


def test_marks_that_normalization_may_reorder_are_left_to_the_library(content):
    library = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
    # Two marks that survive, of classes 224 and 9: canonical order turns them round.
    texts = ["plain", "\u302e\u1b44", "x\u302e y\u1b44", "a\u302e\u0301\u1b44b", "also plain"]
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    fast = fast_encoder(library)
    assert fast.ids(texts) == expected
    states = fast._native.encode(texts, [encoder._native_frame(Frame())])[3]
    assert (states == encoder._NOT_ENCODED).tolist() == [False, True, False, True, False]
    frame = Frame(Side([101], [0]), Side([102], [1]), 1, room=1)
    cut = fast.encode(texts, [frame], with_segments=True)
    assert cut.lists() == [[101, *ids[:1], 102] for ids in expected]
    assert cut.segments is not None
    assert cut.segments.tolist() == [0, 1, 1] * 5
    assert cut.cut.tolist() == [len(ids) > 1 for ids in expected]


@pytest.mark.parametrize("length", [14, 15, 16, 99, 100, 101, 255, 256, 257, 3000])
def test_words_of_any_length(content, length):
    library = Tokenizer.from_str(json.dumps(content))
    texts = ["a" * length, "é" * length + " b", "x" * (length - 1) + "\u0378"]
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert fast_encoder(library).ids(texts) == expected


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"normalizer": None}, "normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer"),
    ],
)
def test_pipelines_it_does_not_know(content, parts, reason):
    with pytest.raises(NoEncoder, match=reason):
        fast_encoder(Tokenizer.from_str(json.dumps(content | parts)))


def test_models_it_does_not_know(content):
    for options, reason in (({"max_input_chars_per_word": 300}, "255"), ({"unk_token": "[NONE]"}, "unknown")):
        changed = content | {"model": content["model"] | options}
        with pytest.raises(NoEncoder, match=reason):
            fast_encoder(Tokenizer.from_str(json.dumps(changed)))


def test_characters_of_a_normalizer():
    characters = bert_characters.of(json.dumps({"type": "BertNormalizer", **UNCASED}))
    normalized = dict(characters.normalized)
    assert normalized["É"] == "e"
    assert normalized["\t"] == " "
    assert "中" in characters.isolated
    assert "中" not in normalized
    assert set("!|「") <= set(characters.punctuation)
    assert any(first <= 0xAD <= last for first, last in characters.removed)
    library = BertNormalizer(**UNCASED)
    for code_point in range(0x20, 0x30000, 7):
        if 0xD800 <= code_point < 0xE000:
            continue
        character = chr(code_point)
        removed = any(first <= code_point <= last for first, last in characters.removed)
        isolated = f" {character} " if character in characters.isolated else character
        expected = "" if removed else normalized.get(character, isolated)
        assert library.normalize_str(character) == expected
