"""`embedding_space` moves exactly when the vector of a text sent without options may."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.ivy_gateway.fake_tulip import FakeTulip


@pytest.fixture
def folder(minilm, tmp_path):
    """The model's folder, without its weights, to be changed."""
    return shutil.copytree(minilm, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture
def space(start_gateway, folder):
    async def space(tulip: FakeTulip | None = None, **settings) -> str:
        async with start_gateway(tulip or FakeTulip(), model=folder, **settings) as gateway:
            reply = await gateway.post("/embed", inputs="x")
            info = (await gateway.client.get("/info")).json()
            assert reply.headers["x-embedding-space"] == info["embedding_space"]
            return info["embedding_space"]

    return space


def edit(folder, name, change):
    file = folder / name
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


async def test_what_moves_no_vector_does_not_move_it(space, folder):
    plain = await space()
    tulip = FakeTulip(device="cuda:0", attention_backend="another", max_batch_tokens=99_999, outputs=[0])
    settings = {"max_chunk_tokens": 99, "token_ids": "model", "auto_truncate": False, "any_dimensions": True}
    assert await space(tulip, **settings) == plain

    def other_spelling(tokenizer):
        tokenizer["decoder"] = None
        tokenizer["truncation"] = tokenizer["padding"] = None
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = dict(reversed(vocabulary.items()))

    edit(folder, "tokenizer.json", other_spelling)
    assert await space() == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"prompts": {"query": "q: "}},
        {"prompts": {"query": "Q: "}},
        {"prompts": {"other": ""}, "default_prompt_name": "other"},
        {"default_prompt_name": "query"},
        {"max_length": 100},
        {"literal_text": False},
    ],
    ids=str,
)
async def test_settings_that_move_vectors_move_it(space, settings):
    assert await space(**settings) != await space()


async def test_servers_that_give_other_vectors_move_it(space):
    others = {await space(FakeTulip(weights_hash="w2")), await space(FakeTulip(max_length=77))}
    assert len(others | {await space()}) == 3


def no_accents(tokenizer):
    tokenizer["normalizer"]["strip_accents"] = not tokenizer["normalizer"]["strip_accents"]


def another_split(tokenizer):
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}


def shorter_words(tokenizer):
    tokenizer["model"]["max_input_chars_per_word"] = 20


def no_end_token(tokenizer):
    for part in ("single", "pair"):
        del tokenizer["post_processor"][part][-1]


@pytest.mark.parametrize("change", [no_accents, another_split, shorter_words, no_end_token])
async def test_every_part_of_the_tokenizer_that_makes_ids_moves_it(space, folder, change):
    plain = await space()
    edit(folder, "tokenizer.json", change)
    assert await space() != plain


async def test_lower_casing_moves_it(space, folder):
    plain = await space()
    edit(folder, "sentence_bert_config.json", lambda content: content.update(do_lower_case=True))
    assert await space() != plain
