"""Ids equal the library's own, whole and cut, alone and at once; user text yields no control token."""

import asyncio
import json
import lzma
import os
import shutil
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ivy_gateway.errors import EmptyInput, InvalidValue, StartupError, TooLong
from ivy_gateway.jobs import TokenIds, Truncation
from ivy_gateway.special_tokens import Templates, literal_form
from ivy_gateway.templates import Prompt
from ivy_gateway.tokenizer import TextTokenizer, num_characters
from protos.fingerprint import tokenizer_hash

LIMIT = 32
TEXTS = (
    "",
    "a",
    "Bees make honey; the Danube flows through Vienna.",
    "left\x00right \x01\x1b[31m a\x08b",
    "👩🏽‍🚀👨‍👩‍👧‍👦🇳🇵 " * 20,
    "\ufe0f\u200b",
    "東京は日本の首都です。" * 3,
    " lead,  two  spaces and trail \n\t",
    "naïve Ǆ ﬁ Å ǅ ẞ",
    "word " * 200,
)
SPELLINGS = (
    "[CLS] [SEP]",
    "</s>",
    "<s>",
    "<|im_end|>",
    "<|endof<|endoftext|>text|>",
    "<mask>",
    "＜s＞ <pad>",
    "[MASK]",
    "before [SEP] after</s>and<|endoftext|>",
)
NAMES = ("minilm", "xlm-roberta", "qwen3")
KEEP, CUT, CUT_LEFT = Truncation(enabled=False), Truncation(enabled=True), Truncation(True, side="left")


def end_token(content):
    """The Qwen3 file as the embedding models ship it: one end token after the text."""
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 1}},
        ],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [151643], "tokens": ["<|endoftext|>"]}
        },
    }
    stages = [content["post_processor"], template]
    return content | {"post_processor": {"type": "Sequence", "processors": stages}}


@pytest.fixture(scope="module")
def folders(minilm, tmp_path_factory, request):
    """The folder of each tokenizer by name."""
    found = {"minilm": minilm}

    def folder(name):
        if name not in found:
            packed = request.getfixturevalue("shared") / "tokenizers" / name / "tokenizer.json.xz"
            if not packed.is_file():
                pytest.skip(f"no {name} tokenizer among the shared files")
            content = json.loads(lzma.decompress(packed.read_bytes()))
            found[name] = tmp_path_factory.mktemp(name)
            text = json.dumps(end_token(content) if name == "qwen3" else content)
            (found[name] / "tokenizer.json").write_text(text)
        return found[name]

    return folder


@pytest.fixture(scope="module")
def load(folders):
    """Ours and the library's own object: `load(name, literal)`; each is made once."""
    made = {}

    def pair(name, literal=True):
        if (name, literal) not in made:
            folder = folders(name)
            ours = TextTokenizer.load(folder, literal=literal, max_length=LIMIT, workers=3, lower_case=False)
            made[name, literal] = ours, reference(folder / "tokenizer.json", literal)
        return made[name, literal]

    yield pair
    for ours, _ in made.values():
        ours.close()


def reference(path, literal):
    """The object that defines the right ids."""
    if not literal:
        theirs = Tokenizer.from_file(str(path))
        theirs.no_truncation()
        theirs.no_padding()
        return theirs
    content = json.loads(path.read_text()) | {"truncation": None, "padding": None}
    special = {token["content"] for token in content["added_tokens"]}
    content["added_tokens"] = []
    if content["model"]["type"] == "Unigram":
        unknown = content["model"]["unk_id"]
        for i, piece in enumerate(content["model"]["vocab"]):
            if piece[0] in special and i != unknown:
                piece[0] = f"\x00unreachable\x00 {i}"
    return Tokenizer.from_str(json.dumps(content))


async def encode(ours, *texts, truncation=CUT):
    return await ours.encode([Prompt(i, t) for i, t in enumerate(texts)], truncation, True, "input")


async def encode_pairs(ours, *pairs, truncation=CUT, max_tokens_per_query=None):
    prompts = [Prompt(i, *pair) for i, pair in enumerate(pairs)]
    return await ours.encode_pairs(prompts, truncation, True, ("query", "documents"), max_tokens_per_query)


def cut_ids(theirs, text, limit, side):
    """A single text's ids, cut the way the policy says, from the library's uncut ones."""
    bare, full = theirs.encode(text, add_special_tokens=False).ids, theirs.encode(text).ids
    room = limit - (len(full) - len(bare))
    start = next(i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare)
    kept = bare if len(bare) <= room else bare[:room] if side == "right" else bare[len(bare) - room :]
    return full[:start] + kept + full[start + len(bare) :]


def words(theirs, num_tokens):
    """A text of that many tokens, special tokens included."""
    special = len(theirs.encode("").ids)
    text = " ".join(["a"] * (num_tokens - special))
    assert len(theirs.encode(text).ids) == num_tokens
    return text


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("name", NAMES)
async def test_ids_equal_the_librarys_whole_and_cut(load, name, literal):
    ours, theirs = load(name, literal)
    texts = [*TEXTS, *SPELLINGS]
    for truncation in (CUT, CUT_LEFT):
        got = await encode(ours, *texts, truncation=truncation)
        assert [item.index for item in got] == list(range(len(texts)))
        for text, item in zip(texts, got, strict=True):
            whole = theirs.encode(text).ids
            assert item.token_ids.tolist() == cut_ids(theirs, text, LIMIT, truncation.side)
            assert item.token_ids.dtype == np.int32
            assert item.truncated == (len(whole) > LIMIT)
            assert item.segment_ids is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["right", "left"])
async def test_the_limit_is_exact(load, name, side):
    ours, theirs = load(name)
    texts = [words(theirs, n) for n in (LIMIT - 1, LIMIT, LIMIT + 1)]
    got = await encode(ours, *texts, truncation=Truncation(enabled=True, side=side))
    assert [item.num_tokens for item in got] == [LIMIT - 1, LIMIT, LIMIT]
    assert [item.truncated for item in got] == [False, False, True]
    assert (await encode(ours, texts[1], truncation=KEEP))[0].num_tokens == LIMIT
    with pytest.raises(TooLong, match=rf"`input\[1\]` has {LIMIT + 1} tokens.*at most {LIMIT} "):
        await encode(ours, texts[0], texts[2], truncation=KEEP)


@pytest.mark.parametrize("name", NAMES)
async def test_a_cut_keeps_start_and_end_tokens(load, name):
    ours, theirs = load(name)
    first, second = await encode(ours, "word " * 200 + "one ending", "word " * 200 + "and another")
    empty = theirs.encode("").ids
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.token_ids[-1] == empty[-1]


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize("name", NAMES)
async def test_pairs_equal_the_librarys(load, name, literal):
    ours, theirs = load(name, literal)
    pairs = [("short query", text) for text in (*TEXTS, *SPELLINGS)] + [("</s>[SEP]", "x"), ("x", "")]
    for (query, document), item in zip(pairs, await encode_pairs(ours, *pairs), strict=True):
        expected = theirs.encode(query, document)
        over = max(0, len(expected.ids) - LIMIT)
        end = len(expected.ids) - 1  # each of these templates closes with one token
        cut = list(range(end - over, end))
        assert item.token_ids.tolist() == np.delete(expected.ids, cut).tolist()
        assert item.truncated == (over > 0)
        if name == "minilm":
            assert item.segment_ids.tolist() == np.delete(expected.type_ids, cut).tolist()
        else:
            assert item.segment_ids is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["right", "left"])
async def test_the_limit_is_exact_for_pairs(load, name, side):
    ours, theirs = load(name)
    query = "what is this"
    free = LIMIT - len(theirs.encode(query, "").ids)
    documents = [" ".join(["a"] * n) for n in (free - 1, free, free + 1)]
    got = await encode_pairs(ours, *((query, d) for d in documents), truncation=Truncation(True, side=side))
    assert [item.num_tokens for item in got] == [LIMIT - 1, LIMIT, LIMIT]
    assert [item.truncated for item in got] == [False, False, True]
    whole = theirs.encode(documents[2], add_special_tokens=False).ids
    kept = whole[:free] if side == "right" else whole[1:]
    assert got[2].token_ids.tolist()[LIMIT - 1 - free : LIMIT - 1] == kept
    with pytest.raises(TooLong, match=rf"`documents\[2\]` has {LIMIT + 1} tokens") as caught:
        await encode_pairs(ours, *((query, d) for d in documents), truncation=KEEP)
    assert caught.value.param == "documents[2]"


async def test_the_left_side_of_a_document_can_be_cut(load):
    ours, theirs = load("minilm")
    numbers = " ".join(str(n) for n in range(60))
    (item,) = await encode_pairs(ours, ("q", numbers), truncation=CUT_LEFT)
    bare = theirs.encode(numbers, add_special_tokens=False).ids
    assert item.token_ids.tolist()[3:-1] == bare[len(bare) - (LIMIT - 4) :]


async def test_a_query_without_room_is_refused_and_can_be_limited(load):
    ours, _ = load("minilm")
    query = " ".join(["a"] * (LIMIT - 3))
    with pytest.raises(TooLong, match=f"`query` of pair 0 has {LIMIT - 3} tokens") as caught:
        await encode_pairs(ours, (query, "b"))
    assert caught.value.param == "query"
    (limited,) = await encode_pairs(ours, (query, "b"), max_tokens_per_query=4)
    assert limited.num_tokens == 4 + 1 + 3
    assert limited.truncated
    (just,) = await encode_pairs(ours, (" ".join(["a"] * (LIMIT - 4)), "b c"))
    assert (just.num_tokens, just.truncated) == (LIMIT, True)


async def test_a_typed_separator_does_not_move_the_segment_border(load):
    ours, theirs = load("minilm")
    (item,) = await encode_pairs(ours, ("a [SEP] b", "c [SEP] d"))
    assert item.token_ids.tolist().count(theirs.token_to_id("[SEP]")) == 2
    border = item.segment_ids.tolist().index(1)
    assert item.token_ids[border - 1] == theirs.token_to_id("[SEP]")


@pytest.mark.parametrize("name", [*NAMES, "flan-t5"])
async def test_no_spelling_gives_a_control_token(load, folders, name):
    ours, _ = load(name)
    content = json.loads((folders(name) / "tokenizer.json").read_text())
    unknown = {"[UNK]", "<unk>"}
    special = {t["content"]: t["id"] for t in content["added_tokens"] if t["content"] not in unknown}
    (plain,) = await encode(ours, "a")
    texts = [*SPELLINGS, *list(special)[:40], *(f"x{s}y" for s in list(special)[:40])]
    for item in await encode(ours, *texts):
        control = [i for i in item.token_ids.tolist() if i in special.values()]
        assert control == [i for i in plain.token_ids.tolist() if i in special.values()]


async def test_parity_mode_reads_spellings_as_the_file_does(load):
    ours, theirs = load("minilm", literal=False)
    (item,) = await encode(ours, "a [SEP] b")
    assert item.token_ids.tolist().count(theirs.token_to_id("[SEP]")) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=60), min_size=1, max_size=6), st.sampled_from(["right", "left"]))
@pytest.mark.parametrize("name", NAMES)
def test_any_text_gives_the_librarys_ids(load, name, texts, side):
    ours, theirs = load(name)
    got = asyncio.run(encode(ours, *texts, truncation=Truncation(enabled=True, side=side)))
    assert [item.token_ids.tolist() for item in got] == [cut_ids(theirs, t, LIMIT, side) for t in texts]


async def test_large_lists_are_spread_and_stay_in_order(load):
    ours, theirs = load("minilm")
    texts = [f"item {i:04d} colour red " + "and more " * (i % 50) for i in range(2048)]
    got = await encode(ours, *texts)
    assert [item.index for item in got] == list(range(2048))
    for i in (0, 49, 1000, 2047):
        assert got[i].token_ids.tolist() == cut_ids(theirs, texts[i], LIMIT, "right")


async def test_many_requests_at_once_do_not_disturb_each_other(load):
    ours, theirs = load("minilm")
    text = "silver river " * 300
    limits = [5 + n % 20 for n in range(200)]
    singles = (
        encode(ours, text, truncation=Truncation(True, n, "left" if n % 2 else "right")) for n in limits
    )
    pairs = (encode_pairs(ours, ("q", text), truncation=Truncation(True, n)) for n in limits)
    got = await asyncio.gather(*singles, *pairs)
    for n, (item,) in zip(limits, got[:200], strict=True):
        assert item.token_ids.tolist() == cut_ids(theirs, text, n, "left" if n % 2 else "right")
    assert [item.num_tokens for (item,) in got[200:]] == limits


def test_many_threads_at_once_give_the_same_ids(load):
    ours, theirs = load("minilm")
    expected = [cut_ids(theirs, text, LIMIT, "right") for text in TEXTS]
    results = []

    def work():
        results.append([i.token_ids.tolist() for i in asyncio.run(encode(ours, *TEXTS))])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


@pytest.mark.parametrize("filler", ["", "long " * 200])
async def test_half_a_surrogate_pair_is_a_client_error(load, filler):
    ours, _ = load("minilm")
    with pytest.raises(InvalidValue, match=r"`input\[1\]` is not valid Unicode.*U\+D83D") as caught:
        await encode(ours, "fine", filler + "broken \ud83d half")
    assert caught.value.param == "input[1]"
    with pytest.raises(InvalidValue, match=r"`documents\[0\]`"):
        await encode_pairs(ours, ("q", filler + "\ude00"))
    with pytest.raises(InvalidValue, match="`query` is not"):
        await encode_pairs(ours, ("\ude00", "d"))


async def test_a_hundred_thousand_characters_cut_like_the_full_encoding(load):
    ours, theirs = load("minilm")
    text = "silver river " * 7700
    (item,) = await encode(ours, text)
    assert item.token_ids.tolist() == cut_ids(theirs, text, LIMIT, "right")


async def test_over_long_inputs_are_all_named(load):
    ours, _ = load("minilm")
    texts = ["a " * 50 if i % 2 else "a" for i in range(30)]
    with pytest.raises(TooLong, match=r"`input\[1\]` has 52 tokens.*`input\[3\]`.*and 6 more") as caught:
        await encode(ours, *texts, truncation=KEEP)
    assert caught.value.param == "input[1]"


async def test_the_servers_default_holds_where_a_request_says_nothing(load):
    ours, _ = load("minilm")
    prompts = [Prompt(0, "a " * 50)]
    assert (await ours.encode(prompts, Truncation(), True, "input"))[0].truncated
    with pytest.raises(TooLong):
        await ours.encode(prompts, Truncation(), False, "input")


async def test_a_request_may_lower_the_limit_but_not_to_nothing(load):
    ours, _ = load("minilm")
    assert (await encode(ours, "a b c d", truncation=Truncation(True, 4)))[0].num_tokens == 4
    assert (await encode(ours, "a " * 90, truncation=Truncation(True, 9999)))[0].num_tokens == LIMIT
    with pytest.raises(InvalidValue, match="2 tokens leaves no room beside 2 special"):
        await encode(ours, "a", truncation=Truncation(True, 2))


def ids(*values, segments=None):
    return TokenIds(np.array(values, np.int32), None if segments is None else np.array(segments, np.int32))


async def test_ready_ids_are_taken_verbatim_among_texts(load):
    ours, theirs = load("minilm")
    got = await encode(ours, "blue lamp", ids(*theirs.encode("blue lamp").ids), ids(5), "x")
    assert got[0].token_ids.tolist() == got[1].token_ids.tolist()
    assert got[2].token_ids.tolist() == [5]
    assert [item.index for item in got] == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [30522, 999999, -1])
async def test_ids_outside_the_vocabulary_are_named(load, wrong):
    ours, _ = load("minilm")
    message = rf"`input\[1\]`: token id {wrong} is outside 0 to 30521"
    with pytest.raises(InvalidValue, match=message) as caught:
        await encode(ours, "fine", ids(12, wrong, 34))
    assert caught.value.param == "input[1]"
    with pytest.raises(InvalidValue, match=f"token id {wrong}"):
        await encode_pairs(ours, ("fine", ids(wrong)))


async def test_the_last_id_of_the_vocabulary_is_fine(load):
    ours, _ = load("qwen3")
    assert ours.vocabulary_size == 151669
    assert (await encode(ours, ids(151668)))[0].num_tokens == 1


async def test_segment_ids_must_match_their_ids(load):
    ours, _ = load("minilm")
    (item,) = await encode(ours, ids(101, 5, 102, 6, 102, segments=[0, 0, 0, 1, 1]))
    assert item.segment_ids.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(InvalidValue, match="2 segment ids for 3 token ids"):
        await encode(ours, ids(101, 5, 102, segments=[0, 0]))


async def test_cut_ready_ids_keep_the_special_tokens_they_came_with(load):
    ours, _ = load("minilm")
    body = list(range(1000, 1050))
    segments = [0] * 26 + [1] * 26
    right, left, bare = await asyncio.gather(
        encode(ours, ids(101, *body, 102, segments=segments)),
        encode(ours, ids(101, *body, 102), truncation=CUT_LEFT),
        encode(ours, ids(*body)),
    )
    assert right[0].token_ids.tolist() == [101, *body[: LIMIT - 2], 102]
    assert right[0].segment_ids.tolist() == [*segments[: LIMIT - 1], 1]
    assert left[0].token_ids.tolist() == [101, *body[-(LIMIT - 2) :], 102]
    assert bare[0].token_ids.tolist() == body[:LIMIT]
    assert right[0].truncated
    with pytest.raises(TooLong, match="50 tokens"):
        await encode(ours, ids(*body), truncation=KEEP)


async def test_pairs_of_ids_are_joined_like_pairs_of_texts(load):
    ours, theirs = load("minilm")
    a, b = (ids(*theirs.encode(text, add_special_tokens=False).ids) for text in ("a query", "its document"))
    from_texts, from_ids = await encode_pairs(ours, ("a query", "its document"), (a, b))
    assert from_ids.token_ids.tolist() == from_texts.token_ids.tolist()
    assert from_ids.segment_ids.tolist() == from_texts.segment_ids.tolist()


async def test_inputs_without_any_token_are_named(load):
    ours, _ = load("minilm")
    with pytest.raises(EmptyInput, match=r"`input\[1\]`, `input\[3\]`") as caught:
        await encode(ours, "a", ids(), "b", ids())
    assert caught.value.param == "input[1]"


def test_lower_casing(minilm, folders):
    cased = TextTokenizer.load(folders("qwen3"), literal=True, max_length=LIMIT, workers=1, lower_case=True)
    try:
        upper, lower = asyncio.run(encode(cased, "PARIS Straße", "paris straße"))
    finally:
        cased.close()
    assert upper.token_ids.tolist() == lower.token_ids.tolist()


def test_attributes(load, minilm):
    ours, theirs = load("minilm")
    assert ours.hash == tokenizer_hash(minilm / "tokenizer.json")
    assert ours.vocabulary_size == theirs.get_vocab_size()
    assert ours.special_counts == (2, 3)
    assert ours.template.pair.has_segments
    assert load("xlm-roberta")[0].special_counts == (2, 4)


def test_the_library_does_not_start_threads_of_its_own(load):
    load("minilm")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_characters_are_counted_as_unicode_scalars():
    assert num_characters(["añ🙂", ids(1, 2), ("q", "dd"), ("q", ids(7, 8, 9))]) == 3 + 2 + 3 + 4


@pytest.fixture
def altered(minilm, tmp_path):
    """Loads MiniLM's tokenizer with parts of its file replaced."""

    def load_with(**changes):
        for name in ("config.json", "tokenizer_config.json"):
            shutil.copy(minilm / name, tmp_path)
        content = json.loads((minilm / "tokenizer.json").read_text())
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
        return TextTokenizer.load(tmp_path, literal=True, max_length=LIMIT, workers=1, lower_case=False)

    return load_with


@pytest.mark.parametrize(
    ("processor", "counts", "segments"),
    [
        ({"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}, (2, 3), [0, 0, 0, 1, 1]),
        (
            {
                "type": "RobertaProcessing",
                "sep": ["[SEP]", 102],
                "cls": ["[CLS]", 101],
                "trim_offsets": True,
                "add_prefix_space": False,
            },
            (2, 4),
            None,
        ),
        (None, (0, 0), None),
    ],
)
def test_other_post_processors(altered, processor, counts, segments):
    ours = altered(post_processor=processor)  # loading compares with the library, segment ids included
    try:
        (item,) = asyncio.run(encode_pairs(ours, ("a", "b")))
    finally:
        ours.close()
    assert ours.special_counts == counts
    assert (None if item.segment_ids is None else item.segment_ids.tolist()) == segments


def test_an_unknown_post_processor_is_refused(altered):
    with pytest.raises(StartupError, match="'Mystery' is not supported"):
        altered(post_processor={"type": "Mystery"})


def test_a_template_that_turns_a_pair_round_is_refused(altered, minilm):
    template = json.loads((minilm / "tokenizer.json").read_text())["post_processor"]
    with pytest.raises(StartupError, match="in order"):
        altered(post_processor=template | {"pair": template["pair"][::-1]})


def test_a_template_read_wrongly_would_be_noticed(altered, monkeypatch):
    plain = Templates.read({"post_processor": None}, segments=False)
    monkeypatch.setattr(Templates, "read", lambda content, segments: plain)
    with pytest.raises(StartupError, match="gives other ids than ours"):
        altered()


def test_a_special_token_that_can_still_be_spelled_is_refused(altered):
    with pytest.raises(StartupError, match=r"'\[PAD\]' in a text would still be a special token"):
        altered(pre_tokenizer={"type": "WhitespaceSplit"}, normalizer=None)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 3}', '{"model": {"type": "None", "vocab": {}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path, literal=True, max_length=LIMIT, workers=1, lower_case=False)


def test_the_literal_form_keeps_the_unknown_token_and_every_score():
    vocab = [["<s>", 0.0], ["<unk>", 0.0], ["a", -1.5]]
    added = [{"content": "<s>", "id": 0, "special": True}, {"content": "<unk>", "id": 1, "special": True}]
    content = {"model": {"type": "Unigram", "unk_id": 1, "vocab": vocab}, "added_tokens": added}
    literal = literal_form(content)
    assert literal["added_tokens"] == []
    assert [piece for piece, _ in literal["model"]["vocab"]][1:] == ["<unk>", "a"]
    assert [score for _, score in literal["model"]["vocab"]] == [0.0, 0.0, -1.5]
    assert vocab[0][0] == "<s>"
