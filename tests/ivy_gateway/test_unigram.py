"""The compiled encoder gives the library's ids, or says that it cannot: Unigram files, in both modes."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import lzma
import random
import secrets

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers

from benchmarks.tokenizer_files import read_content
from ivy_gateway.compiled_tokenizer import encoder, graphemes, pipelines, probes
from ivy_gateway.compiled_tokenizer.encoder import Frame, NoEncoder, NotUnicode, Side, fast_encoder
from ivy_gateway.jobs import Truncation
from ivy_gateway.special_tokens import literal_form
from ivy_gateway.templates import Prompt
from ivy_gateway.tokenizer import TextTokenizer
from tests.ivy_gateway.fuzz_texts import passages
from tests.ivy_gateway.fuzz_tokenizers import Outcome, Subject, compare, ids_by_threads

pytestmark = pytest.mark.skipif(encoder._native is None, reason="the extension was not built")

NUM_TEXTS = 300
UNIGRAM = [("xlm-roberta", True), ("xlm-roberta-converter", False), ("flan-t5", True), ("flan-t5", False)]


@pytest.fixture(scope="module")
def subject(shared):
    return functools.cache(lambda name, literal: Subject.load(shared, name, literal=literal))


@pytest.fixture
def flan(subject):
    return subject("flan-t5", True)


@pytest.mark.parametrize(("name", "literal"), UNIGRAM)
def test_ids_of_made_texts_whole_cut_and_in_pairs(shared, subject, name, literal):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    outcome = Outcome(name, "", seed)
    made = list(itertools.islice(subject(name, literal).texts(seed, shared), NUM_TEXTS))
    compare(subject(name, literal), made, random.Random(seed), outcome)
    assert outcome.mismatches == 0, f"seed {seed}: {outcome.examples}"


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513, 5000, 60_000])
@pytest.mark.parametrize("unit", ["a", "ab", "の", "กา", "\u0378", "ex\u0378"])
def test_words_of_any_length(flan, length, unit):
    # Around the sizes at which a word leaves its buffer and at which its paths are compared.
    text = (unit * length)[:length]
    assert flan.encoder.ids([text, text + " b"]) == flan.ids([text, text + " b"])


def test_a_long_word_stops_early(flan):
    text = "ab" * 200_000
    (whole,) = flan.encoder.ids([text])
    cut = flan.encoder.encode([text], [Frame(room=9)])
    assert cut.ids.tolist() == whole[:9]
    assert cut.cut.all()


def test_steady_state_allocates_nothing(shared, flan):
    texts = passages(shared / "data" / "xquad", ["en", "th"])
    frames = [Frame(Side([1], [0]), Side([1], [0]), room=64), Frame(), Frame(room=3, keeps_end=True)]
    chosen = [i % 3 for i in range(len(texts))]
    native = encoder._native

    def encode(times: int) -> None:
        for _ in range(times):
            flan.encoder.encode(texts[::-1], frames, chosen)
            flan.encoder.encode(texts[:1])

    encode(3)
    before = native.num_allocations()
    encode(20)
    # Not none: which of two threads meets the longest texts is chance, and its memory grows once more then.
    assert native.num_allocations() - before < 10


def test_memory_of_an_outlier_is_given_back(flan):
    native = encoder._native
    flan.encoder.ids(["x" * 3_000_000])
    flan.encoder.ids(["short"])
    before = native.num_allocations()
    flan.encoder.ids(["short again"])
    assert native.num_allocations() == before


def test_many_threads_one_encoder(shared, subject):
    one = fast_encoder(subject("flan-t5", True).library, num_threads=2)
    texts = passages(shared / "data" / "xquad", ["de", "ru", "zh"])
    expected = one.ids(texts)
    assert ids_by_threads(one, texts, 6) == [expected] * 6


def test_frames_and_segments(flan):
    frames = [
        Frame(Side([7, 8], [0, 0]), Side([9], [1]), text_segment=1),
        Frame(Side([5], [3]), room=0),
        Frame(suffix=Side([6], [2]), text_segment=4, room=2, keeps_end=True),
    ]
    text = "one two three four five"
    (own,) = flan.ids([text])
    encoded = flan.encoder.encode([text] * 3, frames, [2, 0, 1], with_segments=True)
    assert encoded.lists() == [[*own[-2:], 6], [7, 8, *own, 9], [5]]
    assert encoded.segments is not None
    assert encoded.segments.tolist() == [4, 4, 2, 0, 0, *[1] * len(own), 1, 3]
    assert encoded.cut.tolist() == [True, False, True]
    with pytest.raises(ValueError, match="no such frame"):
        flan.encoder.encode([text], frames, [3])
    with pytest.raises(ValueError, match="a frame for each text"):
        flan.encoder.encode([text], frames, [0, 1])


def test_no_texts_and_empty_texts(flan):
    assert flan.encoder.encode([]).lists() == []
    assert flan.encoder.ids(["", " ", "\u200b"]) == flan.ids(["", " ", "\u200b"])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\U0001f642\udc00"])
def test_half_a_surrogate_pair_is_named_and_hurts_nobody(flan, text):
    with pytest.raises(NotUnicode) as refused:
        flan.encoder.encode(["fine", text, "also fine", text], [Frame(room=1)])
    assert refused.value.index == 1
    assert flan.encoder.ids(["fine"]) == flan.ids(["fine"])


def changed(content, **parts):
    return Tokenizer.from_str(json.dumps(content | parts))


@pytest.fixture(scope="module")
def small():
    """The least file that the extension takes."""
    vocab = [["<unk>", 0.0], ["▁", -2.0], ["▁a", -1.0], ["b", -3.0]]
    precompiled = json.loads(graphemes.one_key_normalizer("é").__getstate__())
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": precompiled,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False},
    }


def test_the_least_file(small):
    library = changed(small)
    texts = ["ab ab  b", "éab\u0301", "xyz<unk>x a", "▁▁", "<unk>"]
    expected = [e.ids for e in library.encode_batch(texts, add_special_tokens=False)]
    assert fast_encoder(library).ids(texts) == expected


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}, "pre-tok"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}}, "pre-tok"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "pre-tok"),
        ({"pre_tokenizer": None}, "pre-tok"),
        ({"normalizer": None}, "normalizer"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer"),
        ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}}, "no unknown token"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 30.0]]}}, "scores"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["ub", -1.0]]}}, "spelling"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "a WordLevel model"),
        (
            {"truncation": {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}},
            "truncation",
        ),
    ],
)
def test_pipelines_it_does_not_know(small, parts, reason):
    with pytest.raises(NoEncoder, match=reason):
        fast_encoder(changed(small, **parts))


@pytest.mark.parametrize("option", ["normalized", "single_word"])
def test_added_tokens_it_does_not_know(small, option):
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token |= {"id": 4, "content": "<x>", "special": True}
    assert fast_encoder(changed(small, added_tokens=[token]))
    with pytest.raises(NoEncoder, match="added token"):
        fast_encoder(changed(small, added_tokens=[token | {option: True}]))


@pytest.mark.parametrize("lstrip", [False, True])
@pytest.mark.parametrize("rstrip", [False, True])
def test_added_tokens_that_strip(small, lstrip, rstrip):
    def token(i, content):
        return {
            "id": i, "content": content, "lstrip": lstrip, "rstrip": rstrip,
            "single_word": False, "normalized": False, "special": True,
        }  # fmt: skip

    library = changed(small, added_tokens=[token(4, "<x>"), token(5, "<x>y"), token(6, "x>"), token(7, "b")])
    texts = ["a <x> b", "<x><x>y  <x> \u3000\u2003 <x>", " <x", "<<x>>", "\n<x>\u00a0a", "abba b"]
    assert fast_encoder(library).ids(texts) == [
        e.ids for e in library.encode_batch(texts, add_special_tokens=False)
    ]


def test_a_probe_that_differs_means_the_library(small, monkeypatch):
    library = changed(small)
    other = changed(small, model=small["model"] | {"vocab": [["<unk>", 0.0], ["▁a", -1.0], ["b", -3.0]]})
    build = pipelines.build
    monkeypatch.setattr(pipelines, "build", lambda _, num_threads: build(other, num_threads))
    with pytest.raises(NoEncoder, match="gives other ids for"):
        fast_encoder(library)


def test_another_version_of_unicode_means_the_library(small, monkeypatch):
    ranges = encoder._native.grapheme_ranges()
    assert graphemes.agrees(ranges)
    first, last, *kind = ranges[9]
    assert not graphemes.agrees([*ranges[:9], (first, last - 1, *kind), *ranges[10:]])
    pipelines._same_unicode.cache_clear()
    monkeypatch.setattr(graphemes, "agrees", lambda _: False)
    with pytest.raises(NoEncoder, match="Unicode"):
        fast_encoder(changed(small))
    pipelines._same_unicode.cache_clear()


def test_a_charsmap_that_is_cut(small):
    whole = small["normalizer"]["precompiled_charsmap"]
    with pytest.raises(ValueError, match="charsmap"):
        encoder._native.unigram(["a"], [0.0], 0, whole.encode()[:3], False, False, [], 0)


def test_the_clusters_of_every_code_point_below_0x3000():
    table = {n: (k, c) for a, b, k, c in encoder._native.grapheme_ranges() for n in range(a, b + 1)}
    asked = range(0x3000)
    assert graphemes.properties(asked) == [table.get(n, ("Other", "None")) for n in asked]


@pytest.fixture(scope="module")
def flan_folder(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flan")
    raw = lzma.decompress((shared / "tokenizers" / "flan-t5" / "tokenizer.json.xz").read_bytes())
    (folder / "tokenizer.json").write_bytes(raw)
    return folder


def load(folder):
    return TextTokenizer.load(folder, literal=True, max_length=64, workers=2, lower_case=False)


async def test_without_the_extension_the_library_encodes_the_same(shared, flan_folder, monkeypatch, caplog):
    """And the log has one line that says so."""
    texts = passages(shared / "data" / "xquad", ["de", "hi"])[::8]
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    pairs = [Prompt(i, texts[i % 2][:90], text) for i, text in enumerate(texts)]

    async def everything(tokenizer):
        cut = [Truncation(), Truncation(max_tokens=20), Truncation(max_tokens=33, side="left")]
        inputs = []
        for truncation in cut:
            inputs += await tokenizer.encode(prompts, truncation, True, "inputs")
            inputs += await tokenizer.encode_pairs(pairs, truncation, True, ("query", "texts"), 9)
        tokenizer.close()
        return [(e.index, e.token_ids.tolist(), e.truncated) for e in inputs]

    with caplog.at_level(logging.INFO, "ivy_gateway.tokenizer"):
        with_it = await everything(load(flan_folder))
        monkeypatch.setattr(encoder, "_native", None)
        without_it = await everything(load(flan_folder))
    assert with_it == without_it
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "texts are encoded by the compiled encoder, which gives the library's ids",
        "texts are encoded by the tokenizers library; the compiled encoder",
    ]


def test_probes_reach_all_over_the_vocabulary():
    pieces = [f"▁piece{i}" for i in range(10_000)]
    found = probes.texts(pieces)
    assert len(found) >= 300
    assert " piece0" in found
    assert any(f" piece{i}" in found for i in range(9_900, 10_000))


def test_ids_are_arrays_of_their_own(flan):
    first = flan.encoder.encode(["one"])
    kept = first.ids.copy()
    for _ in range(50):
        flan.encoder.encode(["other words entirely"])
    assert np.array_equal(first.ids, kept)
    assert first.ids.dtype == np.int32


def test_literal_form_reads_specials_as_text(shared):
    content = read_content(shared, "flan-t5")
    library = Tokenizer.from_str(json.dumps(literal_form(content)))
    (ids,) = fast_encoder(library).ids(["</s><pad><extra_id_0>"])
    assert not {0, 1, 32099} & set(ids)


def test_the_library_normalizes_as_assumed():
    # The encoder builds on this: a short cluster is replaced whole by what stands for its first key.
    assert isinstance(graphemes.one_key_normalizer("é"), normalizers.Precompiled)
    assert graphemes.one_key_normalizer("é").normalize_str("é\u0301x") == "\uffffx"
