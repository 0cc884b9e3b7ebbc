"""What the model's own files say about text and about results: limits, prompts, activation, dimensions.

Reads JSON only; knows nothing of tokens, of weights or of requests. The rules for files that disagree are
those of sentence-transformers, tightened where its limit would pass the position table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ivy_gateway.errors import InvalidValue, StartupError

Json = dict[str, Any]

# Files of old sentence-transformers releases are named after the model's class.
_LIMIT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Their position tables start after the padding index, as in transformers' create_position_ids_from_input_ids.
_OFFSET_MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")
# Above this, `model_max_length` is the tokenizer library's stand-in for "no limit" (1e30).
_MEANINGLESS_LENGTH = 10**9
# Families whose cards promise shorter vectors that no file declares: least dimensions by model type.
_SHORTENED_FAMILIES = {"qwen3": 32, "bidirectional_pplx_qwen3": 128}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_CONTEXTUAL_CLASS = "PPLXQwen3ContextualModel"
# What is shown for a declared torch.nn class. Identity shows as if nothing were declared: clients set
# thresholds between 0 and 1, and those who want logits ask for raw scores.
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Softmax": "softmax", "Identity": None}


@dataclass(frozen=True, slots=True)
class AllowedDimensions:
    """Lengths that vectors may be cut to: the `listed` ones, or any from `smallest` up; always the full."""

    listed: tuple[int, ...] = ()
    smallest: int | None = None

    def check(self, dimensions: int, width: int, param: str = "dimensions") -> None:
        """Raise `InvalidValue`, naming what is allowed, unless `width` may be cut to `dimensions`."""
        if dimensions == width:
            return
        if self.listed:
            if dimensions not in self.listed or dimensions > width:
                allowed = ", ".join(str(n) for n in self.listed if n <= width)
                raise InvalidValue(f"`{param}` {dimensions} is not one of {allowed}", param)
        elif self.smallest is None:
            raise InvalidValue(
                f"`{param}` {dimensions}: this model's vectors have {width} dimensions and its files allow no"
                " other number (the server's flag --any-dimensions does)",
                param,
            )
        elif not self.smallest <= dimensions <= width:
            raise InvalidValue(f"`{param}` {dimensions} is outside {self.smallest} to {width}", param)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model folder, as far as text and results go."""

    folder: Path
    task: str  # "embed" or "score": a hint; the server's own word counts
    model_type: str
    max_length: int  # tokens of one input, special tokens included
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    do_lower_case: bool
    similarity_fn_name: str
    dimensions: AllowedDimensions
    score_activation: str  # what scores are shown through: "sigmoid", "tanh" or "softmax"
    pooling: str  # "mean", "cls", "lasttoken" ..., joined by "+" where concatenated; "" for a scorer
    normalize: bool  # the model's own modules end in a normalisation
    labels: tuple[str, ...] = field(default=())  # of a scorer, by row position
    include_prompt: bool = True  # a prompt's tokens are pooled with the text's
    separator: str | None = None  # stands between a document's chunks; None: no contextual model
    prompted_pairs: bool = False  # a pair is scored as one prompt (Qwen3-Reranker), should the model score

    @property
    def tokenizer_file(self) -> Path:
        """The folder's `tokenizer.json`."""
        return self.folder / "tokenizer.json"

    @classmethod
    def read(
        cls,
        folder: Path,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        max_length: int | None = None,
        any_dimensions: bool = False,
    ) -> ModelProfile:
        """Read `folder`; the keyword arguments are the operator's and win over the files.

        Raises `StartupError` for a missing or broken file and for an override that the model cannot honour.
        """
        files = _ModelFiles.read(folder)
        task = _task(files)
        merged = (
            ({"query": "", "document": ""} if task == "embed" else {}) | files.prompts | dict(prompts or {})
        )
        default = default_prompt_name or files.sentence_transformers.get("default_prompt_name")
        _check_default_prompt(default, merged)
        return cls(
            folder=folder,
            task=task,
            model_type=str(files.config.get("model_type", "")),
            max_length=_max_length(files, max_length),
            prompts=merged,
            default_prompt_name=default,
            do_lower_case=bool(files.limits.get("do_lower_case", False)),
            similarity_fn_name=files.sentence_transformers.get("similarity_fn_name") or "cosine",
            dimensions=AllowedDimensions(smallest=1) if any_dimensions else _dimensions(files, task),
            score_activation=_score_activation(files),
            pooling=_pooling(files) if task == "embed" else "",
            normalize=files.module("Normalize") is not None,
            labels=_labels(files) if task == "score" else (),
            include_prompt=bool((files.module("Pooling") or {}).get("include_prompt", True)),
            separator=_separator(files),
            prompted_pairs=_prompts_pairs(files),
        )


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """The folder's JSON files; an optional one that is absent is empty."""

    config: Json
    sentence_transformers: Json
    limits: Json
    tokenizer_config: Json
    modules: tuple[tuple[str, Json], ...] | None  # class names and settings, in order; None: no modules.json

    @classmethod
    def read(cls, folder: Path) -> _ModelFiles:
        if not folder.is_dir():
            raise StartupError(f"model folder {folder} does not exist")
        if not (folder / "tokenizer.json").is_file():
            raise StartupError(f"{folder / 'tokenizer.json'} is missing: only fast tokenizers are served")
        if not (folder / "config.json").is_file():
            raise StartupError(f"{folder / 'config.json'} is missing")
        return cls(
            config=_read_object(folder / "config.json"),
            sentence_transformers=_read_object(folder / "config_sentence_transformers.json"),
            limits=next((found for name in _LIMIT_FILES if (found := _read_object(folder / name))), {}),
            tokenizer_config=_read_object(folder / "tokenizer_config.json"),
            modules=_read_modules(folder),
        )

    def module(self, class_name: str) -> Json | None:
        """Settings of the first module of that class; `None` where there is none."""
        return next((settings for name, settings in self.modules or () if name == class_name), None)

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.config.get("architectures") or ())

    @property
    def classifies(self) -> bool:
        """Whether the weights hold a classification head."""
        return any(name.endswith("ForSequenceClassification") for name in self.architectures)

    @property
    def scores_by_words(self) -> bool:
        """Whether a score is what a language model thinks of one word, against another."""
        named = self.module("LogitScore") is not None or "classifier_from_token" in self.config
        return named or any(name.endswith("ForCausalLM") for name in self.architectures)

    @property
    def prompts(self) -> dict[str, str]:
        return dict(self.sentence_transformers.get("prompts") or {})


def uses_segments(folder: Path) -> bool:
    """Whether the model tells the two texts of a pair apart by segment ids.

    A tokenizer's template may number segments that the model never looks at: the tokenizer's own list of
    model inputs, where there is one, and the size of the model's segment table say so.
    """
    inputs = _read_object(folder / "tokenizer_config.json").get("model_input_names")
    if inputs is not None and "token_type_ids" not in inputs:
        return False
    config = _read_object(folder / "config.json")
    default = 2 if config.get("model_type") == "bert" else 1  # transformers' BertConfig; others have no table
    return int(config.get("type_vocab_size", default)) > 1


def _read_object(path: Path) -> Json:
    """The JSON object in `path`, empty where the file is absent."""
    if not path.is_file():
        return {}
    content = _read_json(path)
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds no JSON object")
    return content


def _read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error


def _read_modules(folder: Path) -> tuple[tuple[str, Json], ...] | None:
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        listed = sorted(_read_json(path), key=lambda module: module["idx"])
        # Only the last component of the class is stable between releases of sentence-transformers. A module
        # without a folder of its own has no settings: `config.json` at the root is the model's.
        return tuple(
            (
                m["type"].rpartition(".")[2],
                _read_object(folder / m["path"] / "config.json") if m["path"] else {},
            )
            for m in listed
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} is no list of modules ({error!r})") from error


def _task(files: _ModelFiles) -> str:
    scores = (
        files.classifies
        or files.sentence_transformers.get("model_type") == "CrossEncoder"
        or files.module("LogitScore") is not None
        or "classifier_from_token" in files.config
    )
    return "score" if scores else "embed"


def _max_length(files: _ModelFiles, override: int | None) -> int:
    """The least of all limits that the files state; an override may only lower it."""
    limits = [files.limits.get("max_seq_length"), _positions(files.config)]
    declared = files.tokenizer_config.get("model_max_length")
    limits.append(declared if declared and declared < _MEANINGLESS_LENGTH else None)
    stated = [int(limit) for limit in limits if limit]
    if not stated and override is None:
        raise StartupError("the model's files state no length limit: give one by --max-length")
    if stated and override is not None and override > min(stated):
        raise StartupError(f"--max-length {override} is above the model's own limit of {min(stated)} tokens")
    return override or min(stated)


def _positions(config: Json) -> int | None:
    positions = config.get("max_position_embeddings")
    if positions and config.get("model_type") in _OFFSET_MODEL_TYPES:
        return int(positions) - int(config.get("pad_token_id", 1)) - 1
    return positions


def _check_default_prompt(name: str | None, prompts: Mapping[str, str]) -> None:
    if name is not None and name not in prompts:
        known = ", ".join(repr(known) for known in prompts) or "none"
        raise StartupError(f"default prompt {name!r} is not among the model's prompts: {known}")


def _separator(files: _ModelFiles) -> str | None:
    """The separator of a contextual model, which is its padding where it has no token for that alone.

    Its code, which its files name and which never runs, is all that tells it from a plain model.
    """
    code = files.config.get("auto_map") or {}
    if str(code.get("AutoModel", "")).rpartition(".")[2] != _CONTEXTUAL_CLASS:
        return None
    for name in ("sep_token", "pad_token"):
        token = files.tokenizer_config.get(name)
        if spelling := token.get("content") if isinstance(token, dict) else token:
            return str(spelling)
    raise StartupError("tokenizer_config.json names no sep_token or pad_token to stand between chunks")


def _dimensions(files: _ModelFiles, task: str) -> AllowedDimensions:
    listed = files.config.get("matryoshka_dimensions")
    if listed:
        return AllowedDimensions(listed=tuple(sorted(int(n) for n in listed)))
    if files.config.get("is_matryoshka"):
        return AllowedDimensions(smallest=1)
    if task == "score" or files.module("Dense") is not None:  # a projection: slicing it is no one's promise
        return AllowedDimensions()
    return AllowedDimensions(smallest=_SHORTENED_FAMILIES.get(str(files.config.get("model_type"))))


def _score_activation(files: _ModelFiles) -> str:
    """Declared activation, in the order in which sentence-transformers looks for it."""
    own = files.config.get("sentence_transformers")
    declared = (
        files.sentence_transformers.get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or files.config.get("sbert_ce_default_activation_function")
    )
    independent = files.config.get("problem_type") == "multi_label_classification"
    default = "sigmoid" if independent or len(_labels(files)) == 1 else "softmax"
    if declared is None:
        return default
    name = str(declared).rpartition(".")[2]
    if not str(declared).startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise StartupError(
            f"score activation {declared!r} is not supported: known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name] or default


def _labels(files: _ModelFiles) -> tuple[str, ...]:
    """Names by row position; where a classifier states neither names nor number, transformers' two."""
    if files.scores_by_words or not files.classifies:
        return ("LABEL_0",)
    names: Json = files.config.get("id2label") or {}
    count = len(names) or int(files.config.get("num_labels", 2))
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _prompts_pairs(files: _ModelFiles) -> bool:
    """Qwen3 models with one label are Qwen3-Reranker: as published, converted, or trained from it."""
    scores = files.scores_by_words or files.classifies
    is_qwen3 = files.config.get("model_type") == "qwen3" and files.module("Pooling") is None
    return is_qwen3 and scores and len(_labels(files)) == 1


def _pooling(files: _ModelFiles) -> str:
    settings = files.module("Pooling")
    if settings is None:
        # A modules.json without pooling keeps no default either: what follows is for bare checkpoints.
        causal = any(name.endswith("ForCausalLM") for name in files.architectures)
        return "lasttoken" if causal and files.config.get("is_causal") is not False else "mean"
    mode = settings.get("pooling_mode")
    if mode:
        return mode if isinstance(mode, str) else "+".join(mode)
    return "+".join(name for flag, name in _POOLING_FLAGS.items() if settings.get(flag)) or "mean"
