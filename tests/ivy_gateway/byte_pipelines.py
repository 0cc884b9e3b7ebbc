"""Pipelines of byte-level BPE as published files have them: parts of a `tokenizer.json`."""

from __future__ import annotations

from ivy_gateway.special_tokens import Json

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")


def byte_level(*, use_regex: bool = True, add_prefix_space: bool = False) -> Json:
    """The pre-tokenizer that writes words in letters for bytes."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def split(regex: str, behavior: str = "Isolated", *, invert: bool = False) -> Json:
    """The pre-tokenizer that splits by `regex`."""
    pattern = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [pattern, byte_level(use_regex=False)]}


def added_token(number: int, content: str, **options: bool) -> Json:
    """One added token; every option is off unless named."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": number, "content": content, **dict.fromkeys(names, False), **options}


def spaced_tokens(first: int) -> list[Json]:
    """Added tokens of the kinds that ModernBERT and GPT-NeoX files have, numbered from `first` on."""
    tokens = [(" " * n, {"normalized": True}) for n in range(2, 25)]
    tokens += [
        ("|||IP_ADDRESS|||", {"normalized": True}),
        ("[unused0]", {"normalized": True}),
        ("[MASK]", {"special": True, "lstrip": True}),
        ("[SEP]", {"special": True}),
    ]
    return [added_token(first + i, content, **options) for i, (content, options) in enumerate(tokens)]


def roberta_tokens(first: int) -> list[Json]:
    """Added tokens of the kinds that RoBERTa files have."""
    special = [
        added_token(first + i, content, special=True, normalized=True)
        for i, content in enumerate(("<s>", "</s>", "<pad>", "<unk>"))
    ]
    return [*special, added_token(first + 4, "<mask>", special=True, lstrip=True)]


# What changes in a file of another pipeline, given its first free id.
PIPELINES = {
    "gpt2": lambda _: {"normalizer": None, "pre_tokenizer": byte_level(), "added_tokens": []},
    "roberta": lambda first: {
        "normalizer": None,
        "pre_tokenizer": byte_level(add_prefix_space=True),
        "added_tokens": roberta_tokens(first),
    },
    "modernbert": lambda first: {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level(),
        "added_tokens": spaced_tokens(first),
    },
    "qwen35": lambda _: {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(QWEN35), "added_tokens": []},
    "llama3": lambda first: {
        "normalizer": None,
        "pre_tokenizer": split(LLAMA3),
        "added_tokens": [added_token(first, "<|begin_of_text|>", special=True)],
    },
}


def in_pipeline(content: Json, name: str) -> Json:
    """The vocabulary of `content` in another pipeline; Llama 3 takes whole words whatever the merges."""
    parts = PIPELINES[name](max(content["model"]["vocab"].values()) + 1)
    model = content["model"] | {"ignore_merges": name == "llama3"}
    return content | parts | {"model": model}
