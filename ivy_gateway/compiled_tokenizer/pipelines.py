"""Which tokenizer pipelines the extension can run: read from the library's own description of a live object.

From the live object, not from the file: the library reads scores with a parser that is off by one unit in
the last place for many, and ties between segmentations turn on that.
"""

from __future__ import annotations

import base64
import functools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from ivy_gateway.compiled_tokenizer import _native, bert_characters, byte_letters, code_points, graphemes

Json = dict[str, Any]

_META = "▁"
_COLLAPSE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
_MAX_WORD = 255  # characters that a word of the extension can have
# Below it a piece always beats the same characters as unknown ones, each at the lowest score less 10.
_MAX_LOWEST_SCORE = 20.0


# How each regular expression splits, in the words of `_native.byte_bpe`; of letters, their class.
_GPT2 = {"cl100k": False, "max_digits": 0, "letters": r"\p{L}"}
_SPLITS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    # Qwen2, Qwen3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": {"cl100k": True, "max_digits": 1, "letters": r"\p{L}"},
    # Qwen3.5: that a mark may also stand before letters changes nothing
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": {"cl100k": True, "max_digits": 1, "letters": r"\p{L}\p{M}"},
    # cl100k, Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": {"cl100k": True, "max_digits": 3, "letters": r"\p{L}"},
}
# As these match everywhere, both make each match a word.
_EACH_MATCH = ({"behavior": "Isolated", "invert": False}, {"behavior": "Removed", "invert": True})


class Unsupported(Exception):
    """The extension cannot run this tokenizer; the message says why."""


def build(tokenizer: Tokenizer, num_threads: int) -> tuple[_native.Encoder, list[str]]:
    """An encoder that gives the ids of `tokenizer`, and the vocabulary's pieces.

    Raises `Unsupported` for a pipeline that the extension does not know.
    """
    content: Json = json.loads(tokenizer.to_str())
    _require(content["truncation"] is None and content["padding"] is None, "truncation or padding")
    vocabulary = content["model"].get("vocab")
    match content["model"]["type"]:
        case "Unigram":
            return _unigram(content, num_threads), [piece for piece, _ in vocabulary]
        case "WordPiece":
            return _wordpiece(content, num_threads), list(vocabulary)
        case "BPE":
            # The description has one piece for each id.
            same_id = tokenizer.get_vocab_size(with_added_tokens=False) - len(vocabulary)
            _require(same_id == 0, "two pieces with one id")
            return _byte_bpe(content, num_threads), byte_letters.texts_of(vocabulary)
        case other:
            raise Unsupported(f"a {other} model")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unsupported(otherwise)


def _unigram(content: Json, num_threads: int) -> _native.Encoder:
    _require(_same_unicode(), "the library has another version of Unicode")
    model = content["model"]
    _check_unknown(model)
    charsmap, collapses_spaces = _normalizer(content["normalizer"])
    return _native.unigram(
        pieces=[piece for piece, _ in model["vocab"]],
        scores=[score for _, score in model["vocab"]],
        unknown_token=model["unk_id"],
        charsmap=base64.b64decode(charsmap),
        splits_white_space=_splits_white_space(content["pre_tokenizer"]),
        collapses_spaces=collapses_spaces,
        added_tokens=_added_tokens(content["added_tokens"]),
        num_threads=num_threads,
    )


@functools.lru_cache(maxsize=1)
def _same_unicode() -> bool:
    return graphemes.agrees(_native.grapheme_ranges())


def _check_unknown(model: Json) -> None:
    """Raise `Unsupported` unless every run of unknown characters is one unknown token."""
    _require(not model.get("byte_fallback"), "byte fallback")
    _require(model.get("unk_id") is not None, "no unknown token")
    scores = [score for _, score in model["vocab"]]
    _require(min(scores) < _MAX_LOWEST_SCORE, "scores that are all high")
    unknown = model["vocab"][model["unk_id"]][0]
    longer = any(unknown in piece and piece != unknown for piece, _ in model["vocab"])
    _require(not longer, "a piece that holds the unknown token's spelling")


def _normalizer(normalizer: Json | None) -> tuple[str, bool]:
    """The charsmap in base64, and whether spaces in a row become one."""
    stages = _stages(normalizer, "normalizers")
    if stages and stages[0]["type"] == "Precompiled" and stages[1:] in ([], [_COLLAPSE]):
        return stages[0]["precompiled_charsmap"], len(stages) == 2
    raise Unsupported("its normalizer")


def _splits_white_space(pre_tokenizer: Json | None) -> bool:
    stages = _stages(pre_tokenizer, "pretokenizers")
    _require(bool(stages) and _is_metaspace(stages[-1]), "its pre-tokenizer")
    _require(stages[:-1] in ([], [{"type": "WhitespaceSplit"}]), "its pre-tokenizer")
    return len(stages) == 2


def _is_metaspace(stage: Json) -> bool:
    wanted = {"type": "Metaspace", "replacement": _META, "prepend_scheme": "always", "split": True}
    return wanted | stage == wanted


def _stages(stage: Json | None, parts: str) -> list[Json]:
    if stage is None:
        return []
    return [inner for part in stage[parts] for inner in _stages(part, parts)] if parts in stage else [stage]


def _added_tokens(tokens: list[Json]) -> list[tuple[str, int, bool, bool]]:
    for token in tokens:
        plain = not token["normalized"] and not token["single_word"] and token["content"]
        _require(bool(plain) and not any(c.isspace() for c in token["content"]), "an added token's options")
    return [(token["content"], token["id"], token["lstrip"], token["rstrip"]) for token in tokens]


def _wordpiece(content: Json, num_threads: int) -> _native.Encoder:
    model, normalizer = content["model"], content["normalizer"]
    _require(normalizer is not None and normalizer["type"] == "BertNormalizer", "its normalizer")
    _require(content["pre_tokenizer"] == {"type": "BertPreTokenizer"}, "its pre-tokenizer")
    _require(model["max_input_chars_per_word"] <= _MAX_WORD, "words of more than 255 characters")
    _require(model["unk_token"] in model["vocab"], "no unknown token")
    characters = bert_characters.of(json.dumps(normalizer, sort_keys=True))
    return _native.wordpiece(
        pieces=list(model["vocab"].items()),
        continuing_prefix=model["continuing_subword_prefix"],
        unknown_token=model["vocab"][model["unk_token"]],
        max_characters=model["max_input_chars_per_word"],
        normalized=characters.normalized,
        removed=characters.removed,
        isolated=characters.isolated,
        punctuation=characters.punctuation,
        reordering=characters.reordering,
        added_tokens=_added_tokens(content["added_tokens"]),
        num_threads=num_threads,
    )


def _byte_bpe(content: Json, num_threads: int) -> _native.Encoder:
    return _native.byte_bpe(**byte_bpe_options(content), num_threads=num_threads)


def byte_bpe_options(content: Json) -> Json:
    """What `_native.byte_bpe` has to know of a tokenizer. Raises `Unsupported` as `build`."""
    model = content["model"]
    _check_merging(model)
    in_form_c = _in_form_c(content["normalizer"])
    first, second = _byte_added_tokens(content["added_tokens"], in_form_c)
    split = _split(content["pre_tokenizer"])
    return {
        "pieces": byte_letters.pieces(model["vocab"]),
        "merges": _merges(model),
        "ignores_merges": model["ignore_merges"],
        **split,
        "letters": code_points.matching(split["letters"]),
        "numbers": code_points.matching(r"\p{N}"),
        "white_space": code_points.matching(r"\s"),
        "form_c": code_points.form_c() if in_form_c else None,
        "added_tokens": first,
        "normalized_tokens": second,
    }


def _check_merging(model: Json) -> None:
    """Raise `Unsupported` unless words are bytes that are merged, nothing else."""
    _require(not model["dropout"], "dropout")
    _require(not model["byte_fallback"], "byte fallback")
    affixes = model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    _require(not affixes, "a prefix or suffix of pieces")
    _require(byte_letters.ALPHABET.keys() <= model["vocab"].keys(), "a byte without a piece")


def _merges(model: Json) -> NDArray[np.int32]:
    """The token on the left, the one on the right and the merged one: `[M, 3]`."""
    ids = model["vocab"]
    rules = [(ids[left], ids[right], ids[left + right]) for left, right in model["merges"]]
    return np.array(rules, np.int32).reshape(-1, 3)


def _in_form_c(normalizer: Json | None) -> bool:
    stages = _stages(normalizer, "normalizers")
    _require(all(stage == {"type": "NFC"} for stage in stages), "its normalizer")
    return bool(stages)


def _split(pre_tokenizer: Json | None) -> Json:
    """How texts are split, in the words of `_native.byte_bpe`; of letters, their class."""
    match _stages(pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": adds_space}]:
            return {**_GPT2, "adds_space": adds_space}
        case [
            {"type": "Split", "pattern": {"Regex": regex}, **each_match},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ] if regex in _SPLITS and each_match in _EACH_MATCH:
            return {**_SPLITS[regex], "adds_space": False}
    raise Unsupported("its pre-tokenizer")


def _byte_added_tokens(
    tokens: list[Json], in_form_c: bool
) -> tuple[list[tuple[str, int, bool, bool]], list[tuple[str, int, bool, bool]]]:
    """Those that are cut out of the raw text, and those cut out of the rest once it is normalized."""
    for stage in (False, True):
        some = [token for token in tokens if token["normalized"] == stage]
        # White space that goes with a token on its left is still searched for others.
        spaced = any(token["content"][:1].isspace() for token in some)
        _require(not (spaced and any(token["rstrip"] for token in some)), "an added token's options")
    for token in tokens:
        content = token["content"]
        _require(content != "" and not token["single_word"], "an added token's options")
        changes = in_form_c and token["normalized"] and NFC().normalize_str(content) != content
        _require(not changes, "an added token that normalization changes")
    raw, normalized = (
        [(t["content"], t["id"], t["lstrip"], t["rstrip"]) for t in tokens if t["normalized"] == stage]
        for stage in (False, True)
    )
    return raw, normalized
