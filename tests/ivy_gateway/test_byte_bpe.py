"""The compiled encoder gives the library's ids: byte-level BPE in the pipelines of published files."""

from __future__ import annotations

import functools
import itertools
import json
import random
import secrets
import unicodedata

import pytest
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.normalizers import NFC, NFD

from benchmarks.tokenizer_files import read_content
from ivy_gateway.compiled_tokenizer import byte_letters, code_points, encoder
from ivy_gateway.compiled_tokenizer.encoder import Frame, NoEncoder, NotUnicode, Side, fast_encoder
from ivy_gateway.special_tokens import Templates, literal_form
from tests.ivy_gateway import byte_pipelines
from tests.ivy_gateway.byte_pipelines import added_token, byte_level, in_pipeline, split
from tests.ivy_gateway.fuzz_texts import passages
from tests.ivy_gateway.fuzz_tokenizers import Outcome, Subject, compare, ids_by_threads

pytestmark = pytest.mark.skipif(encoder._native is None, reason="the extension was not built")

BYTES = {letter: i for i, letter in enumerate(byte_letters.ALPHABET)}
LETTERS = {byte: letter for letter, byte in byte_letters.ALPHABET.items()}
PRE_TOKENIZERS = {
    "gpt2": byte_level(),
    "gpt2, a space first": byte_level(add_prefix_space=True),
    "gpt2 as a split": split(byte_pipelines.GPT2),
    "qwen2": split(byte_pipelines.QWEN2),
    "qwen35": split(byte_pipelines.QWEN35),
    "llama3": split(byte_pipelines.LLAMA3),
    "llama3, matches kept": split(byte_pipelines.LLAMA3, "Removed", invert=True),
}
MODEL = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
    "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    "vocab": BYTES, "merges": [],
}  # fmt: skip
NAMES = ["qwen3", *byte_pipelines.PIPELINES]
# With what is composed or taken apart; of ideographs and Hangul syllables only some.
CODE_POINTS = [*range(0x3400), *range(0xA000, 0xAC00), *range(0xAC00, 0xD7A4, 7), *range(0xE000, 0x20000)]
CODE_POINTS += [*range(0x3400, 0xA000, 97), *range(0x2F7F0, 0x2FA30)]


def library(merges=(), **parts):
    """A vocabulary of all bytes and what `merges` make."""
    vocab = BYTES | {piece: len(BYTES) + i for i, piece in enumerate(dict.fromkeys(a + b for a, b in merges))}
    content = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level()}
    model = MODEL | {"vocab": vocab, "merges": [list(pair) for pair in merges]}
    return Tokenizer.from_str(json.dumps(content | {"model": model} | parts))


def differing(tokenizer, texts, fast=None):
    """The texts for which the two give other ids."""
    expected = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    ours = (fast or fast_encoder(tokenizer)).ids(texts)
    return [ascii(text) for text, a, b in zip(texts, ours, expected, strict=True) if a != b]


@pytest.fixture(scope="module")
def trained(shared):
    """A small vocabulary in which every merge has been learned from text."""
    tokenizer = library()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=list(BYTES), show_progress=False)
    tokenizer.train_from_iterator(passages(shared / "data" / "xquad", ["en", "th", "ru"])[::4], trainer)
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def subject(shared, trained):
    """The real Qwen3 file, or the small vocabulary in the pipeline of another."""

    @functools.cache
    def load(name, literal):
        if name == "qwen3":
            return Subject.load(shared, name, literal=literal)
        content = in_pipeline(trained, name)
        tokenizer = Tokenizer.from_str(json.dumps(literal_form(content) if literal else content))
        return Subject(fast_encoder(tokenizer), tokenizer, Templates.read(content, False), content)

    return load


@pytest.fixture
def qwen(subject):
    return subject("qwen3", True)


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_ids_of_made_texts_whole_cut_and_in_pairs(shared, subject, name, literal):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    one, outcome = subject(name, literal), Outcome(name, "", seed)
    made = list(itertools.islice(one.texts(seed, shared), 300))
    compare(one, made, random.Random(seed), outcome)
    assert outcome.mismatches == 0, f"seed {seed}: {outcome.examples}"


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_a_trained_vocabulary(shared, trained, pre_tokenizer, ignore_merges):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    parts = {"pre_tokenizer": PRE_TOKENIZERS[pre_tokenizer], "normalizer": {"type": "NFC"}}
    content = trained | parts | {"model": trained["model"] | {"ignore_merges": ignore_merges}}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    maker = Subject(fast_encoder(tokenizer), tokenizer, None, content).texts(seed, shared)
    assert differing(tokenizer, list(itertools.islice(maker, 700))) == [], f"seed {seed}"


def revealing(pre_tokenizer, *, left_first):
    """Bytes are merged with some ASCII characters beside them: ids tell where words end."""
    some = [LETTERS[byte] for byte in b"aeSx1! \n\r'\t"]
    left = [(letter, byte) for letter in some for byte in BYTES]
    right = [(byte, letter) for letter in some for byte in BYTES]
    merges = dict.fromkeys([*left, *right] if left_first else [*right, *left])
    return library(list(merges), pre_tokenizer=pre_tokenizer)


@pytest.mark.parametrize("left_first", [False, True])
@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_where_words_end(pre_tokenizer, left_first):
    tokenizer = revealing(PRE_TOKENIZERS[pre_tokenizer], left_first=left_first)
    classes = ["a", "S", "1", "!", " ", "\n", "\r", "'", "\t", "\u3000", "²", "ſ", "中", "\u0301"]
    texts = ["".join(some) for n in range(1, 4) for some in itertools.product(classes, repeat=n)]
    texts += ["".join(random.choices(classes, k=random.randrange(4, 16))) for _ in range(5000)]
    assert differing(tokenizer, texts) == []


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_the_classes_of_characters_are_the_librarys(pre_tokenizer):
    # Where Python's Unicode and that of the library's regular expressions part: at the ends of ranges.
    known = [code_points.matching(name) for name in (r"\p{L}", r"\p{N}", r"\p{M}", r"\s")]
    ends = {n for ranges in known for a, b in ranges for n in (a - 1, a, b, b + 1)} | set(range(0x250))
    characters = [chr(n) for n in sorted(ends) if n >= 0 and not 0xD800 <= n < 0xE000]
    tokenizer = revealing(PRE_TOKENIZERS[pre_tokenizer], left_first=True)
    fast = fast_encoder(tokenizer)
    for context in ("a{0}a", "'{0}e", "'l{0}", " {0}1", "!{0}\n", "\n{0} x", "1{0}!", " {0}{0}a", "{0}"):
        assert differing(tokenizer, [context.format(c) for c in characters], fast) == []


def test_contractions_in_any_case_have_their_odd_letter():
    tokenizer = revealing(PRE_TOKENIZERS["qwen2"], left_first=True)
    fast = fast_encoder(tokenizer)
    cased = [c for c in map(chr, CODE_POINTS) if c.casefold() != c or c.upper() != c or ord(c) < 0x250]
    assert "ſ" in cased
    for context in ("'{0}a", "'r{0} a", "'{0}e a", "'v{0}!", "'{0}l1"):
        assert differing(tokenizer, [context.format(c) for c in cased], fast) == []


def test_form_c_of_every_character_alone_and_taken_apart():
    tokenizer = library(normalizer={"type": "NFC"})
    fast = fast_encoder(tokenizer)
    assert differing(tokenizer, [chr(n) for n in CODE_POINTS], fast) == []
    apart = [NFD().normalize_str(chr(n)) for n in CODE_POINTS]
    assert (
        differing(tokenizer, [text for n, text in zip(CODE_POINTS, apart, strict=True) if text != chr(n)])
        == []
    )


def test_form_c_of_what_composes_and_changes_places():
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    parts, marks, pairs = code_points.form_c()
    pool = [chr(n) for n, _ in (*parts, *marks)] + [chr(n) for pair in pairs for n in pair]
    pool += [chr(n) for n in (*range(0x1100, 0x1200), *range(0xAC00, 0xD7A4, 97))]
    pool += 40 * [
        "a",
        "u",
        "A",
        "\u0301",
        "\u0308",
        "\u0323",
        "\u0327",
        "\u0915",
        "\u093c",
        "\u0bc6",
        "\u0bbe",
    ]
    texts = ["".join(chance.choices(pool, k=chance.randrange(2, 12))) for _ in range(20_000)]
    texts += ["a" + "\u0301\u0323" * 50_000 + "b", "\u0323\u0301" * 300, "\u0bc6" + "\u0334" * 300 + "\u0bbe"]
    assert differing(library(normalizer={"type": "NFC"}), texts) == [], f"seed {seed}"


def test_marks_have_the_places_of_their_classes():
    _, marks, _ = code_points.form_c()
    classes = {
        rank: {unicodedata.combining(chr(mark)) for mark, own in marks if own == rank} for _, rank in marks
    }
    known = [(rank, number) for rank, (number,) in sorted(classes.items())]
    assert known == sorted(known)  # both ascend: Python knows these marks too
    assert len(marks) > 700


@pytest.mark.parametrize("length", [1, 7, 29, 30, 31, 32, 63, 64, 65, 66, 1000, 100_000])
@pytest.mark.parametrize("unit", ["a", "ab", "の", "กา", " ", "!?", "é\u0323", "\U0001f468\u200d"])
def test_words_of_any_length(qwen, length, unit):
    # Around the sizes at which a word leaves the cache and at which a heap takes over.
    text = (unit * length)[:length]
    assert differing(qwen.library, [text, "x" + text + " b"], qwen.encoder) == []


ADVERSARIAL = [
    "IT'S I'M we'Ve he'LL I'D 'ſ 'ſe ' s '", "''s''t", "don\u2019t", "  \n  \n  x",
    "a\r\n\r\n b \n\n\nc\r\r\n\t\td", "\u0085a\u0085\u0085b\u00a0\u00a0c\u3000\u3000d\u2028\u2029",
    "\x1c\x1d a", "\u180e a \u200b b", "1234567 ١٢٣٤ ४५६ ²½Ⅷ〇 1a2b", "３４５", "\x00", "a\x00\x00b",
    "\ufeffx\ufffd\uffff\U0010ffff",
    "e\u0301\u0301 x\u0323\u0307 \u0301", "👨\u200d👩\u200d👧 👍🏽 🇩🇪 ❤\ufe0f",
    "กำลังใจ ক্ষ क्ष क़ ड़", "각각\u11a8 한국어", "ﬁ Å \u212b \u2126", "\u0344 \u0340 \u0374 \u037e",
    "<think>x</think>", "<|im_start|>user\n<|im_end|>", "<|im_start", "", " ", "\n",
]  # fmt: skip


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_adversarial_texts(subject, name, literal):
    one = subject(name, literal)
    assert differing(one.library, [*ADVERSARIAL, "".join(ADVERSARIAL)], one.encoder) == []


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("pre_tokenizer", ["gpt2", "gpt2, a space first", "qwen2"])
def test_added_tokens_before_and_after_normalization(normalizer, pre_tokenizer):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kinds = {
        "<a>": (), "<a>b": ("normalized",), "  ": ("normalized",), "   ": ("normalized",), "[M]": ("lstrip",),
        "é": ("normalized",), "a>": ("normalized", "lstrip"), "[R]": ("rstrip",), "中": (),
        "x y": ("normalized",), "[M": ("special",),
    }  # fmt: skip
    tokens = [
        added_token(300 + i, content, **dict.fromkeys(options, True))
        for i, (content, options) in enumerate(kinds.items())
    ]
    tokenizer = library(
        added_tokens=tokens, normalizer=normalizer, pre_tokenizer=PRE_TOKENIZERS[pre_tokenizer]
    )
    parts = [token["content"] for token in tokens] + [
        " ",
        "\u3000",
        "\n",
        "a",
        ">",
        "<",
        "e\u0301",
        "\u0301",
        "x",
        "y",
    ]
    texts = ["".join(chance.choices(parts, k=chance.randrange(1, 12))) for _ in range(5000)]
    assert differing(tokenizer, texts) == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFD"}]}},
            "normalizer",
        ),
        ({"pre_tokenizer": None}, "pre-tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer"),
        ({"pre_tokenizer": byte_level(use_regex=False)}, "pre-tokenizer"),
        ({"pre_tokenizer": split(r"\p{L}+|\s+")}, "pre-tokenizer"),
        ({"added_tokens": [added_token(300, "<x>", single_word=True)]}, "added token"),
        ({"added_tokens": [added_token(300, " "), added_token(301, "<x>", rstrip=True)]}, "added token"),
        (
            {"normalizer": {"type": "NFC"}, "added_tokens": [added_token(300, "e\u0301", normalized=True)]},
            "added token",
        ),
    ],
)
def test_pipelines_it_does_not_know(parts, reason):
    with pytest.raises(NoEncoder, match=reason):
        fast_encoder(library(**parts))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"byte_fallback": True}, "byte fallback"),
        ({"continuing_subword_prefix": "##"}, "prefix"),
        ({"end_of_word_suffix": "</w>"}, "suffix"),
        ({"vocab": {k: v for k, v in BYTES.items() if k != "Ā"}}, "byte without a piece"),
        ({"vocab": BYTES | {"zz": 7}}, "one id"),
    ],
)
def test_models_it_does_not_know(options, reason):
    with pytest.raises(NoEncoder, match=reason):
        fast_encoder(library(model=MODEL | options))


def test_a_split_that_matches_nothing_known_differs_by_one_sign():
    known = split(byte_pipelines.QWEN2)
    assert fast_encoder(library(pre_tokenizer=known))
    with pytest.raises(NoEncoder, match="pre-tokenizer"):
        fast_encoder(library(pre_tokenizer=split(byte_pipelines.QWEN2 + "|$")))
    with pytest.raises(NoEncoder, match="pre-tokenizer"):
        fast_encoder(library(pre_tokenizer=split(byte_pipelines.QWEN2, "Removed")))


def test_pieces_that_no_merge_makes_are_words_only_where_merges_are_ignored():
    vocab = BYTES | {"abc": 256, "bc": 257}
    model = MODEL | {"vocab": vocab, "merges": [["b", "c"]]}
    for ignore_merges, ids in ((False, [BYTES["a"], 257]), (True, [256])):
        tokenizer = library(model=model | {"ignore_merges": ignore_merges})
        assert fast_encoder(tokenizer).ids(["abc"]) == [ids]
        assert differing(tokenizer, ["abc", "abcabc", "bc abc"]) == []


def test_frames_cuts_and_segments(qwen):
    texts = ["one two three four five", "caf\u0065\u0301 " * 40, "ab" * 3000]
    frame = Frame(Side([7, 8], [0, 0]), Side([9], [1]), text_segment=1, room=3)
    encoded = qwen.encoder.encode(texts, [frame], with_segments=True)
    whole = qwen.ids(texts)
    assert encoded.lists() == [[7, 8, *ids[:3], 9] for ids in whole]
    assert encoded.segments is not None
    assert encoded.segments.tolist() == [0, 0, 1, 1, 1, 1] * 3
    assert encoded.cut.all()
    last = qwen.encoder.encode(texts, [Frame(room=4, keeps_end=True)])
    assert last.lists() == [ids[-4:] for ids in whole]


def test_texts_in_form_c_or_not_never_need_the_library(qwen, shared):
    texts = [*passages(shared / "data" / "xquad", ["ar", "hi"])[::4], "\u1112\u1161\u11ab", "e\u0301"]
    assert any(NFC().normalize_str(text) != text for text in texts)
    states = qwen.encoder._native.encode(texts, qwen.encoder._whole)[3]
    assert set(states.tolist()) == {encoder._WHOLE}
    assert differing(qwen.library, texts, qwen.encoder) == []


def test_half_a_surrogate_pair_is_named(qwen):
    with pytest.raises(NotUnicode) as refused:
        qwen.encoder.encode(["fine", "a\ud83d"])
    assert refused.value.index == 1


def test_many_threads_one_encoder(shared, qwen):
    one = fast_encoder(qwen.library, num_threads=2)
    texts = passages(shared / "data" / "xquad", ["de", "hi", "zh"])[::3]
    expected = one.ids(texts)
    assert expected == qwen.ids(texts)
    assert ids_by_threads(one, texts, 4) == [expected] * 4


def test_steady_state_allocates_nothing_and_an_outlier_is_given_back(shared, qwen):
    native = encoder._native
    texts = passages(shared / "data" / "xquad", ["en", "hi"])[::4]
    one = fast_encoder(qwen.library)
    for _ in range(3):
        one.encode(texts)
    before = native.num_allocations()
    for _ in range(5):
        one.encode(texts)
    assert native.num_allocations() == before
    one.ids(["x\u0301" * 1_000_000])
    one.ids(["x" * 1_000_000])
    one.ids(["short"])
    before = native.num_allocations()
    one.ids(["short again"])
    assert native.num_allocations() == before


def test_literal_form_reads_specials_as_text(shared):
    content = read_content(shared, "qwen3")
    tokenizer = Tokenizer.from_str(json.dumps(literal_form(content)))
    text = "<|im_start|><think>"
    (ids,) = fast_encoder(tokenizer).ids([text])
    assert not {token["id"] for token in content["added_tokens"]} & set(ids)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode(ids) == text


def test_letters_stand_for_bytes():
    text = "Zürich 東京 🙂\x00\x7f"
    tokenizer = Tokenizer(models.BPE(BYTES, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([BYTES[LETTERS[byte]] for byte in text.encode()]) == text
    assert byte_letters.texts_of([LETTERS[b] for b in b"a \xe9"]) == ["a", " "]
    assert byte_letters.pieces({"Ġa": 5, "\u4e2d": 6}) == [(b" a", 5)]
