"""What comes after the trunk, as a sentence-transformers folder describes it.

Reads `modules.json` and the small files beside it into one frozen value; builds and computes nothing.
Classes are told apart by the last component of their name, because the packages in front of it differ from
release to release. What cannot be honoured is refused by name, never skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rose_engine.errors import CheckpointError
from rose_engine.settings_file import SettingsFile, read_json

# Flags of the old pooling layout, in the order in which their outputs are concatenated.
_OLD_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = tuple(_OLD_POOLING_FLAGS.values())

_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_QUANTIZER = (
    "FlexibleQuantizer"  # code that pplx-embed repositories carry; ours is built in, theirs never runs
)
_CONTEXTUAL_CLASS = "PPLXQwen3ContextualModel"
# The order that the classes of a chain may come in; only Dense may come more than once.
_CLASS_ORDER = ("Transformer", "Pooling", "Dense", "Normalize", _QUANTIZER)
_SENTENCE_EMBEDDING = "sentence_embedding"
# Above this a tokenizer's `model_max_length` is a placeholder for "unknown".
_MEANINGLESS_LENGTH = 1e9


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """One Dense module: `activation(x W^T + b)`, plus its input where `residual`."""

    folder: Path  # holds its weights
    in_features: int
    out_features: int
    bias: bool
    activation: str  # a dotted class of torch.nn
    residual: bool


@dataclass(frozen=True, slots=True)
class ModuleChain:
    """Pooling, Dense modules, and normalisation or quantisation of an embedding model."""

    pooling: tuple[str, ...]  # of POOLING_MODES; several are concatenated
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    quantize: bool = False  # to int8 codes and sign bits, from values that are not normalised

    @classmethod
    def read(cls, folder: Path, config: SettingsFile) -> ModuleChain:
        """The chain of `folder`, whose `config.json` is `config`.

        Raises `CheckpointError` for a module, or a setting of one, that the engine does not know.
        """
        if not (folder / "modules.json").is_file():
            return cls(pooling=(_default_pooling(config),), quantize=_quantizes_in_code(config))
        modules = read_modules(folder)
        _check_order([kind for kind, _ in modules], folder)
        (pooling,) = (_read_pooling(path) for kind, path in modules if kind == "Pooling")
        dense = tuple(_read_dense(path) for kind, path in modules if kind == "Dense")
        kinds = {kind for kind, _ in modules}
        return cls(pooling, dense, normalize="Normalize" in kinds, quantize=_QUANTIZER in kinds)

    def dimensions(self, hidden_size: int) -> int:
        """D, the width of a row. Raises `CheckpointError` where one module's width is not the next one's."""
        width = hidden_size * len(self.pooling)
        for dense in self.dense:
            if dense.in_features != width:
                raise CheckpointError(
                    f"{dense.folder}: in_features is {dense.in_features}, its input {width}"
                )
            width = dense.out_features
        return width

    def facts(self) -> tuple[str, ...]:
        """What tells this chain from others with the same weights, for a fingerprint."""
        dense = (f"dense {d.in_features} {d.out_features} {d.activation} {d.residual}" for d in self.dense)
        quantize = ("quantize",) if self.quantize else ()
        return ("+".join(self.pooling), *dense, f"normalize {self.normalize}", *quantize)


def max_length(folder: Path, num_positions: int) -> int:
    """Tokens of the longest sequence: the least of all limits that the files state.

    `num_positions` counts the positions a sequence can use. `max_seq_length` is that of the
    sentence-transformers file, `model_max_length` the tokenizer's.
    """
    tokenizer = SettingsFile.read_if_present(folder / "tokenizer_config.json")
    stated = tokenizer.optional("model_max_length", float, None)
    limits = [num_positions, *_max_seq_lengths(folder)]
    if stated is not None and stated < _MEANINGLESS_LENGTH:
        limits.append(int(stated))
    return min(limits)


def _max_seq_lengths(folder: Path) -> list[int]:
    files = (SettingsFile.read_if_present(folder / name) for name in _LENGTH_FILES)
    lengths = (file.optional("max_seq_length", int, None) for file in files)
    return [length for length in lengths if length is not None]


def _default_pooling(config: SettingsFile) -> str:
    """Without `modules.json`: the last token for causal language models, the mean for all others."""
    architecture = (config.optional("architectures", list, None) or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        raise CheckpointError(f"{config.path}: {architecture} is a classifier, not an embedding model")
    causal = architecture.endswith("ForCausalLM") and config.optional("is_causal", bool, True)
    return "lasttoken" if causal else "mean"


def _quantizes_in_code(config: SettingsFile) -> bool:
    """Without `modules.json`: a contextual pplx-embed model, whose own code pools spans and quantises."""
    code = config.optional("auto_map", dict, None) or {}
    return str(code.get("AutoModel", "")).rpartition(".")[2] == _CONTEXTUAL_CLASS


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Class name and folder of each module, in order."""
    file = folder / "modules.json"
    entries = read_json(file)
    if not isinstance(entries, list):
        raise CheckpointError(f"{file}: not a list of modules")
    try:
        ordered = sorted(entries, key=lambda entry: int(entry["idx"]))
        return [(str(e["type"]).rpartition(".")[2], folder / str(e["path"])) for e in ordered]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: a module without idx, type and path ({error!r})") from error


def _check_order(kinds: list[str], folder: Path) -> None:
    for kind in kinds:
        if kind not in _CLASS_ORDER:
            known = ", ".join(_CLASS_ORDER)
            raise CheckpointError(
                f"{folder}: modules.json names {kind}, which is not supported ({known} are)"
            )
    in_order = kinds == sorted(kinds, key=_CLASS_ORDER.index)
    counts = {kind: kinds.count(kind) for kind in _CLASS_ORDER}
    one_of_each = counts["Transformer"] == counts["Pooling"] == 1
    if not in_order or not one_of_each or counts["Normalize"] + counts[_QUANTIZER] > 1:
        raise CheckpointError(f"{folder}: modules.json chains {' -> '.join(kinds)}, which is not supported")


def _read_pooling(folder: Path) -> tuple[str, ...]:
    # `include_prompt` is not the engine's: where a prompt ends is known to whoever tokenized it, and travels
    # as the span of each sequence that is pooled.
    config = SettingsFile.read(folder / "config.json")
    modes = _pooling_modes(config)
    for mode in modes:
        if mode not in POOLING_MODES:
            known = ", ".join(POOLING_MODES)
            raise CheckpointError(
                f"{config.path}: pooling_mode {mode!r} is not supported; supported are {known}"
            )
    return modes


def _pooling_modes(config: SettingsFile) -> tuple[str, ...]:
    """Modes in either layout; the new key wins where both are there."""
    stated = config.values.get("pooling_mode")
    if isinstance(stated, str):
        return (stated,)
    if stated:
        return tuple(map(str, config.required("pooling_mode", list)))
    flagged = (mode for flag, mode in _OLD_POOLING_FLAGS.items() if config.optional(flag, bool, False))
    return tuple(flagged) or ("mean",)


def _read_dense(folder: Path) -> DenseSpec:
    config = SettingsFile.read(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        name = config.optional(key, str, None)
        if name not in (None, _SENTENCE_EMBEDDING):
            raise CheckpointError(f"{config.path}: {key} {name!r} is not supported")
    return DenseSpec(
        folder=folder,
        in_features=config.required("in_features", int),
        out_features=config.required("out_features", int),
        bias=config.optional("bias", bool, True),
        activation=config.optional("activation_function", str, "torch.nn.modules.activation.Tanh"),
        residual=config.optional("use_residual", bool, False),
    )
