"""Whether a model folder holds a scorer of pairs or texts, and what its head is, as its files say it.

Reads `config.json`, `modules.json` and, for the ids of two words, `tokenizer.json` into one frozen value;
builds and computes nothing. Head layouts are those of transformers' `...ForSequenceClassification` classes;
the score of a language model is that of sentence-transformers' LogitScore.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose_engine.errors import CheckpointError, EngineConfigError
from rose_engine.module_chain import read_modules
from rose_engine.settings_file import SettingsFile

TASKS = ("auto", "embed", "score")

# What a language model is asked to answer when its files name no other words, as in sentence-transformers.
_TRUE_WORD, _FALSE_WORD = "yes", "no"
_DEFAULT_LABELS = 2  # of transformers' configurations, where a file names neither labels nor their number


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """A classification head: `output(norm(activation(dense(pooled))))`; the first three may be absent.

    `dense`, `norm` and `output` are the names that the files give to each, behind the trunk's prefix.
    """

    pooling: str  # one mode of `heads.pooling`
    num_labels: int
    output: str
    output_bias: bool = True
    dense: str | None = None
    dense_bias: bool = True
    activation: str = "tanh"
    norm: str | None = None
    norm_bias: bool = True
    norm_eps: float = 1e-5

    @property
    def stored_names(self) -> dict[str, str]:
        """Our name of each layer that there is, and the files' own."""
        layers = {"dense": self.dense, "norm": self.norm, "output": self.output}
        return {ours: stored for ours, stored in layers.items() if stored is not None}

    @property
    def not_the_trunks(self) -> tuple[str, ...]:
        """Shell patterns over tensor names, without the trunk's prefix, that the trunk has no place for."""
        return tuple(f"{stored}.*" for stored in self.stored_names.values())

    def facts(self) -> tuple[str, ...]:
        """What tells this head from others over the same files, for a fingerprint."""
        return (f"classifier {self.pooling} {self.activation} {self.num_labels}",)


@dataclass(frozen=True, slots=True)
class TokenLogitSpec:
    """A language model's score: the logit of one token at the last position, less that of another."""

    true_token_id: int
    false_token_id: int | None  # None: nothing is taken off
    tied: bool | None  # whether the token embeddings are the language-model head; None: the weights show it

    pooling = "lasttoken"
    num_labels = 1
    not_the_trunks = ("lm_head.*",)

    def facts(self) -> tuple[str, ...]:
        """What tells this head from others over the same files, for a fingerprint."""
        return (f"token logits {self.true_token_id} {self.false_token_id}",)


ScoreSpec = ClassifierSpec | TokenLogitSpec


def read_score_spec(folder: Path, config: SettingsFile, task: str = "auto") -> ScoreSpec | None:
    """The scoring head of `folder`, whose `config.json` is `config`; `None` for a model that embeds.

    A language model scores when its files say so (a LogitScore module, `classifier_from_token`, cross-encoder
    metadata) or when `task` is "score"; otherwise it embeds. Raises `CheckpointError` for a head that is not
    supported, and for none where `task` asks for one; `EngineConfigError` for an unknown task.
    """
    if task not in TASKS:
        raise EngineConfigError(f"task {task!r} is unknown; known are {', '.join(TASKS)}")
    if task == "embed":
        return None
    if (module := _logit_score_module(folder)) is not None:
        return _of_module(module, config)
    if "classifier_from_token" in config.values:
        return _of_words(folder, config, *_stated_words(config))
    architecture = (config.optional("architectures", list, None) or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return _classifier(folder, config)
    if task == "auto" and not _is_cross_encoder(folder):
        return None
    if not architecture.endswith("ForCausalLM"):
        raise CheckpointError(f"{config.path}: {architecture or 'no architecture'}: there is no scoring head")
    return _of_words(folder, config, _FALSE_WORD, _TRUE_WORD)


def _is_cross_encoder(folder: Path) -> bool:
    metadata = SettingsFile.read_if_present(folder / "config_sentence_transformers.json")
    return metadata.optional("model_type", str, None) == "CrossEncoder"


def _logit_score_module(folder: Path) -> SettingsFile | None:
    """Settings of the folder's LogitScore module, if it has one."""
    if not (folder / "modules.json").is_file():
        return None
    modules = dict(read_modules(folder))
    if "LogitScore" not in modules:
        return None
    if list(modules) != ["Transformer", "LogitScore"]:
        raise CheckpointError(f"{folder}: modules.json chains {' -> '.join(modules)}, which is not supported")
    return SettingsFile.read(modules["LogitScore"] / "config.json")


def _of_module(module: SettingsFile, config: SettingsFile) -> TokenLogitSpec:
    source = module.optional("module_input_name", str, "causal_logits")
    if source != "causal_logits":
        raise CheckpointError(f"{module.path}: module_input_name {source!r} is not supported")
    return _token_logits(
        config, module.required("true_token_id", int), module.optional("false_token_id", int, None)
    )


def _stated_words(config: SettingsFile) -> tuple[str, str]:
    words = config.required("classifier_from_token", list)
    if len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{config.path}: classifier_from_token is {words!r}, expected two words")
    false_word, true_word = words
    return false_word, true_word


def _of_words(folder: Path, config: SettingsFile, false_word: str, true_word: str) -> TokenLogitSpec:
    true_id, false_id = (token_id(folder / "tokenizer.json", word) for word in (true_word, false_word))
    return _token_logits(config, true_id, false_id)


def _token_logits(config: SettingsFile, true_id: int, false_id: int | None) -> TokenLogitSpec:
    if config.optional("final_logit_softcapping", float, None) is not None:
        raise CheckpointError(f"{config.path}: final_logit_softcapping is not supported for scores")
    return TokenLogitSpec(true_id, false_id, config.optional("tie_word_embeddings", bool, None))


def token_id(tokenizer_file: Path, token: str) -> int:
    """The id of a vocabulary entry. Raises `CheckpointError` where the file holds none of that spelling."""
    model = SettingsFile.read(tokenizer_file).section("model")
    vocabulary = model.values.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pieces and scores, in id order
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not isinstance(found := vocabulary.get(token), int):
        raise CheckpointError(f"{tokenizer_file}: {token!r} is not in the vocabulary")
    return found


def _classifier(folder: Path, config: SettingsFile) -> ClassifierSpec:
    if (folder / "modules.json").is_file():
        kinds = [kind for kind, _ in read_modules(folder)]
        if kinds != ["Transformer"]:
            raise CheckpointError(
                f"{folder}: modules.json chains {' -> '.join(kinds)}, which is not supported"
            )
    model_type = config.required("model_type", str)
    if model_type not in CLASSIFIERS:
        supported = ", ".join(sorted(CLASSIFIERS))
        raise CheckpointError(
            f"{config.path}: no classification head for {model_type!r}; supported are {supported}"
        )
    return CLASSIFIERS[model_type](config)


def _num_labels(config: SettingsFile) -> int:
    names = config.optional("id2label", dict, None)
    return len(names) if names else config.optional("num_labels", int, _DEFAULT_LABELS)


def _bert(config: SettingsFile) -> ClassifierSpec:
    return ClassifierSpec("cls", _num_labels(config), "classifier", dense="pooler.dense")


def _roberta(config: SettingsFile) -> ClassifierSpec:
    return ClassifierSpec("cls", _num_labels(config), "classifier.out_proj", dense="classifier.dense")


def _distilbert(config: SettingsFile) -> ClassifierSpec:
    return ClassifierSpec("cls", _num_labels(config), "classifier", dense="pre_classifier", activation="relu")


def _deberta(config: SettingsFile) -> ClassifierSpec:
    activation = config.optional("pooler_hidden_act", str, "gelu")
    return ClassifierSpec(
        "cls", _num_labels(config), "classifier", dense="pooler.dense", activation=activation
    )


def _modernbert(config: SettingsFile) -> ClassifierSpec:
    pooling = config.optional("classifier_pooling", str, "cls")
    if pooling not in ("cls", "mean"):
        raise CheckpointError(f"{config.path}: classifier_pooling {pooling!r} is not supported")
    return ClassifierSpec(
        pooling,
        _num_labels(config),
        "classifier",
        dense="head.dense",
        dense_bias=config.optional("classifier_bias", bool, False),
        activation=config.optional("classifier_activation", str, "gelu"),
        norm="head.norm",
        norm_bias=config.optional("norm_bias", bool, False),
        norm_eps=config.optional("norm_eps", float, 1e-5),
    )


def _decoder(config: SettingsFile) -> ClassifierSpec:
    return ClassifierSpec("lasttoken", _num_labels(config), "score", output_bias=False)


# model_type -> the head of its `...ForSequenceClassification` class
CLASSIFIERS: dict[str, Callable[[SettingsFile], ClassifierSpec]] = {
    "bert": _bert,
    "camembert": _roberta,
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "gemma3_text": _decoder,
    "gte": _bert,
    "llama": _decoder,
    "mistral": _decoder,
    "modernbert": _modernbert,
    "mpnet": _roberta,
    "new": _bert,
    "nomic_bert": _bert,
    "qwen2": _decoder,
    "qwen3": _decoder,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}
