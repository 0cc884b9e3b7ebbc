"""How a bi-encoder's folder becomes a cross-encoder: batches, the loss, averaged weights, early choice.

Needs torch and transformers, not the stack, so that it runs on a bare machine with a GPU.
"""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification, PreTrainedTokenizerBase

from benchmarks.retrieval import DEPTH, Array, Retrieval, nearest, ranks_among
from benchmarks.training_groups import Group, GroupSource, Sentences, Split
from benchmarks.xquad import Xquad

MAX_LENGTH = 384  # tokens of a pair; longer passages are cut
NEIGHBOURS = 40  # of each passage, to draw negatives from
RECORD = "training.json"  # beside the weights
_PROGRESS_SECONDS = 15.0
_SHARD_SIZE = "25MB"

PairIds = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is learnt from, and how fast."""

    cloze_share: float = 0.0  # of the groups; the first fifth of the time has twice as many
    teacher_weight: float = (
        0.0  # of the bi-encoder's distribution in the target, at the start; halved by the end
    )
    learning_rate: float = 1e-4  # of the last layer; each one below has a tenth less
    head_rate: float = 5e-4
    dropout: float = 0.1


RECIPES = {
    "questions": Recipe(),
    "cloze": Recipe(cloze_share=0.4),
    "distilled": Recipe(cloze_share=0.4, teacher_weight=0.5),
    "distilled-slow": Recipe(cloze_share=0.4, teacher_weight=0.5, learning_rate=4e-5),
    "distilled-cloze": Recipe(cloze_share=0.7, teacher_weight=0.3, learning_rate=1.5e-4),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one training run."""

    recipe: str = "distilled"
    seconds: float = 200.0
    negatives: int = 9  # of each query
    groups_per_step: int = 32
    validations: int = 6  # 0: train on the validation articles too, and keep the last weights
    seed: int = 0
    save_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Validation:
    """The questions of the validation articles at some time of a run."""

    seconds: float
    hit_at_1: float
    mrr_at_10: float


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What a saved folder says of its making."""

    settings: Settings
    recipe: Recipe
    device: str
    seconds: float
    steps: int
    last_loss: float  # mean of the last 40 steps
    bi_encoder: Validation | None  # on the validation questions
    validations: list[Validation]

    def write(self, folder: Path) -> None:
        """Beside the weights."""
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainingRecord:
        """Raises `OSError` for a folder that no training wrote."""
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        bi_encoder = content["bi_encoder"]
        parsed = {
            "settings": Settings(**content["settings"]),
            "recipe": Recipe(**content["recipe"]),
            "bi_encoder": None if bi_encoder is None else Validation(**bi_encoder),
            "validations": [Validation(**each) for each in content["validations"]],
        }
        return cls(**(content | parsed))


class BiEncoder:
    """The base folder as it was published: means over tokens, of length 1."""

    def __init__(self, base: str, device: str) -> None:
        self._model = AutoModel.from_pretrained(base, dtype=torch.float32).to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(base, model_max_length=256)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Vectors `[texts, D]`."""
        return torch.cat([self._encode(texts[i : i + 64]) for i in range(0, len(texts), 64)])

    def _encode(self, texts: Sequence[str]) -> Tensor:
        inputs = self._tokenizer(list(texts), truncation=True, padding=True, return_tensors="pt")
        inputs = inputs.to(self._model.device)
        states_BTD = self._model(**inputs).last_hidden_state
        return F.normalize((states_BTD * inputs["attention_mask"][..., None]).sum(1), dim=1)


class PairEncoder:
    """Pairs as padded tensors. Sentences are tokenized once: few of them make up all passages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._sentences: dict[str, list[int]] = {}

    def pairs(self, query: str, passages: Sequence[Sentences]) -> list[PairIds]:
        """Ids of `query` with each passage, which is cut so that a pair has at most MAX_LENGTH."""
        query_ids, most = self._ids(query), MAX_LENGTH - 3
        ids = ([token for sentence in p for token in self._sentence_ids(sentence)] for p in passages)
        return [(query_ids, each[: most - len(query_ids)]) for each in ids]

    def _sentence_ids(self, sentence: str) -> list[int]:
        if sentence not in self._sentences:
            self._sentences[sentence] = self._ids(sentence)
        return self._sentences[sentence]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def tensors(self, pairs: Sequence[PairIds], device: torch.device) -> dict[str, Tensor]:
        """`[pairs, longest]`: [CLS] query [SEP] passage [SEP], the second part in segment 1."""
        cls, sep = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        arrays = np.zeros((3, len(pairs), max(len(q) + len(p) for q, p in pairs) + 3), np.int64)
        for row, (query, passage) in enumerate(pairs):
            ids = [cls, *query, sep, *passage, sep]
            arrays[0, row, : len(ids)] = ids
            arrays[1, row, : len(ids)] = 1
            arrays[2, row, len(query) + 2 : len(ids)] = 1
        names = ("input_ids", "attention_mask", "token_type_ids")
        tensor = torch.from_numpy(arrays)
        moved = tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
        return dict(zip(names, moved, strict=True))


class Trainer:
    """A cross-encoder with a new head of one label, what moves its weights, and their running average.

    The embeddings stay as they are, so that words of training articles do not drift away from all others.
    """

    def __init__(self, base: str, settings: Settings, device: str) -> None:
        torch.manual_seed(settings.seed)
        self._recipe = recipe = RECIPES[settings.recipe]
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), recipe.dropout)
        self.model = BertForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32, **dropout
        )
        self.model.to(device).train()
        self.model.bert.embeddings.requires_grad_(False)
        self.average = copy.deepcopy(self.model).eval()
        self.pairs = PairEncoder(AutoTokenizer.from_pretrained(base, model_max_length=MAX_LENGTH))
        self._teacher = BiEncoder(base, device) if recipe.teacher_weight else None
        self._optimizer = torch.optim.AdamW(self._parameter_groups(), weight_decay=0.01)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self.steps = 0

    def _parameter_groups(self) -> list[dict[str, object]]:
        layers, recipe = self.model.bert.encoder.layer, self._recipe
        rates = [recipe.learning_rate * 0.9 ** (len(layers) - 1 - i) for i in range(len(layers))]
        groups = [
            {"params": list(layer.parameters()), "lr": rate}
            for layer, rate in zip(layers, rates, strict=True)
        ]
        head = [*self.model.bert.pooler.parameters(), *self.model.classifier.parameters()]
        return [*groups, {"params": head, "lr": recipe.head_rate}]

    def step(self, groups: Sequence[Group], passages_PD: Tensor, progress: float) -> Tensor:
        """Learn from `groups` at this share of the run; their loss, still on the device."""
        rate = min(1.0, progress / 0.06 + 0.01) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group, base_rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = base_rate * rate
        logits_GN = self.logits(groups)
        loss = F.cross_entropy(logits_GN, self._targets(groups, passages_PD, progress))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._add_to_average()
        return loss.detach()

    def _targets(self, groups: Sequence[Group], passages_PD: Tensor, progress: float) -> Tensor:
        """Distributions `[groups, passages]`: the own passage, mixed with what the bi-encoder finds alike."""
        own_GN = torch.zeros(len(groups), len(groups[0].passages), device=passages_PD.device)
        own_GN[:, 0] = 1
        if self._teacher is None:
            return own_GN
        queries_GD = self._teacher.encode([group.query for group in groups])
        numbers_GN = torch.tensor([group.numbers for group in groups], device=passages_PD.device)
        cosines_GN = (passages_PD[numbers_GN] @ queries_GD[:, :, None])[..., 0]
        weight = self._recipe.teacher_weight * (1 - progress / 2)
        return (1 - weight) * own_GN + weight * (20 * cosines_GN).softmax(1)

    def logits(self, groups: Sequence[Group], parts: int = 4) -> Tensor:
        """`[groups, passages]`, with the weights that learn; pairs of one length are computed together."""
        encoded = [pair for group in groups for pair in self.pairs.pairs(group.query, group.passages)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]) + len(encoded[i][1]))
        device, size = self.model.device, -(-len(order) // parts)
        pooled = []
        with torch.autocast(device.type, torch.bfloat16):
            for start in range(0, len(order), size):
                inputs = self.pairs.tensors([encoded[i] for i in order[start : start + size]], device)
                pooled.append(self.model.bert(**inputs).pooler_output)
        # The last product in float32: bfloat16 would make logits near each other equal.
        logits = self.model.classifier(self.model.dropout(torch.cat(pooled).float()))[:, 0]
        return logits[torch.tensor(order, device=device).argsort()].view(len(groups), -1)

    @torch.no_grad()
    def _add_to_average(self) -> None:
        """Over the last thousand steps or so, fewer at the start."""
        self.steps += 1
        kept = min(0.998, self.steps / (self.steps + 10))
        learnt = [p for p in self.model.parameters() if p.requires_grad]
        averages = [p for p in self.average.parameters() if p.requires_grad]
        torch._foreach_lerp_(averages, learnt, 1 - kept)

    @torch.inference_mode()
    def averaged_logits(self, query: str, passages: Sequence[Sentences]) -> Array:
        """Of one query with passages, by the averaged weights in float32."""
        inputs = self.pairs.tensors(self.pairs.pairs(query, passages), self.average.device)
        logits: Array = self.average(**inputs).logits[:, 0].cpu().numpy()
        return logits

    def save(self, folder: Path, dtype: str) -> None:
        """An ordinary cross-encoder's folder, in files of at most 25 MB."""
        model = copy.deepcopy(self.average).to(getattr(torch, dtype))
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
        self.pairs.tokenizer.save_pretrained(folder)


class Run:
    """One training run from the base folder to the saved one."""

    def __init__(self, data: Xquad, base: str, settings: Settings, device: str, out: Path) -> None:
        self._data, self._settings, self._device, self._out = data, settings, device, out
        self._split = Split.by_article(data, validate=settings.validations > 0)
        encoder = BiEncoder(base, device)
        self._passages_PD, questions_QD = encoder.encode(data.passages), encoder.encode(data.questions)
        self._trainer = Trainer(base, settings, device)
        self._source = self._group_source(questions_QD.cpu().numpy())
        self._validation_candidates = self._candidates_to_validate(questions_QD.cpu().numpy())
        self._losses: list[Tensor] = []
        self._validations: list[Validation] = []
        self._begin = time.monotonic()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _group_source(self, questions_QD: Array) -> GroupSource:
        passages_PD = self._passages_PD.cpu().numpy()
        return GroupSource(
            self._data,
            self._split,
            nearest(questions_QD, passages_PD),
            nearest(passages_PD, passages_PD, NEIGHBOURS + 1),
            self._settings.negatives,
            random.Random(self._settings.seed),
        )

    def _candidates_to_validate(self, questions_QD: Array) -> Array:
        """The nearest ten `[validation questions, 10]` of all passages that are not held out."""
        allowed = np.concatenate(self._split.passages(self._data))
        passages_PD = self._passages_PD.cpu().numpy()[allowed]
        candidates: Array = allowed[nearest(questions_QD[self._split.validation], passages_PD, DEPTH)]
        return candidates

    def train(self) -> TrainingRecord:
        """Until the time is used up; the best average, or without validation the last, is in the folder."""
        self._begin = said = time.monotonic()
        settings, validated = self._settings, 0
        cloze_share = RECIPES[settings.recipe].cloze_share
        while (progress := self._seconds / settings.seconds) < 1:
            share = min(1.0, cloze_share * (2 if progress < 0.2 else 1))
            groups = self._source.draw(settings.groups_per_step, share)
            self._losses.append(self._trainer.step(groups, self._passages_PD, progress))
            if time.monotonic() - said > _PROGRESS_SECONDS:
                said = time.monotonic()
                self._say(
                    f"loss {self._recent_loss:.3f}, about {settings.seconds - self._seconds:.0f} s left"
                )
            if progress * settings.validations >= validated + 1:
                validated += 1
                self._validate()
        if settings.validations > 0:
            self._validate()
        else:
            self._save()
        return self._record()

    @property
    def _recent_loss(self) -> float:
        """Mean of the last 40 steps."""
        return torch.stack(self._losses[-40:]).mean().item()

    def _say(self, what: str) -> None:
        print(f"{self._seconds:.0f} s, step {len(self._losses)}: {what}", flush=True)

    def _validate(self) -> None:
        """Measure the averaged weights, and save them when they are the best so far."""
        scores = np.stack(
            [
                self._trainer.averaged_logits(
                    self._data.questions[q], [(self._data.passages[i],) for i in row]
                )
                for q, row in zip(self._split.validation, self._validation_candidates, strict=True)
            ]
        )
        found = self._measured(scores)
        self._say(f"validation hit@1 {found.hit_at_1:.3f}, MRR@10 {found.mrr_at_10:.3f}")
        best = max((each.mrr_at_10 for each in self._validations), default=-1.0)
        self._validations.append(found)
        if found.mrr_at_10 > best:
            self._save()

    def _measured(self, scores: Array) -> Validation:
        answers = np.array(self._data.answers)[self._split.validation]
        found = Retrieval.of_ranks(ranks_among(self._validation_candidates, scores, answers))
        return Validation(round(self._seconds, 1), found.hit_at_1, found.mrr_at_10)

    def _save(self) -> None:
        self._trainer.save(self._out, self._settings.save_dtype)

    def _record(self) -> TrainingRecord:
        candidates = self._validation_candidates
        as_found = np.broadcast_to(-np.arange(DEPTH, dtype=np.float32), candidates.shape)
        record = TrainingRecord(
            self._settings,
            RECIPES[self._settings.recipe],
            self._device,
            round(self._seconds, 1),
            len(self._losses),
            self._recent_loss,
            self._measured(as_found) if len(candidates) else None,
            self._validations,
        )
        record.write(self._out)
        return record


def export_base(base: str, folder: Path) -> None:
    """The base folder again with its weights in float16: half the size, to carry to another machine."""
    AutoModel.from_pretrained(base, dtype=torch.float16).save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
