"""Tokens with byte offsets, both dialects of `/tokenize`, and ids back to text."""

from __future__ import annotations

import asyncio
import lzma

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ivy_gateway.jobs import TokenIds, Truncation
from ivy_gateway.templates import Prompt
from ivy_gateway.token_offsets import byte_positions
from ivy_gateway.tokenizer import TextTokenizer
from tests.ivy_gateway.fake_tulip import FakeTulip

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = (
    "A ferry.",
    " lead,  two  spaces and trail \n\t",
    "Zürich 東京 🙂 ferries",
    "👩🏽‍🚀👨‍👩‍👧‍👦🇳🇵 x",
    "naïve Ǆ ﬁ Å ẞ e\u0301",
    "before [SEP] after</s>and<|endoftext|>",
)
NAMES = ("minilm", "xlm-roberta", "qwen3")
_UNCUT = Truncation(enabled=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(start_gateway):
    async with start_gateway(prompts={"query": "frag: é "}, max_client_batch_size=50) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parity(start_gateway):
    async with start_gateway(literal_text=False) as running:
        yield running


@pytest.fixture(scope="module")
def plain(minilm):
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="module")
def folders(minilm, tmp_path_factory, request):
    """The folder of each tokenizer by name."""
    found = {"minilm": minilm}

    def folder(name):
        if name not in found:
            packed = request.getfixturevalue("shared") / "tokenizers" / name / "tokenizer.json.xz"
            found[name] = tmp_path_factory.mktemp(name)
            (found[name] / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
        return found[name]

    return folder


@pytest.fixture(scope="module")
def load(folders):
    made = {}

    def one(name, literal, lower_case=False):
        key = name, literal, lower_case
        if key not in made:
            made[key] = TextTokenizer.load(
                folders(name), literal=literal, max_length=64, workers=2, lower_case=lower_case
            )
        return made[key]

    yield one
    for ours in made.values():
        ours.close()


async def tokenize(ours, *texts, special=True):
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    return await ours.tokenize(prompts, "inputs", add_special_tokens=special)


# the tokens themselves


@pytest.mark.parametrize(
    ("name", "literal"), [("minilm", True), ("minilm", False), ("xlm-roberta", True), ("qwen3", True)]
)
async def test_tokens_are_the_librarys_with_offsets_in_bytes(load, folders, name, literal):
    ours = load(name, literal)
    theirs = Tokenizer.from_file(str(folders(name) / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    for text, shown in zip(TEXTS, await tokenize(ours, *TEXTS), strict=True):
        assert [token.id for token in shown.tokens] == ours.ids_of(text).tolist()
        assert len(shown.pieces) == len(shown.tokens)
        own = [token for token in shown.tokens if not token.special]
        raw = text.encode()
        assert all(token.text == raw[token.start : token.stop].decode() for token in own)
        encoding = theirs.encode(text)
        if [token.id for token in shown.tokens] != encoding.ids:
            assert literal  # a special token's spelling, which is plain text here
            assert "SEP" in text
            continue
        expected = [
            (None, None) if special else tuple(len(text[:at].encode()) for at in offsets)
            for offsets, special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        ]
        assert [(token.start, token.stop) for token in shown.tokens] == expected
        assert list(shown.pieces) == encoding.tokens


@pytest.mark.parametrize("name", NAMES)
async def test_special_tokens_have_names_and_no_place(load, name):
    (shown,) = await tokenize(load(name, True), "tea")
    special = [token for token in shown.tokens if token.special]
    names = {"minilm": ["[CLS]", "[SEP]"], "xlm-roberta": ["<s>", "</s>"], "qwen3": []}
    assert [token.text for token in special] == names[name]
    assert all(token.start is token.stop is None for token in special)
    (bare,) = await tokenize(load(name, True), "tea", special=False)
    assert bare.tokens == tuple(token for token in shown.tokens if not token.special)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
async def test_any_texts_tokens_lie_inside_it_in_order(load, text):
    for name in ("minilm", "qwen3"):
        (shown,) = await tokenize(load(name, True), text, special=False)
        raw, reached = text.encode(), 0
        for token in shown.tokens:
            assert 0 <= token.start <= token.stop <= len(raw)
            assert token.start >= reached or raw[token.start : token.stop].decode()  # parts of one character
            assert token.text == raw[token.start : token.stop].decode()
            reached = max(reached, token.stop)


async def test_lower_case_that_grows_points_at_the_capital(load):
    text = "x İstanbul É"
    (shown,) = await tokenize(load("minilm", True, lower_case=True), text, special=False)
    assert "".join(token.text for token in shown.tokens).replace(" ", "") == "xİstanbulÉ"
    assert shown.tokens[-1].stop == len(text.encode())


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
async def test_byte_positions_of_every_boundary(text):
    starts, stops = byte_positions(text, text)
    assert list(starts) == list(stops) == [len(text[:at].encode()) for at in range(len(text) + 1)]


# /tokenize with inputs


async def test_tei_tokenize(gateway, plain):
    reply = (await gateway.post("/tokenize", inputs="Zürich.")).json()
    assert reply == [
        [
            {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None},
            {"id": plain.token_to_id("zurich"), "text": "Zürich", "special": False, "start": 0, "stop": 7},
            {"id": plain.token_to_id("."), "text": ".", "special": False, "start": 7, "stop": 8},
            {"id": 102, "text": "[SEP]", "special": True, "start": None, "stop": None},
        ]
    ]


async def test_tei_tokenize_of_many_and_long_texts_is_never_cut(gateway, plain):
    texts = ["tea " * 3000, *(f"text number {i}" for i in range(40))]
    reply = (await gateway.post("/tokenize", inputs=texts)).json()
    shown = [[token["id"] for token in tokens] for tokens in reply]
    assert shown == [encoding.ids for encoding in plain.encode_batch(texts)]


async def test_prompts_and_special_tokens_by_request(gateway):
    reply = (
        await gateway.post("/tokenize", inputs="tea", prompt_name="query", add_special_tokens=False)
    ).json()
    assert [(t["text"], t["start"], t["stop"]) for t in reply[0]] == [
        ("fra", 0, 3),
        ("g", 3, 4),
        (":", 4, 5),
        ("é", 6, 8),
        ("tea", 9, 12),
    ]
    hinted = await gateway.post(
        "/tokenize", inputs="tea", input_type="search_query", add_special_tokens=False
    )
    assert hinted.json() == reply


async def test_spelled_special_tokens_are_text_unless_in_parity_mode(gateway, parity):
    literal = (await gateway.post("/tokenize", inputs="a [SEP]")).json()[0]
    assert [token["text"] for token in literal] == ["[CLS]", "a", "[", "SEP", "]", "[SEP]"]
    control = (await parity.post("/tokenize", inputs="a [SEP]")).json()[0]
    assert [token["id"] for token in control][-2:] == [102, 102]
    assert [token["special"] for token in control] == [True, False, False, True]


# /tokenize with prompt


async def test_vllm_tokenize(gateway, plain):
    ids = plain.encode("ferries unboatable").ids
    reply = (await gateway.post("/tokenize", prompt="ferries unboatable", model="minilm")).json()
    assert reply == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    spelled = await gateway.post("/tokenize", prompt="ferries unboatable", return_token_strs=True)
    assert spelled.json()["token_strs"] == plain.encode("ferries unboatable").tokens
    bare = await gateway.post("/tokenize", prompt="ferries unboatable", add_special_tokens=False)
    assert bare.json()["tokens"] == ids[1:-1]


# /decode, /detokenize


async def test_decode_leaves_special_tokens_out_unless_told(gateway, parity, plain):
    ids = plain.encode("a ferry to Zürich").ids
    for running in (gateway, parity):
        assert (await running.post("/decode", ids=ids)).json() == ["a ferry to zurich"]
        both = await running.post("/decode", ids=[ids, ids[1:3]], skip_special_tokens=False)
        assert both.json() == ["[CLS] a ferry to zurich [SEP]", "a ferry"]
        reply = await running.post("/detokenize", tokens=ids, model="minilm")
        assert reply.json() == {"prompt": "[CLS] a ferry to zurich [SEP]"}


async def test_what_is_tokenized_decodes_to_itself(load):
    ours = load("xlm-roberta", True)
    texts = ["Zürich 東京 ferries", "green tea"]
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    sequences = await ours.encode(prompts, _UNCUT, False, "inputs")
    ready = [TokenIds(item.token_ids) for item in sequences]
    assert await ours.decode(ready, "ids", skip_special_tokens=True) == texts
    shown = await ours.decode(ready, "ids", skip_special_tokens=False)
    assert shown == [f"<s> {text}</s>" for text in texts]


async def test_a_cancelled_first_decode_spoils_no_other(start_gateway, plain):
    async with start_gateway() as running:
        ids = plain.encode("a ferry").ids
        first = asyncio.create_task(running.post("/decode", ids=ids))
        await asyncio.sleep(0)
        first.cancel()
        replies = await asyncio.gather(*(running.post("/decode", ids=ids) for _ in range(3)))
        assert [reply.json() for reply in replies] == [["a ferry"]] * 3


# refusals

NATIVE = [
    ("/tokenize", {}, 422, "`inputs` is required"),
    ("/tokenize", {"inputs": ""}, 400, "`inputs` cannot be empty"),
    ("/tokenize", {"inputs": []}, 400, "`inputs` cannot be empty"),
    ("/tokenize", {"inputs": ["a", ""]}, 400, "inputs[1]"),
    ("/tokenize", {"inputs": [3]}, 422, "`inputs[0]` must be a string"),
    ("/tokenize", {"inputs": ["a"] * 51}, 422, "batch size 51"),
    ("/tokenize", {"inputs": "a", "prompt_name": "nope"}, 422, "nope"),
    ("/tokenize", {"inputs": "a", "add_special_tokens": "no"}, 422, "`add_special_tokens`"),
    ("/decode", {}, 422, "`ids` is required"),
    ("/decode", {"ids": []}, 400, "`ids` cannot be empty"),
    ("/decode", {"ids": [[5], []]}, 400, "ids[1]"),
    ("/decode", {"ids": "5"}, 422, "`ids` must be a list"),
    ("/decode", {"ids": [5, "6"]}, 422, "`ids[1]`"),
    ("/decode", {"ids": [5, -1]}, 422, "`ids[1]`"),
    ("/decode", {"ids": [[5], [30522]]}, 422, "`ids[1]`: token id 30522 is outside 0 to 30521"),
    ("/decode", {"ids": [5], "skip_special_tokens": 1}, 422, "`skip_special_tokens`"),
    ("/decode", {"ids": [[5]] * 51}, 422, "batch size 51"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), NATIVE)
async def test_native_routes_refuse(gateway, path, body, status, words):
    reply = await gateway.post(path, **body)
    assert reply.status_code == status
    assert words in reply.json()["error"]


VLLM = [
    ("/tokenize", {"prompt": ""}, 400, "prompt", "cannot be empty"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "must be a string"),
    ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model", "served: minilm"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs", "a boolean"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 400, "messages", "no chat template"),
    ("/detokenize", {}, 400, "tokens", "`tokens` is required"),
    ("/detokenize", {"tokens": []}, 400, "tokens", "cannot be empty"),
    ("/detokenize", {"tokens": [[5]]}, 400, "tokens[0]", "must be a token id"),
    ("/detokenize", {"tokens": [30522]}, 400, "tokens[0]", "30522"),
    ("/detokenize", {"tokens": [5], "model": "nope"}, 404, "model", "served: minilm"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "words"), VLLM)
async def test_vllm_routes_refuse(gateway, path, body, status, param, words):
    reply = await gateway.post(path, **body)
    assert reply.status_code == status
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


async def test_no_server_is_needed(start_gateway):

    async with start_gateway(FakeTulip(tokenizer_hash="other"), wait=False) as running:
        assert (await running.post("/tokenize", inputs="tea")).status_code == 200
        assert (await running.post("/tokenize", prompt="tea")).status_code == 200
        assert (await running.post("/decode", ids=[5])).status_code == 200
