"""`python -m tulip_server.reference MODEL`: write the reference file that servers check themselves against.

sentence-transformers computes it, in float32 on the CPU; it is needed for this command and nowhere else. No
code from the model's folder is run. Knows the file only through `protos.reference`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from protos.reference import MAX_EXAMPLES, REFERENCE_FILE, ReferenceExample, write_reference
from rose_engine.errors import CheckpointError
from rose_engine.model_source import ModelSource
from tulip_server.errors import ConfigError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_LIBRARIES = ("sentence-transformers", "transformers", "tokenizers", "torch")

# One word to a paragraph, several scripts, spaces, cases and signs: what tokenizers trip over.
TEXTS = (
    "ferry",
    "A ferry is a ship that carries people and vehicles over short distances.",
    "a ferry is a ship that carries people and vehicles over short distances",
    "Zürich, Malmö & Łódź — naïve façades, 1,234.50 € at 17:45",
    "Две лодки стоят у старого причала.",
    "東京から大阪まで新幹線で二時間半かかります。",
    "كم تبعد الجزيرة عن الساحل؟",
    "नाव सुबह सात बजे निकलती है।",
    "เรือเฟอร์รี่ออกทุกชั่วโมง",
    "배는 매시간 출발합니다 🙂🚢",
    "  leading, trailing   and\tinner white space\n",
    "def distance(a, b):\n    return abs(a - b)  # metres",
    "What is the capital of Norway, and how many people live there?",
    "Bread needs flour, water, salt and time: mix them, wait overnight, fold the dough twice, let it rise"
    " until it has doubled, then bake it hot with steam for twenty minutes and without for twenty more.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file and say where; ends with a message and status 1 where that cannot be done."""
    options = _parser().parse_args(arguments)
    out: Path = options.out or options.model / REFERENCE_FILE
    try:
        texts = TEXTS if options.texts is None else read_texts(options.texts)
        examples = reference_examples(options.model, texts)
        write_reference(out, examples, {name: version(name) for name in _LIBRARIES})
    except (ConfigError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{len(examples)} examples written to {out}\n")


def read_texts(file: Path) -> tuple[str, ...]:
    """The lines of `file` that are not empty. Raises `ConfigError` for none or too many."""
    texts = tuple(line for line in file.read_text(encoding="utf-8").splitlines() if line)
    if not 0 < len(texts) <= MAX_EXAMPLES:
        raise ConfigError(f"{file}: {len(texts)} texts; 1 to {MAX_EXAMPLES} make a reference")
    return texts


def reference_examples(folder: Path, texts: Sequence[str]) -> list[ReferenceExample]:
    """What sentence-transformers makes of `texts`, without prompt.

    Raises `CheckpointError` for a folder that the engine cannot serve, and `ConfigError` for a model that
    does not embed, for a folder that sentence-transformers cannot load, and for a text that it would cut.
    """
    if ModelSource.read(folder).task != "embed":
        raise ConfigError(f"{folder}: reference files are for models that embed texts")
    model = _load(folder)
    return [_example(model, text) for text in texts]


def _load(folder: Path) -> SentenceTransformer:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError("sentence-transformers computes the reference, and is not installed") from error
    try:
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True).float()
    except Exception as error:
        raise ConfigError(f"{folder}: sentence-transformers cannot load it ({error})") from error


def _example(model: SentenceTransformer, text: str) -> ReferenceExample:
    features = model.preprocess([text])
    ids = features["input_ids"][0][features["attention_mask"][0].bool()].numpy().astype(np.int32)
    if model.max_seq_length is not None and len(ids) >= model.max_seq_length:
        raise ConfigError(
            f"the text {text[:40]!r} reaches the model's limit of {model.max_seq_length} tokens"
        )
    vector = model.encode(text, prompt="", convert_to_numpy=True)
    return ReferenceExample(text, ids, np.asarray(vector, np.float32))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tulip_server.reference",
        description="Write a model's reference file: texts, their ids and vectors by sentence-transformers."
        " Gateways and servers of the model check themselves against it when they start.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model's folder")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="a text on every line (a built-in dozen)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to write (MODEL/{REFERENCE_FILE})")
    return parser


if __name__ == "__main__":
    main()
